"""Keeps connections to the workers that the configuration has, and to those that tickets name."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.protocol.addresses import Addresses
from kvconnect.protocol.tickets import MOST_SHARING
from kvconnect.transport.base import Disconnect, PeerId, Transport

GREET_S = 0.5
"""Seconds for which requests wait for a new connection; it stays, and later ones find it open."""
IDLE_S = 600.0
"""Seconds after which the connection to a worker that no request names any more is closed."""
MOST_NAMED = 2 * MOST_SHARING
"""Workers that are connected to because tickets name them; the others are forgotten."""

_LONGEST_RETRY_S = 5.0  # engines of a fleet start within minutes of one another


def _breaker() -> CircuitBreaker:
    return CircuitBreaker(1, _LONGEST_RETRY_S)


@dataclass(eq=False)
class _Dialled:
    """A worker to connect to. ``named``: when a ticket last named it; infinite: it is configured.
    ``peer``: its connection, begun at ``began`` and in use once it has ``answered``. ``ended``:
    this side ends it and connects again at once."""

    named: float = math.inf
    breaker: CircuitBreaker = field(default_factory=_breaker)
    peer: PeerId | None = None
    began: float = 0.0
    answered: bool = False
    ended: bool = False

    @property
    def configured(self) -> bool:
        return self.named == math.inf

    @property
    def opening(self) -> bool:
        return self.peer is not None and not self.answered


class Dialler:
    """Workers by address. A lost connection to a configured worker is made again with back-off, one
    to a named worker when it is named again. Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        configured: Sequence[tuple[str, int]],
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False
        self._known = {address: _Dialled() for address in configured}
        self._addresses: dict[PeerId, tuple[str, int]] = {}  # of connections
        self._own: set[tuple[str, int]] = set()  # where this worker itself listens

    def __len__(self) -> int:
        return len(self._known)

    @property
    def configured(self) -> bool:
        """Whether a worker is configured."""
        with self._changed:
            return any(one.configured for one in self._known.values())

    def peers(self, named: Addresses = ()) -> list[PeerId]:
        """Return the connections to the named workers, or else to the configured ones. Named
        workers are connected to first if need be, which takes ``GREET_S`` seconds at most."""
        now = self._clock()
        with self._changed:
            if named:
                found = [self._name(each, now) for each in named if each not in self._own]
                began = max((one.began for one in found if one.opening), default=now)
                self._changed.wait_for(
                    lambda: self._closed or not any(one.opening for one in found),
                    max(0.0, began + GREET_S - now),
                )
            else:
                found = [one for one in self._known.values() if one.configured]
            return [one.peer for one in found if one.peer is not None]

    def tick(self, now: float) -> None:
        """Connect to the configured workers; forget those that were not named for long."""
        with self._changed:
            for address, one in list(self._known.items()):
                if one.configured:
                    self._dial(address, one, now)
                elif now - one.named >= IDLE_S:
                    self._drop(address, "no request names it")

    def address(self, peer: PeerId) -> tuple[str, int] | None:
        """Return where a peer listens; None if it connected to this worker."""
        with self._changed:
            return self._addresses.get(peer)

    def answered(self, peer: PeerId) -> None:
        """A worker is there, and can be asked if it keeps the same blocks."""
        with self._changed:
            one = self._of(peer)
            if one is not None:
                one.answered = True
                one.breaker.succeeded()
                self._changed.notify_all()

    def forget(self, peer: PeerId) -> None:
        """Never connect to an address again: this worker itself listens there."""
        with self._changed:
            address = self._addresses.get(peer)
            if address is not None:
                self._own.add(address)
                self._drop(address, "this is the worker itself")

    def end(self, peer: PeerId) -> None:
        """This side ends a connection; one that it made is made again at the next tick."""
        with self._changed:
            one = self._of(peer)
            if one is not None:
                one.ended = True
                one.breaker.succeeded()

    def lost(self, peer: PeerId, now: float) -> None:
        """A connection is lost."""
        with self._changed:
            one = self._of(peer)
            self._addresses.pop(peer, None)
            if one is not None:
                one.peer = None
                if not one.ended:
                    one.breaker.failed(now)
                self._changed.notify_all()

    def close(self) -> None:
        """End all waits: the transport is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _of(self, peer: PeerId) -> _Dialled | None:
        """Return the worker of a connection; None if it connected to this one or was dropped."""
        address = self._addresses.get(peer)
        one = None if address is None else self._known.get(address)
        return one if one is not None and one.peer == peer else None

    def _name(self, address: tuple[str, int], now: float) -> _Dialled:
        one = self._known.setdefault(address, _Dialled(now))
        if not one.configured:
            one.named = now
            named = [each for each, other in self._known.items() if not other.configured]
            if len(named) > MOST_NAMED:
                oldest = min(named, key=lambda each: self._known[each].named)
                self._drop(oldest, "other workers are named")
        self._dial(address, one, now)
        return one

    def _dial(self, address: tuple[str, int], one: _Dialled, now: float) -> None:
        if one.peer is None and one.breaker.enter(now):
            one.began, one.answered, one.ended = now, False, False
            host, port = address
            one.peer = self._transport.connect(host, port)
            self._addresses[one.peer] = address

    def _drop(self, address: tuple[str, int], why: str) -> None:
        one = self._known.pop(address)
        if one.peer is not None:
            self._transport.submit(Disconnect(one.peer, why))
            one.peer = None
            self._changed.notify_all()  # nobody need wait for its answer
