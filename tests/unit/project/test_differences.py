"""The table of differences says what the code's comparisons say; documents.py checks its text."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvconnect.protocol import negotiation, prompts
from scripts import differences
from scripts.differences import BASE, CONNECT, LINES, REQUEST, Engine, outcome

FIELDS = {
    "weights: other files": "weights",
    "weights: one side was updated, to a declared version": "weights",
    "model": "model",
    "configuration of the model": "architecture",
    "chat template or tokenizer": "prompt",
    "adapter": "prompt",
    "image or other media": "prompt",
    "salt": "prompt",
    "`--dtype`": "dtype",
    "`--dtype`, with an 8-bit cache on both": "compute_dtype",
    "`--kv-cache-dtype`": "cache_dtype",
    "`--quantization` of weights that have none": "quantization",
    "block size, one divides the other": "",
    "block size, neither divides the other": "block_tokens",
    "block size, pages that are packed as a whole": "splittable",
    "number of KV heads": "kv_heads",
    "tensor parallelism": "",
    "layers: decode has one that prefill has not": "layers",
    "sliding window": "window",
    "bytes of a token": "row_bytes",
    "page packing": "packing",
    "speculative decoding": "tokens_ahead",
    "version of KVConnect, same protocol": "",
    "version of KVConnect, older protocol": "protocol",
}


def sides(what: str) -> tuple[Engine, Engine]:
    line = LINES[what]
    return line if isinstance(line, tuple) else (BASE, line)


@pytest.mark.parametrize("what", LINES)
def test_each_difference_is_refused_by_its_field_with_both_values(what: str) -> None:
    """Both ways round, but for layers that decode does not ask for. Control: without the
    difference, the same two engines hand off."""
    prefill, decode = sides(what)
    ways = [(prefill, decode), (decode, prefill)]
    for pair in ways[: 1 if what.startswith("layers") else 2]:
        when, words = outcome(*pair)
        assert when == {"": "", "prompt": REQUEST}.get(FIELDS[what], CONNECT)
        assert words.startswith(f"`{FIELDS[what]}`: " if FIELDS[what] else "")
        if FIELDS[what] == "protocol":
            assert "here" in words and "there" in words
        elif what != "block size, pages that are packed as a whole":
            assert words.count("decode") == words.count("prefill") == (1 if words else 0)
    assert outcome(prefill, prefill) == outcome(decode, decode) == ("", "")


def test_each_line_is_one_difference() -> None:
    for what in LINES:
        prefill, decode = sides(what)
        changed = {
            one.name
            for one in fields(Engine)
            if getattr(prefill, one.name) != getattr(decode, one.name)
        }
        assert len(changed - {"software"}) <= 1, what
        assert changed, what


@pytest.mark.parametrize(
    ("module", "check", "what"),
    [
        (negotiation, "_match_weights", "weights: other files"),
        (negotiation, "_match_formats", "page packing"),
        (negotiation, "_check_cut", "block size, pages that are packed as a whole"),
    ],
)
def test_a_comparison_that_is_gone_changes_the_table(
    module: object, check: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = differences.table()
    monkeypatch.setattr(module, check, lambda *_: "")
    assert outcome(*sides(what)) == ("", "")
    assert differences.table() != before


def test_a_prompt_that_is_not_compared_changes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    before = differences.table()
    monkeypatch.setattr(differences, "difference", lambda prefill, decode: "")
    assert differences.table() != before
    assert prompts.difference is not differences.difference


def test_what_is_stored_is_found_by_equal_engines_alone() -> None:
    assert BASE.stored() == Engine().stored() == replace(BASE, tp=2).stored()
    for changed in ({"files": "d2a9"}, {"salt": "a"}, {"adapter": "a"}, {"block_tokens": 16}):
        assert replace(BASE, **changed).stored() != BASE.stored()  # type: ignore[arg-type]
