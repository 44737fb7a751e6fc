"""Prompts of plain words: new ones share no block with any other. Pure but for the randomness."""

from __future__ import annotations

import random

WORDS = (
    "apple bird blue boat book bread bridge chair cloud coat corn door earth field fire fish floor "
    "flower garden glass gold grass green hand hill home horse house ice island key lake lamp leaf "
    "letter light milk moon morning mountain night ocean paper park path rain red river road rock "
    "room salt sand sea ship silver sky snow song star stone street summer sun table tea tower"
)
_CALIBRATION_WORDS = 64
_RECALLED = 32  # words from the middle that end a prompt


class PromptMaker:
    """Makes prompts of about as many tokens as asked for, once it knows the tokenizer's rate."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._all = WORDS.split()
        self._tokens_per_word = 1.0

    def calibration(self) -> str:
        """Return a short prompt, to be counted by the engine."""
        return " ".join(self._words(_CALIBRATION_WORDS))

    def calibrate(self, tokens: int) -> None:
        """Take the number of tokens that a :meth:`calibration` has."""
        self._tokens_per_word = max(tokens / _CALIBRATION_WORDS, 0.1)

    def new(self, tokens: int) -> str:
        """Return a new prompt of about so many tokens.

        It ends by repeating words from its middle. So a model knows what comes next, and from KV of
        the middle; of words at random, the slightest rounding would decide.
        """
        words = self._words(max(1, int(tokens / self._tokens_per_word)))
        if len(words) > 2 * _RECALLED:
            middle = len(words) // 2 - _RECALLED
            words[-_RECALLED:] = words[middle : middle + _RECALLED]
        return " ".join(words)

    def _words(self, count: int) -> list[str]:
        return self._chance.choices(self._all, k=count)
