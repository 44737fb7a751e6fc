"""One vLLM engine in a process of its own, forked from one that has imported vLLM.

An engine of a tiny model starts in two to four seconds this way. It computes in the process that
asks it: scheduler, worker and both halves of the connector.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, Self

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "kvconnect",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
MODULES = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "kvconnect.engines.vllm.connector")
_PRELOADED = ("vllm.", "torch.", "transformers.", "kvconnect.")
STOP_S = 20.0
SETTLE_S = 20.0
REHEARSAL_S = 120.0
_PAUSE_S = 0.02


class Answer(NamedTuple):
    """One request's greedy tokens, their log probabilities, and what some cache had of it."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    ticket: dict[str, Any] | None


class EngineFailed(RuntimeError):
    """The engine did not start or answer; the message is the last line that it said.

    ``refused`` says whether that line is a KVConnect refusal.
    """

    def __init__(self, text: str, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


@dataclass(frozen=True)
class Settings:
    """How an engine is started.

    Attributes:
        model: folder with ``config.json``.
        args: arguments for ``vllm.LLM``.
        gains: widths of the weights, see :mod:`benchmarks.models.weights`.
        connector: extra configuration of KVConnect; None for an engine without connector.
        role: ``kv_role``.
        fault: class of :mod:`benchmarks.models.faults` instead of ``KVConnect``.
        env: added to the environment.
        torchvision: whether to stand in for that package.
    """

    model: Path
    args: dict[str, Any]
    gains: tuple[float, float]
    connector: dict[str, Any] | None = None
    role: str = "kv_both"
    fault: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    torchvision: bool = False


class Engine:
    """The handle of a forked engine; use as a context manager. One question at a time."""

    def __init__(self, settings: Settings, log: Path, deadline: float) -> None:
        self._deadline = deadline
        self._log = log
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(settings, theirs, log))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError, EOFError, BrokenPipeError):
            self._pipe.send(("stop", {}))
        self._process.join(STOP_S if kind is None else 1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def ready(self) -> dict[str, Any]:
        """Wait until it has started; return what it says about itself.

        Raises:
            EngineFailed: it did not start.
        """
        return self._answer()

    def ask(self, prompts: list[list[int]], new: int, **params: Any) -> list[Answer]:
        """Ask for the greedy continuation of prompts, one after the other."""
        self.begin(prompts, new, **params)
        return self.finish()

    def begin(self, prompts: list[list[int]], new: int, **params: Any) -> None:
        """Ask, and leave the answers to :meth:`finish`, which is to be called next."""
        self._send("ask", prompts=prompts, new=new, params=params)

    def finish(self) -> list[Answer]:
        """Return the answers to what :meth:`begin` asked."""
        return [Answer(*answer) for answer in self._answer()]

    def decode_last(self, prompts: list[list[int]]) -> list[Answer]:
        """Ask for one token after each prompt, whose last token is computed alone, by decoding."""
        return [Answer(*answer) for answer in self._call("decode_last", prompts=prompts)]

    def reset(self, tiers: bool = False) -> None:
        """Forget the prefix cache of the device, and what the connector has stored."""
        if not self._call("reset", tiers=tiers):
            raise EngineFailed("the prefix cache could not be reset")

    def settle(self) -> None:
        """Wait until the connector has nothing in flight."""
        self._call("settle")

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a series of KVConnect."""
        found: float = self._call("metric", name=name, labels=labels)
        return found

    def modules(self) -> list[str]:
        """Return the modules that it has imported."""
        found: list[str] = self._call("modules")
        return found

    def drafts(self) -> list[list[list[int]]]:
        """Return the tokens that were drafted since the last call, by step and request."""
        found: list[list[list[int]]] = self._call("drafts")
        return found

    def empty_drafts(self) -> bool:
        """Overwrite what the draft model's layers have cached; return whether it has any."""
        found: bool = self._call("empty_drafts")
        return found

    def plant(self, fault: bool) -> None:
        """Break what is loaded from now on; needs an engine with a fault class."""
        self._call("plant", fault=fault)

    def _call(self, what: str, **arguments: Any) -> Any:
        self._send(what, **arguments)
        return self._answer()

    def _send(self, what: str, **arguments: Any) -> None:
        try:
            self._pipe.send((what, arguments))
        except (BrokenPipeError, OSError):
            raise EngineFailed(self._last_line()) from None

    def _answer(self) -> Any:
        try:
            if not self._pipe.poll(max(0.0, self._deadline - time.monotonic())):
                raise EngineFailed("timeout")
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise EngineFailed(self._last_line()) from None
        if kind == "error":
            raise EngineFailed(value["text"], value["refused"])
        return value

    def _last_line(self) -> str:
        self._process.join(1.0)
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
        return f"ended with status {self._process.exitcode}: {lines[-1][:300]}"


def preload(rehearsal: Settings) -> None:
    """Import what engines use, for the processes that are forked from this one.

    Args:
        rehearsal: an engine that is started once, to learn what it imports on its way.
    """
    os.environ |= ENVIRONMENT
    for name in MODULES:
        importlib.import_module(name)
    registry = importlib.import_module("vllm.model_executor.models.registry")
    # It would look at a model's class in another process, which imports vLLM again.
    registry._run_in_subprocess = lambda look: look()  # type: ignore[attr-defined]
    log = rehearsal.model / "log"
    with Engine(rehearsal, log, time.monotonic() + REHEARSAL_S) as engine:
        engine.ready()
        engine.ask([[5] * 40], 2)
        names = engine.modules()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # a collection in a child would go through all of it


# In the engine's process ------------------------------------------------------------------------


def _serve(settings: Settings, pipe: Connection, log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(out, number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= settings.env
    if settings.torchvision:
        _stand_in_for_torchvision()
    status = 0
    try:
        engine = _Served(settings)
        pipe.send(("ok", engine.about()))
        engine.serve(pipe)
    except BaseException as error:  # noqa: BLE001 - said to whoever asked
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(("error", _said(error)))
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _stand_in_for_torchvision() -> None:
    """Let models of text and images import it; its ordinary wheel breaks a CPU build of torch."""

    class Anything(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in (
        "",
        ".io",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".transforms.v2.functional",
    ):
        module = Anything(f"torchvision{name}")
        module.__path__ = []
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _said(error: BaseException) -> dict[str, Any]:
    text = " ".join(str(error).split()) or type(error).__name__
    refused = type(error).__module__.startswith("kvconnect.")
    return {"text": f"{type(error).__name__}: {text}"[:600], "refused": refused}


class _Notes(logging.Handler):
    """Keeps what the connector says about the stores that it shares."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said = ""
        source = logging.getLogger("kvconnect.engines.vllm.tier_stores")
        source.setLevel(logging.INFO)
        source.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._said += record.getMessage()

    def shared_with(self) -> str:
        if "only engines with the same ranks" in self._said:
            return "same ranks"
        return "vLLM" if "SGLang cannot use" in self._said else "vLLM, SGLang"


class _Served:
    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        from benchmarks.models import weights

        weights.register(*settings.gains)
        transfer = None
        if settings.connector is not None:
            transfer = {
                "kv_connector": settings.fault or "KVConnect",
                "kv_role": settings.role,
                "kv_connector_extra_config": settings.connector,
            }
            if settings.fault:
                transfer["kv_connector_module_path"] = "benchmarks.models.faults"
        self._notes = _Notes()
        self._llm = LLM(
            model=str(settings.model),
            load_format=weights.LOAD_FORMAT,
            skip_tokenizer_init=True,
            kv_transfer_config=transfer,
            disable_log_stats=False,
            **settings.args,
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self._drafted: list[list[list[int]]] = []
        if "speculative_config" in settings.args:
            self._record_drafts()

    def _record_drafts(self) -> None:
        propose = self._runner.propose_draft_token_ids

        def recorded(*args: Any) -> Any:
            found = propose(*args)
            rows = found.tolist() if hasattr(found, "tolist") else found
            self._drafted.append([[int(token) for token in row] for row in rows])
            return found

        self._runner.propose_draft_token_ids = recorded

    def about(self) -> dict[str, Any]:
        """The engine's KV-cache groups: [classes of its layers' caches, tokens of a block]; and
        which engines it shares a store with, if it has one."""
        found = []
        for group in self._core.scheduler.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            layers = getattr(spec, "kv_cache_specs", {"": spec}).values()
            names = sorted({type(layer).__name__ for layer in layers})
            found.append(["+".join(names), spec.block_size])
        return {"groups": found, "shared_with": self._notes.shared_with()}

    def serve(self, pipe: Connection) -> None:
        while True:
            while not pipe.poll(_PAUSE_S):
                self._llm.llm_engine.step()  # leases end and pages arrive in steps
            what, arguments = pipe.recv()
            if what == "stop":
                self._llm.llm_engine.engine_core.shutdown()
                return
            try:
                pipe.send(("ok", getattr(self, what)(**arguments)))
            except Exception as error:  # noqa: BLE001 - said to whoever asked
                traceback.print_exc()
                pipe.send(("error", _said(error)))

    def ask(self, prompts: list[list[int]], new: int, params: dict[str, Any]) -> list[tuple]:
        from vllm import SamplingParams

        asked = SamplingParams(
            max_tokens=new,
            temperature=0.0,
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        found = []
        for prompt in prompts:
            [output] = self._llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
            one = output.outputs[0]
            tokens = list(one.token_ids)
            probabilities = [
                step[token].logprob for step, token in zip(one.logprobs, tokens, strict=True)
            ]
            ticket = output.kv_transfer_params
            found.append((tokens, probabilities, output.num_cached_tokens or 0, ticket))
        return found

    def decode_last(self, prompts: list[list[int]]) -> list[tuple]:
        from vllm import SamplingParams

        found = []
        for *begin, last in prompts:
            # The engine may sample nothing but the prompt's last token, and says what it would.
            asked = SamplingParams(
                max_tokens=2,
                temperature=0.0,
                ignore_eos=True,
                logprobs=1,
                detokenize=False,
                allowed_token_ids=[last],
            )
            [output] = self._llm.generate([{"prompt_token_ids": begin}], asked, use_tqdm=False)
            step = output.outputs[0].logprobs[1]
            token = next(token for token, one in step.items() if one.rank == 1)
            found.append(([token], [step[token].logprob], 0, None))
        return found

    def reset(self, tiers: bool) -> bool:
        deadline = time.monotonic() + SETTLE_S
        # Blocks may still be on their way to a reader.
        while not self._llm.reset_prefix_cache(reset_connector=tiers):
            if time.monotonic() > deadline:
                return False
            self._step()
        return True

    def settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        busy = ("jobs_in_flight", "tier_jobs_in_flight", "ledger_held_blocks")
        self._step()
        while any(self.metric(name, {}) for name in busy):
            if time.monotonic() > deadline:
                raise TimeoutError(f"jobs or leases do not end within {SETTLE_S:g} s")
            self._step()

    def _step(self) -> None:
        self._llm.llm_engine.step()
        time.sleep(_PAUSE_S)

    def metric(self, name: str, labels: dict[str, str]) -> float:
        from prometheus_client import REGISTRY

        series = f"vllm:kvconnect_{name}"
        collector = REGISTRY._names_to_collectors[series]
        return sum(
            sample.value
            for family in collector.collect()
            for sample in family.samples
            if sample.name == series and labels.items() <= sample.labels.items()
        )

    def modules(self) -> list[str]:
        return [name for name in sys.modules if name.startswith(_PRELOADED)]

    def drafts(self) -> list[list[list[int]]]:
        found, self._drafted = self._drafted, []
        return found

    def empty_drafts(self) -> bool:
        layers = self._runner.compilation_config.static_forward_context
        names = getattr(getattr(self._runner, "drafter", None), "_draft_attn_layer_names", ())
        for name in names:
            layers[name].kv_cache.zero_()
        return bool(names)

    def plant(self, fault: bool) -> None:
        from benchmarks.models import faults

        faults.planted = fault


def write_model(folder: Path, config: dict[str, Any], recipe: str) -> None:
    """Write ``config.json`` and what stands for weights: KVConnect names a model by such files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "model.bin").write_text(recipe)
    if "auto_map" in config:
        (folder / "configuration_tiny.py").write_text(_CONFIGURATION)


_CONFIGURATION = '''\
"""The configuration of a model whose checkpoints bring their own code."""

from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny"
'''
