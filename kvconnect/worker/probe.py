"""How fast a new connection really is: a mebibyte of real bytes, on the path that pages take.

The reader asks for a probe when both sides have agreed. Its pages are not those of the KV cache:
they are read from and written to a scratch buffer, over and over.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Generator

from kvconnect.errors import ProtocolError
from kvconnect.transport.base import (
    Area,
    Event,
    Incoming,
    Memory,
    Outgoing,
    Piece,
    Received,
    Unit,
)
from kvconnect.wire.messages import PROBE_WANT, Probe
from kvconnect.worker.links import Link, Links

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 64 << 10
_IDS = array("q", range(16))
_UNIT = Unit(array("q", [0, 0, _BLOCK_BYTES]), 1, _BLOCK_BYTES)  # stride 0: always the same bytes


class ProbedMemory:
    """A memory that also has the probe's pages."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._scratch = ctypes.create_string_buffer(_BLOCK_BYTES)

    def areas(self) -> tuple[Area, ...]:
        return (*self._memory.areas(), self._own())

    def area_of(self, unit: Unit) -> Area:
        return self._own() if unit is _UNIT else self._memory.area_of(unit)

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[Piece, None, None]:
        return self._pages(ids) if unit is _UNIT else self._memory.outgoing(unit, ids)

    def incoming(self, unit: Unit, ids: array[int]) -> Generator[Piece, None, None]:
        return self._pages(ids) if unit is _UNIT else self._memory.incoming(unit, ids)

    def _own(self) -> Area:
        return Area(ctypes.addressof(self._scratch), _BLOCK_BYTES)

    def _pages(self, ids: array[int]) -> Generator[Piece, None, None]:
        yield Piece(ctypes.addressof(self._scratch), _BLOCK_BYTES, _UNIT, ids)


def start(links: Links, link: Link) -> None:
    """Reader: ask for a probe."""
    links.transport.submit(Incoming(link.peer, PROBE_WANT, [_UNIT], [(0, _IDS)]))
    links.tell(link.peer, Probe())


def answer(links: Links, link: Link) -> None:
    """Source: send what was asked for, once per connection.

    Raises:
        ProtocolError: asked again, or by a source.
    """
    if link.meter.probed_bytes or not link.inbound:
        raise ProtocolError("a probe out of turn")
    link.meter.probed_bytes = len(_IDS) * _BLOCK_BYTES
    links.transport.submit(Outgoing(link.peer, PROBE_WANT, 0, _UNIT, 0, _IDS))


def on_event(links: Links, link: Link, event: Event) -> None:
    """Reader: pages of the probe came; publish the rate once they are complete. Connections of
    a peer work side by side, so the slowest of them is what it took."""
    if not isinstance(event, Received):
        return
    meter = link.meter
    meter.probed_bytes += event.nbytes
    meter.probed_seconds = max(meter.probed_seconds, event.seconds)
    if meter.probed_bytes < len(_IDS) * _BLOCK_BYTES:
        return
    links.transport.cancel(link.peer, PROBE_WANT)
    rate = meter.probed_bytes / max(meter.probed_seconds, 1e-9)
    if links.is_first:
        links.stats.gauge("handoff_transport_bytes_per_second", rate, label="tcp")
    logger.info("%s: tcp, %.2f GB/s measured at connect", link.name, rate / 1e9)
