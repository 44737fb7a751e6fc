"""Between which engines KV has been seen to move. Pure: time is an argument.

Engines are probed in pairs, but not every pair: each engine with one partner, a different one each
time. When a probe fails, either of the two may be at fault: if just one of them was proven before,
the other is; else both are unproven, and probed again with others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvconnect.router.policy.loads import Role

RETRY_S = 10.0  # from a failed probe to the next one of the same engine

EngineKey = tuple[Role, int]
"""An engine by its role and number."""


class EnginePair(NamedTuple):
    """A prefill and a decode engine, by number."""

    prefill: int
    decode: int

    @property
    def engines(self) -> tuple[EngineKey, EngineKey]:
        """Both."""
        return (Role.PREFILL, self.prefill), (Role.DECODE, self.decode)


class Pairing:
    """What probes have shown, and which are due. Not thread-safe.

    Attributes:
        broken: pairs whose last probe failed, and why.
    """

    def __init__(self, interval_s: float) -> None:
        self.broken: dict[EnginePair, str] = {}
        self._interval_s = interval_s
        self._proven: set[EngineKey] = set()
        self._next: dict[EngineKey, float] = {}  # when it is to be probed; of new ones at once
        self._again: dict[EnginePair, float] = {}  # when this very pair is to be
        self._open: set[EnginePair] = set()  # being probed
        self._turn = 0

    def proven(self, engine: EngineKey) -> bool:
        """Whether a probe has passed since the engine came up, and it has not been blamed since."""
        return engine in self._proven

    def may_be_due(self, engines: Iterable[EngineKey], now: float) -> bool:
        """Whether :meth:`due` may return anything for these engines."""
        return any(self._next.get(engine, now) <= now for engine in engines) or any(
            at <= now for at in self._again.values()
        )

    def due(self, pairs: Sequence[EnginePair], now: float) -> list[EnginePair]:
        """Return what to probe now of all ``pairs`` that could be: each engine whose time has come
        once, and single pairs that are to be looked at again. :meth:`began` comes next."""
        pairs = [pair for pair in pairs if pair not in self._open]
        found = [pair for pair in pairs if self._again.get(pair, now + 1) <= now]
        waiting = {
            engine
            for pair in pairs
            for engine in pair.engines
            if self._next.get(engine, now) <= now
        }
        waiting -= {engine for pair in found for engine in pair.engines}
        if waiting:
            for pair in self._ranked(pairs, frozenset(waiting)):
                if waiting.intersection(pair.engines):
                    found.append(pair)
                    waiting.difference_update(pair.engines)
        return found

    def _ranked(
        self, pairs: Sequence[EnginePair], waiting: Collection[EngineKey]
    ) -> list[EnginePair]:
        """Return pairs with the most telling first: not known to be broken, of use to both, with
        one whose word can be trusted; of equals, with a different partner each time."""
        sides = [sorted({pair[side] for pair in pairs}) for side in (0, 1)]
        place = [{number: at for at, number in enumerate(side)} for side in sides]
        most = max(map(len, sides))
        self._turn += 1

        def rank(pair: EnginePair) -> tuple[bool, bool, bool, int]:
            both = all(engine in waiting for engine in pair.engines)
            trusted = any(engine in self._proven for engine in pair.engines)
            turn = (place[0][pair.prefill] + place[1][pair.decode] + self._turn) % most
            return pair in self.broken, not both, not trusted, turn

        return sorted(pairs, key=rank)

    def began(self, pair: EnginePair) -> None:
        """A probe of the pair begins; :meth:`passed` or :meth:`failed` ends it."""
        self._open.add(pair)
        self._again.pop(pair, None)
        for engine in pair.engines:
            self._next[engine] = float("inf")

    def passed(self, pair: EnginePair, now: float) -> None:
        """The probe's KV arrived, or nothing can be said against it."""
        if self._end(pair):
            self.broken.pop(pair, None)
            self._proven.update(pair.engines)
            self._next.update(dict.fromkeys(pair.engines, now + self._interval_s))

    def mark_proven(self, pair: EnginePair) -> None:
        """A probe passed that was made for another reason. Where there are no others, it proves
        nothing: engines that are proven get the requests of those that are not."""
        if self._interval_s:
            self.broken.pop(pair, None)
            self._proven.update(pair.engines)

    def failed(self, pair: EnginePair, why: str, now: float) -> None:
        """It did not."""
        if self._end(pair):
            self.broken[pair] = why
            self._again[pair] = now + self._interval_s
            proven = self._proven.intersection(pair.engines)
            soon = now + RETRY_S
            if len(proven) == 2:  # which of them is it?
                self._proven -= proven
                soon = now
            self._next.update(dict.fromkeys(pair.engines, soon))

    def void(self, pair: EnginePair, now: float) -> None:
        """It could not be made; changes nothing after a verdict."""
        if self._end(pair):
            self._next.update(dict.fromkeys(pair.engines, now + RETRY_S))

    def recheck(self, pair: EnginePair) -> None:
        """A request failed on the pair: have it probed, unless it is known to be broken."""
        if pair not in self.broken and pair not in self._open:
            self._again[pair] = 0.0

    def forget(self, engine: EngineKey) -> None:
        """An engine was lost; what comes back may be another incarnation."""
        self._proven.discard(engine)
        self._next.pop(engine, None)
        for pairs in (self.broken, self._again):
            for pair in [pair for pair in pairs if engine in pair.engines]:
                del pairs[pair]
        for pair in [pair for pair in self._open if engine in pair.engines]:
            self._open.remove(pair)
            for each in pair.engines:  # its partner's probe shows nothing any more
                self._next.pop(each, None)

    def _end(self, pair: EnginePair) -> bool:
        """Return whether the probe still counts: neither engine has been lost since it began."""
        known = pair in self._open
        self._open.discard(pair)
        return known
