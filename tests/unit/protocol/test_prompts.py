"""Identities of prompts: equal for equal prompts, and a difference names both values."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity, difference, identify

IDS, CONTEXT = [5, 6, 7], ("poet", "salt", [["image", 3]])
PROMPT = identify(IDS, CONTEXT)


def test_equal_prompts_have_one_identity_in_any_form() -> None:
    assert identify(array("q", IDS), CONTEXT) == identify(iter(IDS), CONTEXT) == PROMPT
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(PROMPT), type=PromptIdentity) == PROMPT
    assert difference(PROMPT, identify(IDS, CONTEXT)) == ""
    assert difference(NO_PROMPT, NO_PROMPT) == ""


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (identify([5, 6, 8], CONTEXT), "token ids"),
        (identify([5, 6, 7, 0], CONTEXT), "token ids"),
        (identify([], CONTEXT), "token ids"),
        (identify(IDS, ("painter", *CONTEXT[1:])), "media, adapter or salt"),
        (identify(IDS, ("poet", "other", CONTEXT[2])), "media, adapter or salt"),
        (identify(IDS, (*CONTEXT[:2], [["other", 3]])), "media, adapter or salt"),
        (NO_PROMPT, "token ids"),
    ],
)
def test_a_difference_names_both_values(other: PromptIdentity, what: str) -> None:
    text = difference(PROMPT, other)
    assert text.startswith(f"the prompts differ in their {what}: prefill has 3 tokens (ids ")
    for prompt in (PROMPT, other):
        assert str(prompt) in text
        assert prompt.ids[:8].hex() in str(prompt) and prompt.context[:8].hex() in str(prompt)
    assert difference(other, PROMPT) != text, "it says whose is whose"


def test_media_are_compared_if_both_know_them() -> None:
    known, other = identify(IDS, CONTEXT, b"one"), identify(IDS, CONTEXT, b"two")
    assert difference(known, identify(IDS, CONTEXT, b"one")) == ""
    assert difference(known, PROMPT) == difference(PROMPT, known) == ""
    said = difference(known, other)
    assert "in their media, adapter or salt" in said
    assert str(known) in said and str(other) in said and str(known) != str(other)


def test_versions_that_know_no_media_are_understood() -> None:
    data = msgspec.msgpack.encode((PROMPT.tokens, PROMPT.ids, PROMPT.context))
    assert msgspec.msgpack.decode(data, type=PromptIdentity) == PROMPT


def test_no_real_prompt_is_like_none() -> None:
    assert identify([], None) != NO_PROMPT


def test_half_of_a_surrogate_pair_is_a_value_like_any_other() -> None:
    """JSON may hold one, and encoding it as UTF-8 would raise in the engine's scheduler."""
    assert identify(IDS, "\ud800") != identify(IDS, "\ud801")
