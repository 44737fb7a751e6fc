"""Pairing: between which engines probes have moved KV, and which probes are due. Pure.

Each engine is probed with one partner at a time, a different one each time. When a probe fails,
either engine may be at fault: if exactly one was proven before, the other one is; otherwise both
become unproven, and are probed with others. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvconnect.router.policy.fleet_view import Role

RETRY_S = 10.0  # from a failed probe to the engine's next one

EngineKey = tuple[Role, int]
"""An engine by its role and number."""


class EnginePair(NamedTuple):
    """A prefill and a decode engine, by number."""

    prefill: int
    decode: int

    @property
    def engines(self) -> tuple[EngineKey, EngineKey]:
        """Both engines."""
        return (Role.PREFILL, self.prefill), (Role.DECODE, self.decode)


class Pairing:
    """Results of probes, and probes that are due. Not thread-safe.

    Attributes:
        broken: pairs whose last probe failed -> the error.
    """

    def __init__(self, interval_s: float) -> None:
        self.broken: dict[EnginePair, str] = {}
        self._interval_s = interval_s
        self._proven: set[EngineKey] = set()
        self._next: dict[
            EngineKey, float
        ] = {}  # time of the next probe; a new engine is due at once
        self._again: dict[EnginePair, float] = {}  # time of the next probe of this pair
        self._open: set[EnginePair] = set()  # under probe
        self._turn = 0

    def proven(self, engine: EngineKey) -> bool:
        """Whether a probe has passed since the engine came up, and none has blamed it since."""
        return engine in self._proven

    def may_be_due(self, engines: Iterable[EngineKey], now: float) -> bool:
        """Whether :meth:`due` may return pairs of these engines."""
        return any(self._next.get(engine, now) <= now for engine in engines) or any(
            at <= now for at in self._again.values()
        )

    def due(self, pairs: Sequence[EnginePair], now: float) -> list[EnginePair]:
        """Return the pairs of ``pairs`` to probe now: each due engine once, and all due pairs.
        Call :meth:`began` for each of them next."""
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
        """Return pairs, the most informative first: not known to be broken, both engines due, one
        engine proven; among equals, a different partner each time."""
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
        """Start a probe; :meth:`passed`, :meth:`failed` or :meth:`void` ends it."""
        self._open.add(pair)
        self._again.pop(pair, None)
        for engine in pair.engines:
            self._next[engine] = float("inf")

    def passed(self, pair: EnginePair, now: float) -> None:
        """End a probe whose KV arrived, or that shows no fault."""
        if self._end(pair):
            self.broken.pop(pair, None)
            self._proven.update(pair.engines)
            self._next.update(dict.fromkeys(pair.engines, now + self._interval_s))

    def mark_proven(self, pair: EnginePair) -> None:
        """Record a passed probe outside the schedule. Ignored without periodic probes, since proven
        engines take the requests of unproven ones."""
        if self._interval_s:
            self.broken.pop(pair, None)
            self._proven.update(pair.engines)

    def failed(self, pair: EnginePair, why: str, now: float) -> None:
        """End a probe whose KV did not arrive."""
        if self._end(pair):
            self.broken[pair] = why
            self._again[pair] = now + self._interval_s
            proven = self._proven.intersection(pair.engines)
            soon = now + RETRY_S
            if len(proven) == 2:  # which of them is at fault is not known
                self._proven -= proven
                soon = now
            self._next.update(dict.fromkeys(pair.engines, soon))

    def void(self, pair: EnginePair, now: float) -> None:
        """End a probe without a result; does nothing after :meth:`passed` or :meth:`failed`."""
        if self._end(pair):
            self._next.update(dict.fromkeys(pair.engines, now + RETRY_S))

    def recheck(self, pair: EnginePair) -> None:
        """Probe the pair soon, because a request failed on it; unless it is known to be broken."""
        if pair not in self.broken and pair not in self._open:
            self._again[pair] = 0.0

    def forget(self, engine: EngineKey) -> None:
        """Forget an engine that went down; it may come back as another one."""
        self._proven.discard(engine)
        self._next.pop(engine, None)
        for pairs in (self.broken, self._again):
            for pair in [pair for pair in pairs if engine in pair.engines]:
                del pairs[pair]
        for pair in [pair for pair in self._open if engine in pair.engines]:
            self._open.remove(pair)
            for each in pair.engines:  # the probe shows nothing about its partner any more
                self._next.pop(each, None)

    def _end(self, pair: EnginePair) -> bool:
        """End the probe; return whether it counts: neither engine went down since it began."""
        known = pair in self._open
        self._open.discard(pair)
        return known
