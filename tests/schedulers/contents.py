"""What a token's KV is made of: a fingerprint of everything that it depends on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

VOCABULARY = 997
GARBAGE = 0x7F000000  # no fingerprint is as large
_MASK = 0x3FFFFFFF


def text(scope: object, tokens: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """Return the fingerprint before each token and after the last one.

    ``scope``: what a sequence's KV depends on besides its tokens: weights, adapter and salt.
    ``known``: fingerprints of a beginning of the same sequence, from an earlier call.
    """
    found = list(known) or [zlib.crc32(repr(scope).encode()) & _MASK]
    for token in tokens[len(found) - 1 :]:
        found.append(zlib.crc32(token.to_bytes(4, "little"), found[-1]) & _MASK)
    return found


def next_token(fingerprint: int) -> int:
    """Return the token that the model samples after this fingerprint: never 0, which stands for
    an embedding."""
    return 1 + fingerprint % (VOCABULARY - 1)


def tag(layer: int, part: int) -> int:
    """Return what tells layers apart, and their heads (of states: their ranks)."""
    return (layer * 7919 + part * 104729 + 1) & _MASK


class KnownText:
    """The tokens of a request as the model knows them. Prompts given as embeddings have a number
    made of each row in place of a token."""

    def __init__(self, scope: object, tokens: Sequence[int]) -> None:
        self.scope = scope
        self.tokens = list(tokens)
        self._seen: tuple[object, list[int]] = (None, [])
        self._made: list[int] = []

    def fingerprints(self, weights: object) -> list[int]:
        """Return the fingerprint before each token and after the last one, with these weights."""
        scope = (weights, self.scope)
        known, seen = self._seen
        kept = 0
        if known == scope:
            most = min(len(seen), len(self.tokens))
            same = seen[:most] == self.tokens[:most]
            kept = most if same else next(n for n in range(most) if seen[n] != self.tokens[n])
        self._made = text(scope, self.tokens, self._made[: kept + 1] if kept else ())
        self._seen = scope, list(self.tokens)
        return self._made


def continuation(scope: object, weights: object, prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that an engine without caches samples after a prompt."""
    known = KnownText(scope, prompt)
    for _ in range(count):
        known.tokens.append(next_token(known.fingerprints(weights)[-1]))
    return known.tokens[len(prompt) :]
