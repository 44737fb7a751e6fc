"""Streams that pass from an engine to a client without Python, in native code's thread
(``native/relay.c``). Event loop only.

The stream comes back when anything but a whole chunk arrives, when the client takes no more, and
when its owner wants it. One that is journaled comes back at the first event of another form, too,
with notes of those before. Python then goes on where the relay ended, so that ends, errors,
receipts and slow clients are handled in one place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvconnect import open_files
from kvconnect.router.requests.event_form import EventForm

if TYPE_CHECKING:
    from kvconnect._native import Relay

logger = logging.getLogger(__name__)

NO_MEMORY = "memory"  # reason of a return with which bytes were lost
_TAKEN_AWAY = "removed"  # reason of one that was asked for
_FILES_SHARE = 4  # every fourth descriptor is left to others than the relay


class Returned(NamedTuple):
    """A stream that came back; see ``_native.pyi``."""

    key: int
    reason: str
    nbytes: int
    chunks: int
    heard: float
    tail: bytes
    unsent: bytes
    rest: bytes
    notes: bytes

    @property
    def goes_again(self) -> bool:
        """Whether the stream may be left to the relay again; else it would come back at once."""
        return self.chunks > 0 or self.reason == _TAKEN_AWAY

    def tail_after(self, tail: bytes) -> bytes:
        """Return the last two bytes of the stream, which were ``tail`` before."""
        return (tail + self.tail[2 - min(2, self.nbytes) :])[-2:]


class Passage(Protocol):
    """What passes a stream on to a client."""

    def forward(self, chunk: bytes) -> bool:
        """Send a chunk if that needs no wait; return whether it was sent."""

    def relay(
        self, engine: asyncio.Transport, back: Callable[[Returned], None]
    ) -> RelayedStream | None:
        """Leave the stream to the relay if all that was received has been sent. ``back`` is called
        when it comes back, before the loop does anything else with it."""


class RelayedStream:
    """A stream in the relay."""

    def __init__(self, native: Relay, key: int, back: Callable[[int], None]) -> None:
        self._native, self._key, self._back = native, key, back

    @property
    def heard(self) -> float:
        """When the engine last sent something, by ``time.monotonic()``."""
        return self._native.heard(self._key)

    def stop(self) -> None:
        """Have the stream back now, if it is still away."""
        self._back(self._key)


class StreamRelay:
    """The relay of one router; :func:`make_relay` makes one."""

    def __init__(self, native: Relay, count: Callable[[str], None]) -> None:
        """``count``: is told of the reason for which a stream came back."""
        self._native, self._count = native, count
        self._away: dict[int, Callable[[Returned], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(
        self,
        engine: asyncio.Transport,
        client: asyncio.Transport,
        back: Callable[[Returned], None],
        *,
        events_only: bool,
        form: EventForm | None,
    ) -> RelayedStream | None:
        """Relay a stream of chunks, at a boundary of chunks; None where that cannot be done.

        ``events_only``: chunks that do not end with an event that is an object come back.
        ``form``: of the events of a stream that is journaled.
        """
        if engine.get_extra_info("sslcontext") or client.get_extra_info("sslcontext"):
            return None
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._native.fileno(), self._take)
        source, target = (each.get_extra_info("socket").fileno() for each in (engine, client))
        engine.pause_reading()  # first: the two must not read at once
        try:
            key = self._native.add(source, target, events_only, form)
        except OSError:  # no more descriptors
            engine.resume_reading()
            return None
        self._away[key] = back
        return RelayedStream(self._native, key, self._stop)

    def files(self) -> int:
        """Return how many files the copies of sockets take."""
        return 2 * len(self._away)

    def close(self) -> None:
        """End the thread. Streams that are away stay unfinished."""
        if self._loop is not None:
            self._loop.remove_reader(self._native.fileno())
        self._native.close()

    def _take(self) -> None:
        while (record := self._native.take()) is not None:
            self._give(Returned._make(record))

    def _stop(self, key: int) -> None:
        if key in self._away and (record := self._native.remove(key)) is not None:
            self._give(Returned._make(record))

    def _give(self, returned: Returned) -> None:
        self._count(returned.reason)
        self._away.pop(returned.key)(returned)


def make_relay(count: Callable[[str], None]) -> StreamRelay | None:
    """Return a relay; None where the extension is not built, or the system gives no thread."""
    files = open_files.limit()
    try:
        from kvconnect import _native

        native = _native.Relay(files - files // _FILES_SHARE)
    except ImportError:
        return None
    except OSError as error:
        logger.warning("all streams pass through Python, since the relay cannot start: %s", error)
        return None
    return StreamRelay(native, count)
