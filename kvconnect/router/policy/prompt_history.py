"""Prompts that were sent to targets: an estimate of caches without KV events. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count

from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.prefixes import CHUNK_TOKENS, CacheHit

_MOST = 250_000  # remembered chunks of all targets: about 50 MB
_PROMPTS = 8  # that a target's share has room for, however long they are,
_LONG = 2048  # but for those of so many chunks or fewer


class History:
    """Prompt prefixes sent to targets: an estimate of caches without KV events. Not thread-safe.

    A target is assumed to hold the chunks that it was sent last; how many, all share evenly.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._sent: dict[Target, OrderedDict[int, None]] = {}  # prefixes, the oldest first
        self._holders: dict[int, int] = {}  # prefix -> bits of the targets that were sent it
        self._bits: dict[Target, int] = {}
        self._targets: dict[int, Target] = {}  # by bit

    def __len__(self) -> int:
        return sum(map(len, self._sent.values()))

    def match(self, chunk_hashes: Sequence[int]) -> dict[Target, CacheHit]:
        """Return the longest prefix of a prompt that each target was sent, if any."""
        found: dict[Target, CacheHit] = {}
        chunks, going = 0, 0  # how long the prefix is, and who was sent all of it
        for prefix in _prefixes(chunk_hashes):
            holders = self._holders.get(prefix, 0)
            if chunks:
                holders &= going
                self._ended(found, going ^ holders, chunks)
            going = holders
            if not going:
                break
            chunks += 1
        self._ended(found, going, chunks)
        return found

    def sent(self, target: Target, chunk_hashes: Sequence[int]) -> None:
        """Record that a prompt was sent to ``target``."""
        if not chunk_hashes:
            return
        if target not in self._sent:
            self._add(target)
        sent, bit = self._sent[target], self._bits[target]
        share = self._most // len(self._sent)
        most = max(share // _PROMPTS, min(share, _LONG))
        # A prompt's end is forgotten first.
        for prefix in reversed(list(_prefixes(chunk_hashes[:most]))):
            sent[prefix] = None
            sent.move_to_end(prefix)
            self._holders[prefix] = self._holders.get(prefix, 0) | bit
        self._keep(target, share)

    def forget(self, target: Target) -> None:
        """Forget all prompts sent to ``target``."""
        if target in self._sent:
            self._keep(target, 0)
            del self._sent[target], self._targets[self._bits.pop(target)]

    def _add(self, target: Target) -> None:
        bit = next(1 << number for number in count() if 1 << number not in self._targets)
        self._sent[target], self._bits[target] = OrderedDict(), bit
        self._targets[bit] = target
        for other in self._sent:
            self._keep(other, self._most // len(self._sent))

    def _keep(self, target: Target, most: int) -> None:
        sent, bit = self._sent[target], self._bits[target]
        while len(sent) > most:
            prefix, _ = sent.popitem(last=False)
            self._holders[prefix] ^= bit
            if not self._holders[prefix]:
                del self._holders[prefix]

    def _ended(self, found: dict[Target, CacheHit], bits: int, chunks: int) -> None:
        tokens = chunks * CHUNK_TOKENS
        while bits:
            bit = bits & -bits
            found[self._targets[bit]] = CacheHit(tokens, float(tokens), tokens)
            bits ^= bit


def _prefixes(chunk_hashes: Sequence[int]) -> Iterator[int]:
    """Yield a name of the first chunk, of the first two, and so on."""
    prefix = 0
    for chunk in chunk_hashes:
        prefix = hash((prefix, chunk))
        yield prefix
