"""Speculative decoding through KVConnect: drafts of every kind that vLLM's CPU engine makes.

The target checks each draft, so tokens do not tell whether a draft model's KV is right: its drafts
do. They are compared one by one with those of an engine without a connector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.models import compare, proof
from benchmarks.models.architectures import LLAMA, Architecture
from benchmarks.models.compare import EXACT
from benchmarks.models.engine import Answer, Engine, EngineFailed, Settings, write_model
from benchmarks.models.proof import NEW, NO_ENGINE, RIGHT, ROUNDS, WRONG, HandOff, pull, push
from benchmarks.settings import chosen

_NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
_SMALL = {**LLAMA, "model_type": "llama", "num_hidden_layers": 1, "torch_dtype": "float32"}
_HEADS: Mapping[str, dict[str, Any]] = {
    "draft_model": {**_SMALL, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2},
    "eagle": {**_SMALL, "architectures": ["LlamaForCausalLM"]},
    # The layers that vLLM chooses by itself are not three different ones in a target of four.
    "eagle3": {
        **_SMALL,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": LLAMA["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    },
    "medusa": {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": LLAMA["hidden_size"],
        "vocab_size": LLAMA["vocab_size"],
        "num_heads": 3,
        "num_hidden_layers": 1,
        "torch_dtype": "float32",
    },
}
_NAMES = {"draft_model": "draft model", "eagle": "EAGLE", "eagle3": "EAGLE-3", "mtp": "MTP",
          "medusa": "Medusa"}  # fmt: skip


@dataclass(frozen=True)
class Drafting:
    """A target and how its tokens are drafted.

    Attributes:
        target: the model.
        method: vLLM's name of it.
        uncached: run without prefix caching.
    """

    target: Architecture
    method: str
    uncached: bool = False

    @property
    def key(self) -> str:
        """Its name in results."""
        rest = ", prefix caching off" if self.uncached else ""
        return f"{self.target.name} (drafts: {_NAMES.get(self.method, self.method)}{rest})"

    def model(self) -> Architecture:
        """Return the target with the settings that its drafts need."""
        target = self.target
        if self.method == "mtp":
            layers = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
            target = replace(target, config={**target.config, **layers})
        if self.uncached:
            target = replace(target, args={**target.args, "enable_prefix_caching": False})
        return target

    def speculation(self, folder: Path) -> dict[str, Any]:
        """Return vLLM's ``speculative_config``, after writing the draft model to ``folder``."""
        if self.method == "ngram":
            return {**_NGRAM, "num_speculative_tokens": 3}
        if self.method == "mtp":
            return {"method": "mtp", "num_speculative_tokens": 1}
        head = _HEADS[self.method]
        write_model(folder, head, hashlib.sha256(repr(head).encode()).hexdigest())
        return {"model": str(folder), "method": self.method, "num_speculative_tokens": 3}


def drafted(models: Mapping[str, Architecture]) -> tuple[Drafting, ...]:
    """Return what is tried, with targets out of ``models`` by their names."""
    llama, gemma = models["LlamaForCausalLM"], models["Gemma3ForCausalLM"]
    hybrid = models["Qwen3NextForCausalLM"]
    predicting = ("DeepseekV3", "Ernie4_5_Moe", "Glm4Moe", "Glm4MoeLite", "HYV3", "MiMoV2Flash",
                  "PanguUltraMoE", "Qwen3Next")  # fmt: skip
    return (
        *(Drafting(llama, method) for method in ("ngram", "medusa", "draft_model")),
        *(Drafting(llama, method) for method in ("eagle", "eagle3")),
        *(Drafting(gemma, method) for method in ("ngram", "draft_model")),
        *(Drafting(models[f"{name}ForCausalLM"], "mtp") for name in predicting),
        Drafting(hybrid, "ngram"),
        Drafting(hybrid, "mtp", uncached=True),
    )


def prove(case: Drafting, timeout: float) -> dict[str, Any]:
    """Run one target and its drafts through all engines; return what was found. Never raises."""

    def verdict(scratch: Path, deadline: float, result: dict[str, Any]) -> str:
        return _Run(case, scratch, deadline, result).verdict()

    return proof.guarded(verdict, timeout)


class _Run:
    def __init__(
        self, case: Drafting, scratch: Path, deadline: float, result: dict[str, Any]
    ) -> None:
        self._model = case.model()
        self._scratch = scratch
        self._deadline = deadline
        self._result = result
        self._folder = scratch / "model"
        self._prompts = compare.prompts()
        self._fresh: list[Answer] = []
        self._drafts: list[Any] = []
        result["method"] = case.method
        recipe = f"{self._model!r} {Path(__file__).with_name('weights.py').read_text()}"
        write_model(
            self._folder, self._model.written(), hashlib.sha256(recipe.encode()).hexdigest()
        )
        self._speculation = case.speculation(scratch / "draft")

    def verdict(self) -> str:
        try:
            self._plain()
        except EngineFailed as error:
            self._result["error"] = str(error)
            return NO_ENGINE
        if not self._result["own_tokens"]:
            self._result["error"] = "without any connector, other tokens than without drafts"
            return NO_ENGINE
        with ExitStack() as stack:
            first = stack.enter_context(self._engine("first", True))
            second = stack.enter_context(self._engine("second", True, "off"))
            plain = stack.enter_context(self._engine("plain", False, "off"))
            for engine in (first, second, plain):
                engine.ready()
            self._result["rounds"] = self._rounds(first)
            self._result["both"] = self._hand_off(first, second)
            self._result["pushed"] = self._hand_off(first, second, push)
            self._result["prefill_only"] = self._hand_off(first, plain)
            # The last one: what is refused stays offered until its lease ends.
            self._result["decode_only"] = self._hand_off(plain, second)
        return self._judge()

    def _engine(self, name: str, drafts: bool, host: str | None = "64MiB") -> Engine:
        model = self._model
        args = proof.arguments(model)
        if drafts:
            args["speculative_config"] = self._speculation
        extra = chosen(
            "models", host_bytes=host, transport="tcp", digest="full", load_when="always"
        )
        gains = (model.gain, model.embedding_gain)
        settings = Settings(
            self._folder,
            args,
            gains,
            extra if host else None,
            env={"HF_MODULES_CACHE": str(self._scratch / "modules"), **model.env},
            torchvision=model.torchvision,
        )
        return Engine(settings, self._scratch / f"{name}.log", self._deadline)

    # Steps --------------------------------------------------------------------------------------

    def _plain(self) -> None:
        """Say what engines without a connector answer, without drafts and with them."""
        with self._engine("undrafted", False, None) as engine:
            engine.ready()
            truth = engine.ask(self._prompts, NEW)
        with self._engine("drafted", True, None) as engine:
            self._result |= engine.ready()
            self._fresh = engine.ask(self._prompts, NEW)
            self._drafts = engine.drafts()
            cached = engine.ask(self._prompts, NEW)
            again = engine.drafts()
            # Groups of layers share memory: then other layers' KV would be emptied, too.
            alone = len(self._result["groups"]) == 1 and any(one.cached for one in cached)
            if alone and engine.empty_drafts():
                emptied = engine.ask(self._prompts, NEW)
                self._result["control"] = {
                    "changed": engine.drafts() != again,
                    "same": compare.tokens(emptied) == compare.tokens(self._fresh),
                }
        answers = [compare.tokens(found) for found in (truth, self._fresh, cached)]
        self._result |= {
            "own_tokens": answers[0] == answers[1] == answers[2],
            "device_cached": [answer.cached for answer in cached],
            "expected_cached": compare.full_blocks(self._result["groups"]),
        }

    def _rounds(self, engine: Engine) -> list[dict[str, Any]]:
        rounds = []
        for _ in range(ROUNDS):
            rounds.append(self._compared(engine, engine.ask(self._prompts, NEW)))
            engine.settle()
            engine.reset()
        return rounds

    def _hand_off(self, prefill: Engine, decode: Engine, how: HandOff = pull) -> dict[str, Any]:
        for engine in (prefill, decode):
            engine.settle()
            engine.reset(tiers=True)
        decode.drafts()
        before = _arrivals(decode)
        answers = [how(prefill, decode, prompt) for prompt in self._prompts]
        found = self._compared(decode, answers)
        received, refused = (
            now - then for now, then in zip(_arrivals(decode), before, strict=True)
        )
        return found | {"bytes": int(received), "refused": int(refused)}

    def _compared(self, engine: Engine, answers: list[Answer]) -> dict[str, Any]:
        drafts = engine.drafts()
        found = {
            "same": compare.tokens(answers) == compare.tokens(self._fresh),
            "cached": [answer.cached for answer in answers],
            "logprobs": compare.difference(self._fresh, answers),
        }
        return found | ({"same_drafts": drafts == self._drafts} if drafts else {})

    # Verdict ------------------------------------------------------------------------------------

    def _judge(self) -> str:
        found = self._result
        hits = [one["cached"] for one in found["rounds"][1:]]
        sides = ("both", "pushed", "prefill_only", "decode_only")
        problems = {
            "tokens": not all(_is_right(one) for one in found["rounds"]),
            "cached tokens": any(one != found["expected_cached"] for one in hits),
            **{f"hand-off, {side}": not _is_right(found[side]) for side in sides},
            "drafts of both not handed off": not found["both"]["bytes"],
            "neither handed off nor refused": any(
                not found[side]["bytes"] and not found[side]["refused"] for side in sides
            ),
            "drafts without effect": not found.get("control", {}).get("changed", True),
            "drafts changed tokens": not found.get("control", {}).get("same", True),
        }
        found["problems"] = [name for name, bad in problems.items() if bad]
        return WRONG if found["problems"] else RIGHT


def _is_right(found: Mapping[str, Any]) -> bool:
    return found["same"] and found["logprobs"] <= EXACT and found.get("same_drafts", True)


def _arrivals(engine: Engine) -> tuple[float, float]:
    """Bytes that came from peers so far, and hand-offs that were refused."""
    received = engine.metric("transfer_bytes_total", transfer_type="RECV")
    return received, engine.metric("handoff_refused_total")
