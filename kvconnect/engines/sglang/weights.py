"""Which weights an SGLang rank computes with, and how KVConnect learns that they change.

SGLang tells its transfer and storage backends nothing of its weights. So this module hooks the
functions of a scheduler's process that load and update them. All of it runs on the scheduler's
thread. Importing it imports neither SGLang nor torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import ref

import msgspec

from kvconnect.cache.model_identity import loaded_files
from kvconnect.protocol.identity import Identity, Weights

if TYPE_CHECKING:
    import torch

    from kvconnect.engines.loaded_weights import LoadedWeights

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = f"{_SCHEDULER}_components.weight_updater.SchedulerWeightUpdaterManager"
_MODELS = ("target", "draft")
_UNDECLARED = ("", "default")  # versions
_FILE_FORMATS = {
    *("auto", "mistral", "safetensors", "fastsafetensors", "instanttensor", "gguf"),
    *("bitsandbytes", "layered", "flash_rl", "runai_streamer", "dummy"),
}
"""Load formats with which a server loads the files that :func:`loaded_files` reads, or none."""


@dataclass
class _RankWeights:
    """The weights of this process's rank.

    Attributes:
        runners: model runners, by model.
        models: what is known of the models' weights; empty if nothing here depends on them.
        start: their weights when the process started, where stored pages go by the files of these.
        session: an update by parts is under way; the models that it updates.
        version: that the session declares.
        in_call: a call that updates weights runs. Where it has failed, a rank does not flush.
        old_pages: pages of former weights may be in SGLang's own caches: none was flushed since.
        unknown: the generation of pages while that is so; empty if there was no update. HiCache's
            threads may store former pages under it, so each step of an update has another one.
        asleep: the memory of the weights is gone.
        listeners: are called when the weights change.
    """

    runners: dict[str, Callable[[], Any]] = field(default_factory=dict)
    models: dict[str, LoadedWeights] = field(default_factory=dict)
    start: dict[str, Weights] = field(default_factory=dict)
    session: tuple[str, ...] = ()
    version: str = ""
    in_call: bool = False
    old_pages: bool = False
    unknown: bytes = b""
    asleep: bool = False
    listeners: list[Callable[[], None]] = field(default_factory=list)


_state = _RankWeights()
_watching = False


def watch() -> None:
    """Register the hooks if this is a scheduler's process. The plugin calls this when loaded."""
    global _watching
    if _SCHEDULER not in sys.modules:
        return  # other processes have no weights, and should not have to import a scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, before, after in (
        (f"{_RUNNER}.load_model", None, _loaded),
        (f"{_UPDATER}.update_weights_from_disk", _begin_all, _updated_from_disk),
        (f"{_UPDATER}.update_weights_from_ipc", _begin_all, _updated_at_once),
        (f"{_UPDATER}.begin_weight_update", _begin, None),
        (f"{_UPDATER}.update_weights_from_tensor", _begin_call, _updated_part),
        (f"{_UPDATER}.update_weights_from_distributed", _begin_call, _updated_part),
        (f"{_UPDATER}.end_weight_update", None, _end),
        (f"{_UPDATER}.release_memory_occupation", _release, None),
        (f"{_UPDATER}.resume_memory_occupation", None, _resume),
        (f"{_SCHEDULER}.Scheduler.handle_update_weight_version", None, _declared),
        (f"{_SCHEDULER}.Scheduler.flush_cache", None, _flushed),
    ):
        if before is not None:
            HookRegistry.register(target, before, HookType.BEFORE)
        if after is not None:
            HookRegistry.register(target, after, HookType.AFTER)
    _watching = True


def follow() -> None:
    """Know from now on which weights this rank has; call it once they are loaded. Log a warning if
    updates would go unnoticed."""
    _follow()
    if not _watching:
        logger.warning(
            "SGLang has not loaded KVConnect's plugin (is SGLANG_PLUGINS set?): restart the server "
            "after an update of weights, or it uses stored pages of the old ones"
        )


def identity(*, mixes: bool = False) -> Identity:
    """Return which weights this rank has."""
    models = _follow()
    draft = models["draft"].known if "draft" in models else Weights()
    return Identity(weights=models["target"].known, draft=draft, mixes_weights=mixes)


def listen(listener: Callable[[], None]) -> Callable[[], None]:
    """Have ``listener`` called when :func:`identity` may return something else; return a function
    that ends this, to be called at most once."""
    listeners = _state.listeners
    listeners.append(listener)
    return partial(listeners.remove, listener)


def generation() -> bytes:
    """Return the part of page names that identifies the present weights: empty for those that the
    process started with. After an update it is the same in all processes that were updated alike,
    once the caches are flushed; until then it is known to this process alone."""
    if _state.old_pages or not _state.models:
        return _state.unknown
    target, *draft = map(_generation, _state.models)
    return joined(target, *draft) if any(draft) else target


def joined(*generations: bytes) -> bytes:
    """Return one generation for several weights."""
    text = "|".join(each.hex() for each in generations)
    return blake2b(text.encode(), digest_size=16).digest()


def _generation(name: str) -> bytes:
    from kvconnect.engines.loaded_weights import generation_of

    known, start = _state.models[name].known, _state.start[name]
    if known == start and not _state.unknown:  # there was no update
        return b""
    return _state.unknown if known == Weights() else generation_of(start, known)


def are_of_files(load_format: Any) -> bool:
    """Whether weights that this server loads in a format are those of the model's files, or of no
    files. Others come from other files, or from a server that may have updated them."""
    from sglang.srt.runtime_context import get_model

    name = getattr(load_format, "value", load_format)
    return name in _FILE_FORMATS and get_model().weight_cache_mode != "client"


def draft_format() -> Any:
    """Return the format in which this server loads its draft model."""
    from sglang.srt.runtime_context import get_model, get_spec

    return get_spec().speculative_draft_load_format or get_model().load_format


def _follow() -> dict[str, LoadedWeights]:
    """Return what is known of the models. The first call finds out: files may change later."""
    if not _state.models:
        from sglang.srt.runtime_context import get_model, get_spec

        from kvconnect.engines.loaded_weights import LoadedWeights

        updated = bool(_state.unknown)
        start, formats = {"target": _start_weights()}, {"target": get_model().load_format}
        if get_spec().speculative_draft_model_path:
            start["draft"], formats["draft"] = _draft_weights(), draft_format()
        for name, weights in start.items():
            # SGLang goes on naming the files that it started with, also after an update.
            model = LoadedWeights(Weights() if updated else weights, _parameters_of(name))
            model.start()
            _state.models[name] = model
            if are_of_files(formats[name]):
                _state.start[name] = weights if updated else model.known
                continue
            _state.start[name] = Weights()  # stored pages go by what is known of the weights
            if model.known == Weights():
                _state.unknown = os.urandom(16)
    return _state.models


def _start_weights() -> Weights:
    from sglang.srt.runtime_context import get_model, get_serving

    model, declared = get_model(), str(get_serving().weight_version or "")
    version = "" if declared in _UNDECLARED else declared
    found = _of_files(str(model.model_path), model.revision, model.load_format)
    return msgspec.structs.replace(found, version=version) if version else found


def _draft_weights() -> Weights:
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    path, revision = str(spec.speculative_draft_model_path), spec.speculative_draft_model_revision
    return Weights(files=_of_files(path, revision, draft_format()).files)


def _of_files(path: str, revision: str | None, load_format: Any) -> Weights:
    """Return what the files of a model say of weights that were loaded in a format."""
    from sglang.srt.runtime_context import get_model

    if load_format == "dummy" or not are_of_files(load_format):
        return Weights()
    cache, consolidated = get_model().download_dir, load_format == "mistral"
    files = loaded_files(path, revision, cache, consolidated)
    return Weights(files=files, version="" if files or not revision else f"{path}@{revision}")


def _parameters_of(name: str) -> Callable[[], Iterable[torch.Tensor] | None]:
    def parameters() -> Iterable[torch.Tensor] | None:
        from sglang.srt.runtime_context import get_server_args

        runner = _state.runners.get(name, lambda: None)()
        if runner is None or _state.asleep:
            return None
        if get_server_args().enable_eplb:
            return ()  # experts that are moved between ranks change the parameters
        found: Iterable[torch.Tensor] = runner.model.parameters()
        return found

    return parameters


def _look(version: str = "") -> None:
    """The weights may have changed; ``version``: they are declared to have it."""
    for model in _state.models.values():
        model.look(version)
    if any(model.known == Weights() for model in _state.models.values()):
        _state.unknown = os.urandom(16)
    _show()


def _rename() -> None:
    """Find no page any more that was stored since the update began."""
    _state.unknown = os.urandom(16)
    _show()


def _show() -> None:
    """Tell the listeners that this rank may have other weights."""
    for listener in _state.listeners:
        listener()


# Hooks are given what SGLang's functions are: the object, and a request.
def _loaded(_result: Any, runner: Any, *_: Any, **__: Any) -> None:
    _state.runners.setdefault(_MODELS[bool(runner.is_draft_worker)], ref(runner))


def _begin_all(*_: Any, **__: Any) -> None:
    _begin_call()
    _open(_MODELS)


def _begin_call(*_: Any, **__: Any) -> None:
    _state.in_call = True


def _begin(updater: Any, request: Any, *_: Any, **__: Any) -> None:
    if updater._session is None:
        _open(tuple(name for name in _MODELS if request.selector in ("all", name)) or _MODELS)


def _open(names: tuple[str, ...]) -> None:
    """The weights of some models are being replaced, also if nothing depends on them yet."""
    _state.session, _state.version = names, ""
    _state.old_pages = True
    for name, model in _state.models.items():
        if name in names:
            model.updating()
    _rename()


def _close(*, files: str = "", version: str = "", failed: bool = False) -> None:
    """The update is over; ``files``: of the target's new weights."""
    for name, model in _state.models.items():
        if failed or name not in _state.session:
            model.look()
        else:
            model.updated(files=files if name == "target" else "", version=version)
    _state.session, _state.in_call = (), False
    _rename()


def _updated_from_disk(result: Any, updater: Any, request: Any, *_: Any, **__: Any) -> None:
    """SGLang says that it failed if only its flush was refused; the weights are new then."""
    failed = not result.success and "Weights were updated" not in result.message
    files = ""
    if _state.models and not failed:
        files = _of_files(str(request.model_path), None, request.load_format or "auto").files
    _flushed_within(result, updater, request)
    _close(files=files, version=request.weight_version or "", failed=failed)


def _updated_at_once(result: Any, updater: Any, request: Any, *_: Any, **__: Any) -> None:
    failed = not result.success and "Weights were updated" not in result.message
    _flushed_within(result, updater, request)
    _close(version=request.weight_version or "", failed=failed)


def _flushed_within(result: Any, updater: Any, request: Any) -> None:
    """An update in one call has flushed the caches itself if it was asked to and succeeded: nothing
    was computed between the new weights and the flush."""
    if request.flush_cache and result.success and not _stores(updater.scheduler):
        _state.old_pages = False


def _stores(scheduler: Any) -> bool:
    """Whether a decode server is still storing pages of former weights: a flush does not wait for
    those of ``--disaggregation-decode-enable-offload-kvcache``."""
    manager = getattr(scheduler, "decode_offload_manager", None)
    if not (manager and manager.ongoing_backup):
        return False
    logger.warning(
        "pages of the former weights are still being stored: until a later flush, pages get names "
        "that only this process knows"
    )
    return True


def _updated_part(_result: Any, _updater: Any, request: Any, *_: Any, **__: Any) -> None:
    _state.version, _state.in_call = request.weight_version or _state.version, False
    if _state.session:
        _rename()


def _end(result: Any, *_: Any, **__: Any) -> None:
    if result.success:
        _close(version=_state.version)


def _declared(_result: Any, _scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    _look(request.new_version)


def _flushed(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """SGLang has forgotten all pages, unless it refused to, as while requests run."""
    if result is False or _state.in_call:
        return
    if _state.session or (_state.old_pages and _stores(scheduler)):
        _rename()
        return
    _state.old_pages = False
    _look()


def _release(_updater: Any, request: Any, *_: Any, **__: Any) -> None:
    _state.asleep |= _has_weights(request.tags)


def _resume(_result: Any, _updater: Any, request: Any, *_: Any, **__: Any) -> None:
    if _has_weights(request.tags):
        _state.asleep = False
        _look()


def _has_weights(tags: Sequence[str] | None) -> bool:
    return not tags or "weights" in tags
