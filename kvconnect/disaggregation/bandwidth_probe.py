"""How fast a new connection really is: mebibytes of real bytes, on each path that pages can take.

The reader asks for probes when both sides have agreed, one after the other, and then picks the
faster path. Their pages are not those of the KV cache: they are read from and written to a scratch
buffer, over and over.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Generator

import torch

from kvconnect.disaggregation.sessions import Session, Sessions
from kvconnect.disaggregation.staging import make_memory
from kvconnect.errors import ProtocolError, Refused
from kvconnect.protocol.messages import LAST_READ_ID, PROBE_READ_ID, Probe
from kvconnect.transport.base import (
    Event,
    IncomingPages,
    Memory,
    MemoryRegion,
    OutgoingPages,
    PageChunk,
    PagesReceived,
    Unit,
)

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 64 << 10
_ROUNDS = (array("q", range(16)), array("q", range(128)))
"""Per path; the last one counts: the first also sets things up."""
_RING_BYTES = 8 << 20  # for staging, where pages are on a device

_UNIT = Unit(array("q", [0, 0, _BLOCK_BYTES]), 1, _BLOCK_BYTES)  # stride 0: always the same bytes


class ProbedMemory:
    """A memory that also has the probe's pages, on the same device."""

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self._memory = memory
        scratch = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device=device)
        self._scratch = make_memory(scratch, ring_bytes=_RING_BYTES)

    def regions(self) -> tuple[MemoryRegion, ...]:
        return (*self._memory.regions(), *self._scratch.regions())

    def region_of(self, unit: Unit) -> MemoryRegion:
        return self._of(unit).region_of(unit)

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        return self._of(unit).outgoing(unit, ids)

    def incoming(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        return self._of(unit).incoming(unit, ids)

    def _of(self, unit: Unit) -> Memory:
        return self._scratch if unit is _UNIT else self._memory


def start(links: Sessions, link: Session) -> None:
    """Reader: ask for the next probe."""
    want = PROBE_READ_ID + link.meter.probes
    order = IncomingPages(link.peer, want, [_UNIT], [(0, _ids(link))], None, _path(link))
    links.transport.submit(order)
    links.tell(link.peer, Probe(want=want))


def answer(links: Sessions, link: Session, want: int) -> None:
    """Source: send what was asked for, once for each want.

    Raises:
        ProtocolError: asked again, or by a source.
    """
    if want != PROBE_READ_ID + link.meter.probes or want > LAST_READ_ID or not link.inbound:
        raise ProtocolError("a probe out of turn")
    links.transport.submit(OutgoingPages(link.peer, want, 0, _UNIT, 0, _ids(link)))
    link.meter.probes += 1


def on_event(links: Sessions, link: Session, event: Event) -> bool:
    """Reader: pages of a probe came; go on to the next one once they are complete. Say whether
    that was the last, and the path is chosen. Connections of a peer work side by side, so the
    slowest of them is what it took.

    Raises:
        Refused: field ``rate``, even the faster path is slower than it has to be.
    """
    meter = link.meter
    if not isinstance(event, PagesReceived) or event.want != PROBE_READ_ID + meter.probes:
        return False
    meter.probed_bytes += event.nbytes
    meter.probed_seconds = max(meter.probed_seconds, event.seconds)
    if meter.probed_bytes < len(_ids(link)) * _BLOCK_BYTES:
        return False
    links.transport.cancel(link.peer, event.want)
    meter.rates[_path(link)] = meter.probed_bytes / max(meter.probed_seconds, 1e-9)
    meter.probes += 1
    meter.probed_bytes, meter.probed_seconds = 0, 0.0
    if meter.probes < len(_ROUNDS) * len(link.meter.paths):
        start(links, link)
        return False
    _choose(links, link)
    return True


def _path(link: Session) -> str:
    """Return the path of the probe that is due."""
    return link.meter.paths[link.meter.probes // len(_ROUNDS)]


def _ids(link: Session) -> array[int]:
    """Return its wire blocks; both sides count probes alike."""
    return _ROUNDS[link.meter.probes % len(_ROUNDS)]


def _choose(links: Sessions, link: Session) -> None:
    meter = link.meter
    fastest = max(meter.paths, key=lambda path: meter.rates[path])
    if links.is_first:
        for path, rate in meter.rates.items():
            links.stats.gauge("handoff_transport_bytes_per_second", rate, label=path)
    measured = ", ".join(f"{path} {rate / 1e9:.2f} GB/s" for path, rate in meter.rates.items())
    logger.info("%s: pages go over %s; measured at connect: %s", link.name, fastest, measured)
    if meter.rates[fastest] < links.choice.min_rate:
        floor = links.choice.min_rate / 1e9
        raise Refused("rate", f"{measured} to {link.name}, min_rate is {floor:.2f} GB/s")
    meter.path = fastest
    links.count()
