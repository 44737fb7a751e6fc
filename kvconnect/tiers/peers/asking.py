"""Asks other engines which blocks they have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, product

from kvconnect.errors import ProtocolError
from kvconnect.protocol.cache_messages import MAX_ASKED, WHOLE, Ask, Found
from kvconnect.tiers.peers.sources import CacheSource, CacheSources
from kvconnect.transport.base import PeerId

Holders = frozenset[PeerId]
"""Workers that together have all units of a block; empty if there are none."""


@dataclass(eq=False)
class _Question:
    """One worker is asked for some keys, the caller's from ``first`` on."""

    source: CacheSource
    first: int
    keys: list[bytes]
    found: bytes | None = None


class Questions:
    """Questions to sources. :meth:`find` is for any thread, the rest for the one that polls the
    transport. ``wait_s``: how long it waits for answers."""

    def __init__(self, sources: CacheSources, wait_s: float, clock: Callable[[], float]) -> None:
        self._sources = sources
        self._wait_s = wait_s
        self._clock = clock
        self._open: dict[int, _Question] = {}

    def find(
        self, keys: Sequence[bytes], groups: Sequence[int], peers: Collection[PeerId]
    ) -> list[Holders]:
        """Ask ``peers`` at once, those that can be asked and read from, and wait for their answers
        until the deadline. Return for each key who has it; ``groups`` are the keys' groups."""
        with self._sources.changed:
            questions = self._ask(keys, peers)
            asked = {next(self._sources.numbers): question for question in questions}
            self._open.update(asked)
        for number, question in asked.items():
            self._sources.say(question.source.peer, Ask(number, question.keys))
        with self._sources.changed:
            self._sources.changed.wait_for(
                lambda: all(question.found is not None for question in asked.values()),
                self._wait_s,
            )
            for number in asked:
                del self._open[number]
            return self._holders(asked.values(), groups)

    def on_found(self, peer: PeerId, message: Found) -> None:
        """Take an answer; raises :class:`ProtocolError` if it answers no question."""
        with self._sources.changed:
            question = self._open.get(message.ask)
            if question is None:  # it came too late
                return
            if question.source.peer != peer or len(message.found) != len(question.keys):
                raise ProtocolError(f"answer to question {message.ask}, which was not asked")
            memory, places = question.source.memory, message.places
            if places and len(places) != len(message.found) - message.found.count(0):
                raise ProtocolError(f"{len(places)} places in the answer to question {message.ask}")
            if places and memory is not None:
                for key, place in zip(compress(question.keys, message.found), places, strict=True):
                    memory.learn(key, place)
            question.found = message.found
            self._sources.changed.notify_all()

    def on_down(self, peer: PeerId) -> None:
        """A source is gone."""
        with self._sources.changed:
            for question in self._open.values():
                if question.source.peer == peer and question.found is None:
                    question.found = b""
            self._sources.changed.notify_all()

    def _ask(self, keys: Sequence[bytes], peers: Collection[PeerId]) -> Iterator[_Question]:
        now = self._clock()
        sources = [
            each
            for each in self._sources.of(peers)
            if each.readable(now) and each.breaker.enter(now)
        ]
        for first, source in product(range(0, len(keys), MAX_ASKED), sources):
            yield _Question(source, first, list(keys[first : first + MAX_ASKED]))

    def _holders(self, asked: Collection[_Question], groups: Sequence[int]) -> list[Holders]:
        """Return who has each block, and note, once for all messages, who was late."""
        now = self._clock()
        late = {question.source for question in asked if question.found is None}
        for source in {question.source for question in asked}:
            if source in late:
                source.breaker.failed(now)
            else:
                source.breaker.succeeded()
        holders: list[set[PeerId]] = [set() for _ in groups]
        for question in asked:
            for place, there in enumerate(question.found or b""):
                if there:
                    holders[question.first + place].add(question.source.peer)
        pairs = zip(holders, groups, strict=True)
        return [frozenset(p) if self._covers(p, group) else frozenset() for p, group in pairs]

    def _covers(self, peers: set[PeerId], group: int) -> bool:
        there = {unit for source in self._sources.of(peers) for unit in source.units[group]}
        return WHOLE in there or there.issuperset(self._sources.groups[group][0].parts)
