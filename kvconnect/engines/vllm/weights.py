"""Which weights a vLLM engine computes with, and how KVConnect learns that they change.

vLLM tells connectors nothing of its weights. So this module extends the methods of its worker that
change them, and the method of its core that takes the version which a trainer declares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from hashlib import blake2b
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker

from kvconnect.cache.model_identity import loaded_files
from kvconnect.engines.loaded_weights import LoadedWeights, generation_of
from kvconnect.engines.vllm.messages import LookAtWeights, LookedAtWeights
from kvconnect.protocol.identity import Identity, Weights

FILE_FORMATS = {
    *("auto", "hf", "mistral", "safetensors", "fastsafetensors", "instanttensor"),
    *("runai_streamer", "dummy"),
}
"""Load formats with which an engine loads the files that :func:`loaded_files` reads, or none."""


class HoldsWeights(Protocol):
    """A connector's part in a worker. Called on the worker's main thread."""

    def weights_updating(self, *, draft: bool) -> None:
        """The weights of the model, or of the draft model, are being replaced."""

    def weights_updated(self, *, draft: bool, from_files: bool) -> None:
        """They have been replaced; ``from_files``: by those of the model's path."""

    def weights_awake(self) -> None:
        """The weights' memory is back after a sleep."""


class NamesWeights(Protocol):
    """A connector's part in the engine's core. Called on the core's main thread."""

    def weights_declared(self, version: str) -> None:
        """The engine was told the version of its weights."""


_holders: WeakSet[Any] = WeakSet()  # a process has one; more under MultiConnector
_namers: WeakSet[Any] = WeakSet()


class _PresentWorker:
    """The worker of this process. ``asleep``: the memory of its weights is gone."""

    get: Callable[[], Any] = staticmethod(lambda: None)
    asleep = False


def follow_worker(part: HoldsWeights) -> None:
    """Tell a part when the weights of this process's worker change."""
    extend_worker(Worker)
    _holders.add(part)


def follow_core(part: NamesWeights) -> None:
    """Tell a part which version the weights of this process's engine are declared to have."""
    extend_core(EngineCore)
    _namers.add(part)


def extend_worker(worker: type[Any]) -> None:
    """Make a worker class tell of new weights and of sleep. Idempotent."""
    if getattr(worker, "_kvconnect_tells", False):
        return
    worker._kvconnect_tells = True
    _around(worker, "get_kv_connector_handshake_metadata", before=_meet)
    _around(worker, "sleep", before=_fall_asleep)
    _around(worker, "discard", before=_discard)
    _around(worker, "wake_up", after=_wake_up)
    _around(worker, "start_weight_update", before=_start)
    _around(worker, "start_draft_weight_update", before=_start_draft)
    _around(worker, "finish_weight_update", after=_finish)
    _around(worker, "reload_weights", before=_start, after=_reloaded)


def extend_core(core: type[Any]) -> None:
    """Make a core class tell of declared versions. Idempotent."""
    if not getattr(core, "_kvconnect_tells", False):
        core._kvconnect_tells = True
        _around(core, "set_weight_version", after=_declared)


def _around(
    owner: type[Any],
    name: str,
    before: Callable[..., None] = lambda *_, **__: None,
    after: Callable[..., None] = lambda *_, **__: None,
) -> None:
    """Call ``before`` and ``after`` a method with its arguments."""
    method = getattr(owner, name)

    @wraps(method)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        result = method(self, *args, **kwargs)
        after(self, *args, **kwargs)
        return result

    setattr(owner, name, told)


def _meet(worker: Any) -> None:
    _PresentWorker.get = ref(worker)


def _fall_asleep(_worker: Any, *_: Any, **__: Any) -> None:
    _PresentWorker.asleep = True


def _discard(_worker: Any, tags: Collection[str]) -> None:
    _PresentWorker.asleep |= "weights" in tags


def _wake_up(_worker: Any, tags: Collection[str] | None = None) -> None:
    if tags is None or "weights" in tags:
        _PresentWorker.asleep = False
        for part in list(_holders):
            part.weights_awake()


def _start(_worker: Any, *_: Any, **__: Any) -> None:
    for part in list(_holders):
        part.weights_updating(draft=False)


def _start_draft(_worker: Any) -> None:
    for part in list(_holders):
        part.weights_updating(draft=True)


def _finish(worker: Any) -> None:
    for part in list(_holders):
        part.weights_updated(draft=worker._weight_update_is_draft, from_files=False)


def _reloaded(_worker: Any, weights_iterator: Any = None, *_: Any, **__: Any) -> None:
    for part in list(_holders):
        part.weights_updated(draft=False, from_files=weights_iterator is None)


def _declared(_core: Any, weight_version: str) -> None:
    for part in list(_namers):
        part.weights_declared(weight_version)


class WorkerWeights:
    """The weights of a worker's model and of its draft model. Owned by the worker's main thread.

    Attributes:
        computed: KV was computed since the engine last forgot all.
        mixed: weights were replaced after that, so its caches may have KV of former ones.
    """

    def __init__(self, config: VllmConfig, *, mixes: bool) -> None:
        self.computed = self.mixed = False
        self._config = config
        self._mixes = mixes
        self._models = [
            LoadedWeights(weights, self._parameters_of(getter))
            for weights, getter in zip(
                _start_weights(config), ("get_model", "get_draft_model"), strict=True
            )
        ]

    @property
    def identity(self) -> Identity:
        """What the worker's peers are told."""
        model, draft = (loaded.known for loaded in self._models)
        return Identity(weights=model, draft=draft, mixes_weights=self._mixes)

    def start(self) -> None:
        """The weights are those that the engine starts with. Idempotent."""
        for model in self._models:
            model.start()

    def look(self, version: str = "", *, reset: bool = False) -> None:
        """The weights may have changed; ``version``: they are declared to have it. ``reset``: the
        engine has forgotten all KV."""
        if reset:
            self.computed = self.mixed = False
        for model in self._models:
            before = model.known.parameters
            model.look(version)
            others = {before, model.known.parameters} - {""}
            self.mixed |= self.computed and len(others) > 1

    def updating(self, *, draft: bool) -> None:
        """The weights of the model, or of the draft model, are being replaced."""
        self.mixed |= self.computed
        self._models[draft].updating()

    def updated(self, *, draft: bool, from_files: bool) -> None:
        """They have been replaced; ``from_files``: by those of the path in vLLM's configuration."""
        self.mixed |= self.computed
        config = self._config
        files = _files(config.load_config, config.model_config) if from_files else ""
        self._models[draft].updated(files=files)
        self._models[not draft].look()

    def _parameters_of(self, getter: str) -> Callable[[], Iterable[torch.Tensor] | None]:
        def parameters() -> Iterable[torch.Tensor] | None:
            worker = _PresentWorker.get()
            if worker is None or _PresentWorker.asleep:
                return None
            if self._config.parallel_config.enable_eplb:
                return ()  # experts that are moved between ranks change the parameters
            model = getattr(worker, getter, lambda: None)()
            return None if model is None else model.parameters()

        return parameters


class EngineWeights:
    """The weights of all workers, as these report them. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self._start: dict[tuple[int, int], Identity] = {}
        self._present: dict[tuple[int, int], Identity] = {}
        self._order: LookAtWeights | None = None  # not given yet
        self._number = 0  # of the last order
        self._awaited: set[tuple[int, int]] = set()  # workers that have not answered it
        self._answered = False  # the last reports completed the answers
        self._mixed: set[tuple[int, int]] = set()  # workers with KV of several weights

    @property
    def pending(self) -> bool:
        """Whether the workers are to be asked."""
        return self._order is not None

    def greet(self, identities: Mapping[tuple[int, int], Identity]) -> None:
        """Take the weights that the workers start with."""
        self._start = self._start or dict(identities)
        self._present = dict(identities)

    def look(self, version: str = "", *, reset: bool = False) -> None:
        """The weights may have changed; ``version``: they are declared to have it. ``reset``: the
        engine has forgotten all KV."""
        if self._order is None:
            self._number += 1
        before = self._order or LookAtWeights(self._number, "")
        version, reset = version or before.version, reset or before.reset
        self._order = LookAtWeights(self._number, version, reset)

    def take(self) -> LookAtWeights | None:
        """Return the order for the workers of the next step."""
        order, self._order = self._order, None
        if order is not None:
            self._awaited = set(self._present)
        return order

    def on_reports(self, identities: Mapping[tuple[int, int], LookedAtWeights]) -> bool:
        """Take workers' reports; return whether some weights are others than before."""
        changed, awaited = False, bool(self._awaited)
        for place, (number, identity, mixed) in identities.items():
            (self._mixed.add if mixed else self._mixed.discard)(place)
            changed |= self._present.get(place) != identity
            self._present[place] = identity
            if number == self._number:
                self._awaited.discard(place)
        self._answered = awaited and not (self._awaited or self.pending)
        return changed

    def settled(self) -> bytes | None:
        """Return what separates stored blocks of these weights from those of others, if the last
        reports were the rest of the answers to an order. If all ranks have one version, engines of
        other ranks name it alike. None while KV of former weights may be among that of these: other
        engines must not find it."""
        if not self._answered or self._mixed:
            return None
        parts = [
            generation_of(self._start.get(place, identity).weights, identity.weights)
            for place, identity in sorted(self._present.items())
        ]
        one = len(set(parts)) == 1
        return parts[0] if one else blake2b(b"".join(parts), digest_size=16).digest()


def _start_weights(config: VllmConfig) -> tuple[Weights, Weights]:
    """Return what is known of the weights that the engine loads, and of its draft model's."""
    draft = getattr(config.speculative_config, "draft_model_config", None)
    loaded = _of_files(config.load_config, config.model_config)
    return loaded, _of_files(draft_loader(config), draft) if draft else Weights()


def _of_files(loader: LoadConfig, model: ModelConfig) -> Weights:
    if loader.load_format == "dummy" or loader.load_format not in FILE_FORMATS:
        return Weights()
    files, revision = _files(loader, model), model.revision
    return Weights(
        files=files, version="" if files or not revision else f"{model.model}@{revision}"
    )


def _files(loader: LoadConfig, model: ModelConfig) -> str:
    if loader.load_format not in FILE_FORMATS:
        return ""
    consolidated = prefers_consolidated(loader)
    return loaded_files(str(model.model), model.revision, loader.download_dir, consolidated)


def draft_loader(config: VllmConfig) -> LoadConfig:
    """Return how the engine loads its draft model."""
    own: LoadConfig | None = getattr(config.speculative_config, "draft_load_config", None)
    return own or config.load_config


def prefers_consolidated(loader: LoadConfig) -> bool:
    """Return whether the engine loads Mistral's files where a model has both kinds."""
    return loader.load_format in ("auto", "mistral")
