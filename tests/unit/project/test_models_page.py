"""docs/models.md says what the committed run of ``make models`` found, and nothing else."""

from __future__ import annotations

import copy

import pytest

from benchmarks.models.dense import DENSE, THROUGH_TRANSFORMERS
from benchmarks.models.experts import MIXTURES
from benchmarks.models.hybrids import HYBRIDS
from benchmarks.models.latent import LATENT
from benchmarks.models.page import BY_BYTES, PAGE, ROOT, VERDICTS, figures, page, read
from benchmarks.models.windows import WINDOWS
from kvconnect.cache.architectures import kinds_of


def test_the_page_is_made_from_the_committed_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read())


def test_the_figures_are_those_of_the_architectures() -> None:
    results = read()
    assert results["figures"] == figures(results["architectures"])
    assert results["figures"]["wrong"] == results["figures"]["crashed"] == 0
    assert results["figures"]["right"] >= 30


def test_what_counts_as_right_was_compared() -> None:
    for name, one in read()["architectures"].items():
        if one["verdict"] != "right" or "method" in one:
            continue
        assert one["problems"] == [], name
        compared = [*one["rounds"], one["restart"], one["shared"], one["hand_off"], one["push"]]
        assert all(found["same"] for found in compared), name
        assert any(one["rounds"][-1]["cached"]) and any(one["shared"]["cached"]), name
        assert one["control"]["changed"] and one["caught"]["bad_blocks"] > 0, name


def test_drafts_that_count_as_right_were_compared() -> None:
    """And those of a draft model change when its KV does, where that can be tried."""
    ways = {name: one for name, one in read()["architectures"].items() if "method" in one}
    right = [one for one in ways.values() if one["verdict"] == "right"]
    assert {one["method"] for one in right} == {"ngram", "medusa"} | WITH_KV
    for one in right:
        assert one["problems"] == []
        compared = [*one["rounds"], one["both"], one["pushed"], one["decode_only"]]
        assert all(found["same"] and found["same_drafts"] for found in compared)
        assert one.get("control", {}).get("changed", True)
    assert {one["method"] for one in right if "control" in one} == WITH_KV


WITH_KV = {"draft_model", "eagle", "eagle3", "mtp"}
"""Ways to draft that have KV of their own."""
MODELS = (*DENSE, *THROUGH_TRANSFORMERS, *MIXTURES, *HYBRIDS, *LATENT, *WINDOWS)
KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MLAAttentionSpec": "latent",
    "MambaSpec": "state",
}

LATENT_ON_SGLANG = {"MiniCPM3ForCausalLM": {"full"}}
"""vLLM keeps their K and V. The table has SGLang's kind of cache, which is shared less widely."""


def test_the_table_of_architectures_says_the_caches_that_were_found() -> None:
    """What ``kvconnect doctor --model`` tells of a configuration, against the engine's caches."""
    tiny = {one.key: one.written() for one in MODELS}
    results = read()["architectures"]
    found = {key: one["groups"] for key, one in results.items() if one.get("groups")}
    found = {key: groups for key, groups in found.items() if "method" not in results[key]}
    said = {key: {*kinds_of(tiny[key])} for key in found} | LATENT_ON_SGLANG
    assert said == {key: {KINDS[spec] for spec, _ in groups} for key, groups in found.items()}
    # Control: the kinds depend on the configuration.
    assert {*kinds_of({**tiny["LlamaForCausalLM"], "kv_lora_rank": 64, "architectures": []})} == {
        "latent"
    }


def test_caches_that_were_compared_by_bytes_are_in_their_test() -> None:
    caches = (ROOT / "tests" / "unit" / "engines" / "vllm_caches.py").read_text(encoding="utf-8")
    assert [name for name in BY_BYTES.values() if f'"{name}": ' not in caches] == []


@pytest.mark.parametrize("verdict", VERDICTS)
def test_an_architecture_counts_by_its_worst_variant(verdict: str) -> None:
    both = {"A (one)": {"verdict": "right"}, "A (other)": {"verdict": verdict}}
    assert figures(both)[verdict] == 1
    assert sum(figures(both).values()) == 1


def test_negative_control_other_results_make_another_page() -> None:
    results = copy.deepcopy(read())
    name = next(n for n, one in results["architectures"].items() if one["verdict"] == "right")
    results["architectures"][name]["restart"]["same"] = False
    assert page(results) != PAGE.read_text(encoding="utf-8")
