"""What is asked of one architecture, and what the answers must be.

Five engines, each in a process of its own: one without a connector; one with KVConnect, which
computes, stores, loads, and is the prefill of a hand-off; one that only receives; one that is
started anew on the disk tier of the second; and one that shares a store with the second. All have
the same weights.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.models.architectures import Architecture, like_llama
from benchmarks.models.compare import (
    EXACT,
    difference,
    full_blocks,
    is_same,
    other_prompts,
    prompts,
    tokens,
    was_caught,
)
from benchmarks.models.engine import Answer, Engine, EngineFailed, Settings, write_model
from benchmarks.settings import chosen
from benchmarks.valkey_server import start_server

NEW = 16
ROUNDS = 3

RIGHT, WRONG, REFUSED, CRASHED, NO_ENGINE = (
    "right",
    "wrong",
    "refused_clean",
    "crashed",
    "no_engine",
)
HandOff = Callable[[Engine, Engine, list[int]], Answer]
"""Has a prefill and a decode engine answer a prompt."""
_HOST = "64MiB"
_FAULT = "LoadsAnothersPages"


def rehearsal(folder: Path) -> Settings:
    """Return a small engine with everything that others have, to be started once before them."""
    model = like_llama("LlamaForCausalLM", "llama")
    write_model(folder, model.written(), "rehearsal")
    disk = {"path": str(folder / "disk"), "capacity": "64MiB", "min_free": 0}
    extra = {**chosen("models", host_bytes=_HOST, transport="tcp"), "disk": disk}
    return Settings(folder, arguments(model), (1.0, 1.0), extra, fault=_FAULT)


def arguments(model: Architecture) -> dict[str, Any]:
    """Return the engine's arguments for a model."""
    return {
        "dtype": model.dtype,
        "block_size": model.block,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 256,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "seed": 0,
        "trust_remote_code": model.remote,
        **model.args,
    }


def prove(model: Architecture, timeout: float) -> dict[str, Any]:
    """Run one architecture through all engines; return what was found. Never raises."""

    def verdict(scratch: Path, deadline: float, result: dict[str, Any]) -> str:
        return _Run(model, scratch, deadline, result).verdict()

    return guarded(verdict, timeout)


def guarded(
    verdict: Callable[[Path, float, dict[str, Any]], str], timeout: float
) -> dict[str, Any]:
    """Return what ``verdict`` finds, given a folder, a deadline and a result to add to. An engine
    that does not start or answer in time is a finding, too."""
    started = time.monotonic()
    result: dict[str, Any] = {"verdict": CRASHED}
    with tempfile.TemporaryDirectory(prefix="kvconnect-models-") as scratch:
        try:
            result["verdict"] = verdict(Path(scratch), started + timeout, result)
        except EngineFailed as error:
            result["error"] = str(error)
            result["verdict"] = REFUSED if error.refused else CRASHED
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


class _Run:
    def __init__(
        self, model: Architecture, scratch: Path, deadline: float, result: dict[str, Any]
    ) -> None:
        self._model = model
        self._scratch = scratch
        self._deadline = deadline
        self._result = result
        self._folder = scratch / "model"
        self._prompts = prompts()
        self._fresh: list[Answer] = []
        self._cached: list[Answer] = []
        self._split: list[Answer] = []
        recipe = f"{model!r} {Path(__file__).with_name('weights.py').read_text()}"
        write_model(self._folder, model.written(), hashlib.sha256(recipe.encode()).hexdigest())

    def verdict(self) -> str:
        try:
            self._plain()
        except EngineFailed as error:
            self._result["error"] = str(error)
            return NO_ENGINE
        with ExitStack() as server:
            remote = start_server(server, self._scratch)
            if remote is None:
                raise EngineFailed("no store: install valkey-server or redis-server")
            self._proved(remote)
        return self._judge()

    def _proved(self, remote: dict[str, Any]) -> None:
        """Put all questions to all engines with KVConnect, which share a store."""
        first_tiers = {**self._disk(), "remote": remote}
        with ExitStack() as stack:
            first = stack.enter_context(
                self._engine("first", **chosen("models", digest="full"), **first_tiers)
            )
            receiver = stack.enter_context(
                self._engine("receiver", "kv_consumer", **chosen("models", host_bytes="off"))
            )
            first.ready()
            self._rounds(first)
            try:
                receiver.ready()
                self._result["hand_off"] = self._handed_off(pull, first, receiver)
                receiver.reset()
                first.reset(tiers=True)  # else nothing is computed, and there are no layers to send
                self._result["push"] = self._handed_off(push, first, receiver)
            except EngineFailed as error:
                self._result["hand_off"] = {"error": str(error), "refused": error.refused}
            self._caught(first)
        unchecked = chosen("models", digest="off", listen="off")
        with self._engine("second", **unchecked, **self._disk()) as second:
            second.ready()
            self._restarted(second)
            self._control(second)
        loads = chosen("models", listen="off", load_when="always")
        with self._engine("third", remote=remote, **loads) as third:
            self._result["shared_with"] = third.ready()["shared_with"]
            self._result["shared"] = self._compared(third.ask(self._prompts, NEW))

    def _engine(self, name: str, role: str = "kv_both", **extra: Any) -> Engine:
        both = chosen("models", host_bytes=_HOST, transport="tcp")
        return self._start(name, role, {**both, **extra})

    def _start(self, name: str, role: str, extra: dict[str, Any] | None) -> Engine:
        model = self._model
        gains = (model.gain, model.embedding_gain)
        both = extra is not None and role == "kv_both"
        env = {"HF_MODULES_CACHE": str(self._scratch / "modules"), **model.env}
        settings = Settings(
            self._folder,
            arguments(model),
            gains,
            extra,
            role,
            _FAULT if both else None,
            env,
            model.torchvision,
        )
        return Engine(settings, self._scratch / f"{name}.log", self._deadline)

    def _disk(self) -> dict[str, Any]:
        path = str(self._scratch / "disk")
        disk = {"path": path, "capacity": "256MiB", "min_free": 0}
        return {"disk": disk, **chosen("models", load_when="always")}

    # Steps --------------------------------------------------------------------------------------

    def _plain(self) -> None:
        """Say what an engine without a connector answers, and whether it always does."""
        with self._start("plain", "kv_both", None) as engine:
            self._result |= engine.ready()
            self._fresh = engine.ask(self._prompts, NEW)
            self._cached = engine.ask(self._prompts, NEW)
            engine.reset()
            again = engine.ask(self._prompts, NEW)
            decoded = self._decoded(engine)
            engine.reset()
            self._split = engine.decode_last(self._prompts)
            changed = [[(token + 7) % 2000 for token in p[:8]] + p[8:] for p in self._prompts]
            others = engine.ask(changed, NEW)
        hits = [answer.cached for answer in self._cached]
        if not self._has_states():  # states are kept at some boundaries: as the device's hits are
            hits = full_blocks(self._result["groups"])
        self._result |= {
            "device_cached": [answer.cached for answer in self._cached],
            "expected_cached": hits,
            "noise": difference(self._fresh, again),
            "noise_decoded": decoded,
            "noise_cached": difference(self._fresh, self._cached),
            "unstable": tokens(again) != tokens(self._fresh),
            "sensitivity": difference(self._fresh, others),
            "distinct_tokens": len({token for one in self._fresh for token in one.tokens}),
        }

    def _decoded(self, engine: Engine) -> float:
        """Return how much the engine differs from itself where it computes a token with its prompt
        or by decoding, in that token and those after it."""
        longer = [p + one.tokens[:1] for p, one in zip(self._prompts, self._fresh, strict=True)]
        engine.reset()
        found = engine.ask(longer, NEW - 1)
        rest = [
            one._replace(tokens=one.tokens[1:], logprobs=one.logprobs[1:]) for one in self._fresh
        ]
        return difference(rest, found)

    def _rounds(self, engine: Engine) -> None:
        rounds = []
        for _ in range(ROUNDS):
            rounds.append(self._compared(engine.ask(self._prompts, NEW)))
            engine.settle()
            engine.reset()
        self._result["rounds"] = rounds

    def _handed_off(self, how: HandOff, first: Engine, receiver: Engine) -> dict[str, Any]:
        answers = [how(first, receiver, prompt) for prompt in self._prompts]
        found = self._compared(answers)
        if self._has_states():
            # The prompt's last token is decoded from the state before it: so is the peer's.
            begun = [
                one._replace(tokens=one.tokens[:1], logprobs=one.logprobs[:1]) for one in answers
            ]
            found |= {
                "same": tokens(begun) == tokens(self._split),
                "logprobs": difference(self._split, begun),
            }
        first.settle()
        first.reset()
        return found

    def _caught(self, engine: Engine) -> None:
        """Load other prompts' pages with digests on: right tokens, and blocks counted as bad."""
        engine.plant(True)
        answers = engine.ask(self._prompts, NEW)
        engine.plant(False)
        found = self._compared(answers)
        bad = engine.metric("failed_blocks_total", cause="digest")
        self._result["caught"] = {"same": found["same"], "bad_blocks": bad}
        if self._has_states():
            changed = self._older(engine)
            bad = engine.metric("failed_blocks_total", cause="digest") - bad
            same = changed <= self._limit()
            self._result["caught_older"] = {"same": same, "logprobs": changed, "bad_blocks": bad}

    def _restarted(self, engine: Engine) -> None:
        self._result["restart"] = self._compared(engine.ask(self._prompts, NEW))
        engine.settle()
        engine.reset()

    def _control(self, engine: Engine) -> None:
        """The same fault with digests off must be seen in what the engine answers."""
        engine.plant(True)
        answers = engine.ask(self._prompts, NEW)
        found = self._compared(answers)
        self._result["control"] = {
            "changed": not found["same"] or found["logprobs"] > EXACT,
            "logprobs": found["logprobs"],
        }
        if self._has_states():
            changed = self._older(engine)
            found = {"changed": changed > EXACT, "logprobs": changed}
            self._result["control_older"] = found

    def _has_states(self) -> bool:
        return any("Mamba" in spec for spec, _ in self._result["groups"])

    def _older(self, engine: Engine) -> float:
        """Load a prompt with the state of its beginning; return how much its tokens' log
        probabilities change. A short convolution forgets within few tokens, so that tokens may
        stay."""
        engine.plant(False)
        engine.settle()
        engine.reset()
        whole = other_prompts()[-1]
        beginning = whole[: len(whole) // 2]
        engine.ask([beginning, whole], NEW)
        engine.settle()
        answers = []
        for fault in (False, True):
            engine.reset()
            engine.plant(fault)
            engine.ask([beginning], 1)
            engine.reset()
            answers.append(engine.ask([whole], NEW))
        engine.plant(False)
        return difference(*answers)

    # Verdict ------------------------------------------------------------------------------------

    def _compared(self, answers: list[Answer]) -> dict[str, Any]:
        """Compare with the engine without a connector: prompts that it computed whole with such,
        prompts that some cache had with those that its device had."""
        peers = [
            cached if answer.cached and answer.cached >= cached.cached else fresh
            for answer, fresh, cached in zip(answers, self._fresh, self._cached, strict=True)
        ]
        return {
            "same": tokens(answers) == tokens(peers),
            "cached": [answer.cached for answer in answers],
            "logprobs": difference(peers, answers),
        }

    def _was_handed_off(self) -> bool:
        found = [self._result.get(how, {}) for how in ("hand_off", "push")]
        return all("same" in one and is_same(one) for one in found)

    def _limit(self) -> float:
        """What may differ where a state was computed in other pieces."""
        return float(max(EXACT, 2 * self._result["noise_decoded"]))

    def _judge(self) -> str:
        found = self._result
        hits = [one["cached"] for one in [*found["rounds"][1:], found["restart"], found["shared"]]]
        problems = {
            "the plain engine differs from itself": found["unstable"],
            "output does not depend on early tokens": found["sensitivity"] < 10 * EXACT,
            "few distinct tokens": found["distinct_tokens"] < 8,
            "first round": not found["rounds"][0]["same"] or any(found["rounds"][0]["cached"]),
            "hits": not all(map(is_same, found["rounds"])),
            "hits after a restart": not is_same(found["restart"]),
            "cached tokens": any(one != found["expected_cached"] for one in hits),
            "hits in a shared store": not is_same(found["shared"]),
            "hand-off": not self._was_handed_off(),
            "fault not caught": not was_caught(found["caught"]),
            "fault without effect": not found["control"]["changed"],
            "older state not caught": not was_caught(found.get("caught_older")),
            "older state without effect": not found.get("control_older", {}).get("changed", True),
        }
        found["problems"] = [name for name, bad in problems.items() if bad]
        if self._has_states() and not any(map(any, hits)):
            return self._judge_idle()
        return WRONG if found["problems"] else RIGHT

    def _judge_idle(self) -> str:
        """Of states that vLLM does not keep, nothing can be stored; they are handed off."""
        found = self._result
        none = {"fault not caught", "fault without effect"}
        none |= {"older state not caught", "older state without effect"}
        found["problems"] = [name for name in found["problems"] if name not in none]
        found["error"] = "idle: vLLM keeps no states without prefix caching, and fails with it"
        return WRONG if found["problems"] else REFUSED


def pull(first: Engine, receiver: Engine, prompt: list[int]) -> Answer:
    """Ask the prefill engine, and then the decode engine."""
    [made] = first.ask([prompt], 1, do_remote_decode=True, do_remote_prefill=False)
    if not made.ticket:
        raise EngineFailed("the prefill gave no ticket")
    [answer] = receiver.ask([prompt], NEW, **made.ticket)
    return answer


def push(first: Engine, receiver: Engine, prompt: list[int]) -> Answer:
    """Ask both at once: layers are sent while the rest is computed."""
    # One token would do, but vLLM's CPU engine fails with it and Qwen3.5.
    [offer] = first.ask([prompt[:2]], 1, do_remote_decode=True, kvconnect_card=True)
    if not offer.ticket:
        raise EngineFailed("the prefill gave no standing ticket")
    transfer = secrets.token_hex(16)
    wanted = {"do_remote_prefill": True, "transfer_id": transfer}
    receiver.begin([prompt], NEW, kvconnect_ticket=offer.ticket["kvconnect_card"], **wanted)
    first.ask([prompt], 1, do_remote_decode=True, transfer_id=transfer)
    [answer] = receiver.finish()
    return answer
