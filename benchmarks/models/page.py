"""The committed results, and the page of the documentation that is made from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
PAGE = ROOT / "docs" / "models.md"

VERDICTS = ("right", "bytes_only", "refused_clean", "wrong", "crashed")
"""What an architecture that the engine runs can come to. Those that it does not run are counted as
``no_engine`` or, where their caches were tested without it, as ``bytes_only``."""

_KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MLAAttentionSpec": "latent",
    "SlidingWindowMLASpec": "latent window",
    "MambaSpec": "state",
    "CrossAttentionSpec": "cross",
    "EncoderOnlyAttentionSpec": "none",
}


BY_BYTES = {
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm5 in fp8",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "PanguProMoEV2ForCausalLM": "openpangu",
    "MiMoV2ForCausalLM": "mimo with K != V",
    "LongcatFlashForCausalLM": "longcat",
    "MambaForCausalLM": "mamba",
    "JambaForCausalLM": "jamba",
    "OlmoHybridForCausalLM": "olmo hybrid",
    "KimiLinearForCausalLM": "kimi linear",
}
"""Architectures that the CPU engine does not run, and the caches under which
``tests/unit/engines/vllm_caches.py`` has what vLLM's own code makes for them."""


def with_bytes(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Add the architectures whose caches are tested without the engine."""
    merged: dict[str, Any] = dict(found)
    for name, cache in BY_BYTES.items():
        if merged.get(name, {}).get("verdict", "no_engine") == "no_engine":
            said = merged.get(name, {}).get("error", "no kernel for CPUs")
            merged[name] = {"verdict": "bytes_only", "cache": cache, "error": said}
    return merged


def figures(found: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return how many architectures came to each verdict. One that has several variants counts
    once, by its worst."""
    worst = {}
    for name, one in found.items():
        rank = ("no_engine", *VERDICTS).index(one["verdict"])
        base = name.partition(" (")[0]
        worst[base] = max(worst.get(base, 0), rank)
    counts = Counter(("no_engine", *VERDICTS)[rank] for rank in worst.values())
    return {name: counts[name] for name in (*VERDICTS, "no_engine")}


def kinds(one: Mapping[str, Any]) -> list[str]:
    """Return the kinds of cache that an engine said it has."""
    return sorted({_KINDS.get(spec, spec) for spec, _ in one.get("groups", [])})


def page(results: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    found = {name: one for name, one in results["architectures"].items() if "method" not in one}
    drafts = {name: one for name, one in results["architectures"].items() if "method" in one}
    run = {n: one for n, one in found.items() if one["verdict"] not in ("no_engine", "bytes_only")}
    rest = {name: one for name, one in found.items() if name not in run}
    machine, counts = results["machine"], results["figures"]
    lines = [
        _HEAD.format(vllm=machine["vllm"], runs=len(run), **counts),
        "| architecture | caches | hits | offload | disk, restart | store, shared with | pull "
        "| push | control | log probabilities |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(name, one) for name, one in sorted(run.items(), key=_order)),
        *_refusals(run),
        *_drafts(drafts),
        _REST,
        "| architecture | proof | what the engine said |",
        "|---|---|---|",
        *(
            _joined([name, "bytes" if "cache" in one else "none", _cell(one["error"])])
            for name, one in sorted(rest.items(), key=_order)
        ),
    ]
    return "\n".join(lines) + "\n"


def _order(item: tuple[str, Any]) -> str:
    return item[0].lower()


def _row(name: str, one: Mapping[str, Any]) -> str:
    cells = [name, ", ".join(kinds(one)) or "?"]
    if "rounds" in one and not any(one["rounds"][-1]["cached"]):
        moved = max(one["hand_off"].get("logprobs", 0.0), one["push"].get("logprobs", 0.0))
        return _joined([*cells, "-", "idle", "-", "-", *_pairs(one), "-", f"{moved:.0e}"])
    if one["verdict"] in ("refused_clean", "crashed"):
        return _joined([*cells, "-", one["verdict"].replace("_clean", ""), *"------"])
    hits = "/".join(str(tokens) for tokens in one["rounds"][-1]["cached"])
    cells += [
        hits,
        _same(all(r["same"] for r in one["rounds"])),
        _same(one["restart"]["same"]),
        f"{_same(one['shared']['same'])}; {one['shared_with']}",
        *_pairs(one),
        "seen, caught" if one["control"]["changed"] and one["caught"]["bad_blocks"] else "**no**",
        f"{max(r['logprobs'] for r in one['rounds']):.0e}",
    ]
    return _joined(cells)


def _pairs(one: Mapping[str, Any]) -> list[str]:
    found = [one.get(how, {}) for how in ("hand_off", "push")]
    return [_same(each["same"]) if "same" in each else "refused" for each in found]


def _joined(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _same(right: bool) -> str:
    return "same" if right else "**other**"


def _refusals(run: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        f"| {name} | {part} | {_cell(text)} |"
        for name, one in sorted(run.items(), key=_order)
        for part, text in (
            ("offload" if "rounds" in one else "everything", one.get("error")),
            ("hand-off", one.get("hand_off", {}).get("error")),
        )
        if text
    ]
    if not lines:
        return []
    return ["", "## Refused", "", "| architecture | what | message |", "|---|---|---|", *lines]


def _drafts(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The section on speculative decoding."""
    run = [item for item in sorted(found.items(), key=_order) if "rounds" in item[1]]
    rest = [item for item in sorted(found.items(), key=_order) if "rounds" not in item[1]]
    return [
        _DRAFTS,
        "| architecture | drafts | hits | offload | on both, pull | on both, push "
        "| on prefill only | on decode only |",
        "|---|---|---|---|---|---|---|---|",
        *(_joined([*_target(name), *_drafted(one)]) for name, one in run),
        _NO_DRAFTS,
        "| architecture | drafts | what was seen |",
        "|---|---|---|",
        *(_joined([*_target(name), _cell(one["error"])]) for name, one in rest),
    ]


def _target(key: str) -> list[str]:
    """Return architecture and drafts of a key of :class:`benchmarks.models.drafts.Drafting`."""
    name, _, drafts = key.rstrip(")").partition(" (drafts: ")
    return [name, drafts]


def _drafted(one: Mapping[str, Any]) -> list[str]:
    last = one["rounds"][-1]
    hits = "/".join(str(tokens) for tokens in last["cached"])
    cells = [hits, _same_drafts(last)]
    for side in ("both", "pushed", "prefill_only", "decode_only"):
        moved = f", {one[side]['bytes'] / 2**20:.1f} MiB" if one[side]["bytes"] else ""
        said = _same_drafts(one[side])
        cells.append(f"refused; {said}" if one[side]["refused"] else said + moved)
    return cells


def _same_drafts(found: Mapping[str, Any]) -> str:
    if not found.get("same_drafts", True):
        return _same(found["same"]) + ", **other drafts**"
    return _same(found["same"]) + (" and drafts" if "same_drafts" in found else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")[:300]


def read() -> dict[str, Any]:
    """Return the committed results."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


_HEAD = """\
# Models

<!-- Made by `make models` from benchmarks/results/models.json. -->

This page lists every architecture that was run through KVConnect on the CPU build of vLLM
({vllm}), and what came of it. `make models` makes the page: it runs a tiny random model of each
architecture on an engine without a connector and on engines with KVConnect, and compares.

Of the {runs} models below, by architecture: {right} right, {refused_clean} refused, {wrong} wrong,
{crashed} crashed. A random model shows that pages and states are put back where they belong. It
says nothing about the quality of an answer.

## What "right" means

Four prompts of 41, 203, 517 and 701 tokens, 16 greedy tokens each, on engines with equal weights:

- **Offload:** three rounds; the device's prefix cache is reset in between, so the second and third
  load from host memory. All tokens are those of the engine without a connector, and the **hits**
  (tokens found per prompt) are all full blocks; with states, those up to the last state that vLLM
  keeps, as for hits on the device.
- **Disk, restart:** a new engine finds the same blocks in the disk tier of the first.
- **Store:** a new engine finds the same blocks in a Valkey server to which the first wrote. The
  engine says with which others it can share them: SGLang and vLLM of any tensor parallelism, vLLM
  of any, or vLLM with the same ranks.
- **Pull, push:** another engine receives the prompts' KV over TCP and continues: after the first
  one computed the prompt, or layer by layer while it computes. With states, decode computes the
  prompt's last token alone, which rounds differently. So its first token is compared with that of
  the engine without a connector after it computed the last token alone, too.
- **Control:** the engine is made to load another prompt's pages or states. With digests off the
  tokens must change (*seen*). With `"digest": "full"` the load must fail and the tokens must be
  right (*caught*). With states, a state that is one boundary too old must be seen and caught, too.
  A model whose tokens do not change proves nothing and is not counted as right.
- **Same:** all tokens are equal. The last column has the largest difference of the log
  probabilities of the tokens that were loaded, or handed off where nothing is loaded.

## Architectures
"""
_DRAFTS = """
## Speculative decoding

Tiny random draft models, EAGLE heads and MTP layers, in the same rounds and hand-offs. The target
checks each draft, so a draft model's wrong KV changes no token. So every draft is compared, too:
*same and drafts* are those of an engine without a connector. Control: after the draft
model's KV is overwritten, its drafts change and the tokens stay (tried where one KV-cache group has
all layers and the device keeps prefixes). If a decode engine has layers that the prefill engine
lacks, or the KV-cache groups differ, the hand-off is *refused* with one line, and the decode engine
computes the prompt.
"""
_NO_DRAFTS = """
These ways fail in vLLM's CPU engine itself, without any connector:
"""
_REST = """
## Not run

The CPU engine does not run these: they need kernels that it lacks. *Bytes:* tests make their caches
with vLLM's own code, then store, load and hand off every block and compare the bytes
(`tests/unit/engines/test_vllm_cache_specs.py`).
"""
