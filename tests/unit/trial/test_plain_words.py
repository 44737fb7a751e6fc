"""Prompts of trials: their length, and what a model can know of their end."""

from __future__ import annotations

import random

from kvconnect.trial.plain_words import PromptMaker


def test_a_prompt_has_about_as_many_tokens_as_asked_for() -> None:
    maker = PromptMaker(random.Random(1))
    assert len(maker.new(500).split()) == 500
    maker.calibrate(2 * len(maker.calibration().split()))  # two tokens a word
    assert len(maker.new(500).split()) == 250


def test_a_prompt_ends_in_the_middle_of_itself_and_is_like_no_other() -> None:
    maker = PromptMaker(random.Random(1))
    words = maker.new(500).split()
    end, before = words[-32:], words[:-32]
    (start,) = (n for n in range(len(before)) if before[n : n + 32] == end)
    assert 200 < start < 250
    others = [maker.new(500).split()[:16] for _ in range(50)]
    assert words[:16] not in others
