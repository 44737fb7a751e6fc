"""What states cost and save: hybrids like Qwen3-Next and Qwen3.5, beside a dense model.

    python -m benchmarks.hybrids

Engines of one model (random weights, as big as two cores compute in about a second per 2k tokens)
work in turn: one without a connector, one with KVConnect that keeps blocks and prefills for
another, and that other one. Every answer must be the tokens of the engine without a connector.

Per model:

``ttft_hit_over_recompute_*``: time to first token of a prompt of 2k tokens in host memory, with the
device's prefix cache reset before, over that of a new prompt on the engine without a connector.
``handoff_over_alone_*``: the same prompt through prefill and hand-off to the first token of the
decode engine, over computing it alone.
``stored_over_attention_*``: bytes stored per token of the prompt over those of its attention layers
alone, with one state at its end; ``stored_bytes_per_token_*`` the bytes.
``stored_over_attention_*_every_N``: the same where vLLM keeps a state every N tokens
(``--prefix-cache-retention-interval N``); ``state_tokens_*`` is the smallest such distance.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import emit, progress, timed
from benchmarks.models.architectures import Architecture
from benchmarks.models.dense import DENSE
from benchmarks.models.engine import Answer, Engine, Settings, preload, write_model
from benchmarks.models.hybrids import HYBRIDS
from benchmarks.models.proof import arguments, rehearsal
from benchmarks.settings import chosen

PROMPT = 2056
NEW = 8
TIMEOUT_S = 600.0
DISTANCES = (1, 2, 4, 8)
_BIG = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
_BIG_GDN = {
    **_BIG,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}
_NAMES = {
    "dense": ("LlamaForCausalLM", _BIG),
    "qwen3_next": ("Qwen3NextForCausalLM", _BIG_GDN),
    "qwen3_5": ("Qwen3_5ForCausalLM", _BIG_GDN),
}


_TIER = chosen("hybrids", host_bytes="1GiB", transport="tcp", load_when="always")
_NO_TIER = chosen("hybrids", host_bytes="off", transport="tcp")


def model(name: str, **args: Any) -> Architecture:
    """Return the large form of one of ``make models``' architectures, with arguments of vLLM."""
    base, sizes = _NAMES[name]
    small = next(m for m in (*DENSE, *HYBRIDS) if m.name == base)
    args = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "num_gpu_blocks_override": None,
        **args,
    }
    return replace(small, config={**small.config, **sizes}, args=args)


def engine(
    tiny: Architecture, folder: Path, log: Path, extra: dict[str, Any] | None, role: str = "kv_both"
) -> Engine:
    """Return an engine that is starting."""
    gains = (tiny.gain, tiny.embedding_gain)
    settings = Settings(folder, arguments(tiny), gains, extra, role, torchvision=tiny.torchvision)
    return Engine(settings, log, time.monotonic() + TIMEOUT_S)


def new_prompt(numbers: random.Random, tokens: int) -> list[int]:
    """Return a prompt of random tokens."""
    return [numbers.randrange(10, 2000) for _ in range(tokens)]


class Pair:
    """The engines of one model, and the prompts that they are asked."""

    def __init__(self, name: str, scratch: Path, stack: ExitStack) -> None:
        self._random = random.Random(5)
        tiny = model(name)
        folder = scratch / name
        write_model(folder, tiny.written(), f"{tiny!r}")

        def start(role: str, extra: dict[str, Any] | None) -> Engine:
            log = scratch / f"{name}-{role}-{extra is None}.log"
            started = stack.enter_context(engine(tiny, folder, log, extra, role))
            self.about = started.ready()
            return started

        self.plain = start("kv_both", None)
        self.first = start("kv_both", _TIER)
        self.other = start("kv_consumer", _NO_TIER)

    def prompt(self) -> list[int]:
        """A prompt that shares no block with any other."""
        return new_prompt(self._random, PROMPT)

    def hand_off(self, prompt: list[int], new: int) -> list[Answer]:
        [made] = self.first.ask([prompt], 1, do_remote_decode=True, do_remote_prefill=False)
        if not made.ticket:
            raise SystemExit("the prefill gave no ticket")
        return self.other.ask([prompt], new, **made.ticket)


def measure(name: str, rounds: int, scratch: Path) -> dict[str, float]:
    """Return the figures of one model."""
    with ExitStack() as stack:
        progress(f"{name}: starting engines")
        pair = Pair(name, scratch, stack)
        stored = pair.prompt()
        pair.first.ask([stored], NEW)
        pair.first.settle()
        nbytes = pair.first.metric("transfer_bytes_total", transfer_type="GPU_to_CPU")
        check(pair, stored)
        samples: dict[str, list[float]] = {"alone": [], "hit": [], "handoff": []}
        for number in range(rounds):
            fresh = pair.prompt()
            samples["alone"].append(timed(lambda: pair.plain.ask([fresh], 1)))  # noqa: B023
            samples["handoff"].append(timed(lambda: pair.hand_off(fresh, 1)))  # noqa: B023
            pair.first.settle()
            pair.first.reset()
            samples["hit"].append(timed(lambda: pair.first.ask([stored], 1)))
            last = ", ".join(f"{k} {v[-1] * 1e3:.0f} ms" for k, v in samples.items())
            progress(f"{name}, round {number + 1}/{rounds}: {last}")
    seconds = {key: statistics.median(values) for key, values in samples.items()}
    groups = pair.about["groups"]
    states = [tokens for spec, tokens in groups if "Mamba" in spec]
    step, attention = groups[0][1], attention_bytes(name)
    per_token = nbytes / (PROMPT // step * step)
    found = {
        "ttft_hit_over_recompute": seconds["hit"] / seconds["alone"],
        "handoff_over_alone": seconds["handoff"] / seconds["alone"],
        "stored_bytes_per_token": per_token,
        "stored_over_attention": per_token / attention,
        "state_tokens": states[0] if states else 0,
        "ttft_recompute_ms": seconds["alone"] * 1e3,
        "ttft_hit_ms": seconds["hit"] * 1e3,
        "handoff_ms": seconds["handoff"] * 1e3,
    }
    figures = {f"{key}_{name}": value for key, value in found.items()}
    return figures | (stored_by_distance(name, scratch, states[0]) if states else {})


def attention_bytes(name: str) -> int:
    """Return the bytes that the attention layers keep of a token."""
    config = model(name).written()
    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    itemsize = {"float32": 4, "bfloat16": 2}[config["torch_dtype"]]
    row = 2 * config["num_key_value_heads"] * config["head_dim"] * itemsize
    return kinds.count("full_attention") * row


def stored_by_distance(name: str, scratch: Path, smallest: int) -> dict[str, float]:
    """Return the bytes stored per token over those of attention alone, by the distance of states:
    1, 2, 4 and 8 times the smallest. The prompt has eight times the smallest and a token."""
    prompt, found = new_prompt(random.Random(6), DISTANCES[-1] * smallest + 1), {}
    for times in DISTANCES:
        distance = times * smallest
        # vLLM makes a state where a step ends.
        args = {
            "max_num_batched_tokens": smallest,
            "prefix_cache_retention_interval": distance,
        }
        tiny, log = model(name, **args), scratch / f"{name}-{distance}.log"
        with engine(tiny, scratch / name, log, _TIER) as started:
            started.ready()
            started.ask([prompt], 1)
            started.settle()
            nbytes = started.metric("transfer_bytes_total", transfer_type="GPU_to_CPU")
        ratio = nbytes / (len(prompt) - 1) / attention_bytes(name)
        found[f"stored_over_attention_{name}_every_{distance}"] = ratio
        progress(f"{name}: a state every {distance} tokens: {ratio:.2f} times attention alone")
    return found


def check(pair: Pair, stored: list[int]) -> None:
    """A hit and a hand-off must continue as the engine without a connector does."""
    [_] = pair.plain.ask([stored], NEW)
    [want] = pair.plain.ask([stored], NEW)  # in bfloat16, what comes from its own cache
    pair.first.reset()
    [hit] = pair.first.ask([stored], NEW)
    [moved] = pair.hand_off(stored, 1)
    pair.plain.reset()
    [alone] = pair.plain.decode_last([stored])
    if not hit.cached:
        raise SystemExit("nothing was loaded")
    for what, answer, peer in (("hit", hit, want), ("hand-off", moved, alone)):
        if answer.tokens != peer.tokens:
            raise SystemExit(f"{what}: other tokens: {answer.tokens}, {peer.tokens}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=_NAMES, action="append")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        preload(rehearsal(Path(scratch) / "rehearsal"))
        for name in options.only or _NAMES:
            figures |= measure(name, options.rounds, Path(scratch))
    emit("hybrids", figures)


if __name__ == "__main__":
    main()
