"""Bandwidth probe: measures each path of a new session with some MiB, and picks the fastest.

The reader requests probes one after the other once both sides have agreed. Probe pages are not
pages of the KV cache: they are read from and written to one scratch block.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Generator

import torch

from kvconnect.disaggregation.sessions import HandoffSession, HandoffSessions
from kvconnect.disaggregation.staging import BUFFERS, make_memory
from kvconnect.errors import ProtocolError, Refused
from kvconnect.protocol.messages import Probe
from kvconnect.protocol.reads import LAST_READ_ID, PROBE_READ_ID
from kvconnect.transport.base import (
    Event,
    IncomingPages,
    Memory,
    MemoryRegion,
    OutgoingPages,
    PageChunk,
    PagesReceived,
    PageUser,
    Unit,
)

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 64 << 10
_ROUNDS = (array("q", range(16)), array("q", range(128)))
"""Blocks of each probe on one path. Only the last counts, since the first also sets up."""
_RING_BYTES = 2 * BUFFERS << 20  # staging buffers of 1 MiB, for a cache on a device

_UNIT = Unit(array("q", [0, 0, _BLOCK_BYTES]), 1, _BLOCK_BYTES)  # stride 0: always the same bytes


class ProbedMemory:
    """A memory extended by the probe's scratch block, on the same device."""

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self._memory = memory
        scratch = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device=device)
        self._scratch = make_memory(scratch, ring_bytes=_RING_BYTES)

    def regions(self) -> tuple[MemoryRegion, ...]:
        return (*self._memory.regions(), *self._scratch.regions())

    def region_of(self, unit: Unit) -> MemoryRegion:
        return self._of(unit).region_of(unit)

    def outgoing(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        return self._of(unit).outgoing(unit, ids, user)

    def incoming(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        return self._of(unit).incoming(unit, ids, user)

    def _of(self, unit: Unit) -> Memory:
        return self._scratch if unit is _UNIT else self._memory


def request_next(sessions: HandoffSessions, session: HandoffSession) -> None:
    """Reader: request the next probe."""
    read_id = PROBE_READ_ID + session.meter.probes
    order = IncomingPages(
        session.peer, read_id, [_UNIT], [(0, _ids(session))], None, _path(session)
    )
    sessions.transport.submit(order)
    sessions.send(session.peer, Probe(read_id=read_id))


def answer(sessions: HandoffSessions, session: HandoffSession, read_id: int) -> None:
    """Source: send a requested probe; each is sent once.

    Raises:
        ProtocolError: the probe is out of turn, or this worker is the reader.
    """
    if (
        read_id != PROBE_READ_ID + session.meter.probes
        or read_id > LAST_READ_ID
        or not session.inbound
    ):
        raise ProtocolError(f"probe {read_id - PROBE_READ_ID} is out of turn")
    sessions.transport.submit(OutgoingPages(session.peer, read_id, 0, _UNIT, 0, _ids(session)))
    session.meter.probes += 1


def on_event(sessions: HandoffSessions, session: HandoffSession, event: Event) -> bool:
    """Reader: take a probe's pages; request the next probe once they are complete. Return whether
    that was the last one, and the path is chosen. Data connections work in parallel, so the
    slowest one counts.

    Raises:
        Refused: field ``rate``; even the fastest path is slower than ``min_rate``.
    """
    meter = session.meter
    if not isinstance(event, PagesReceived) or event.read_id != PROBE_READ_ID + meter.probes:
        return False
    meter.probed_bytes += event.nbytes
    meter.probed_seconds = max(meter.probed_seconds, event.seconds)
    if meter.probed_bytes < len(_ids(session)) * _BLOCK_BYTES:
        return False
    sessions.transport.cancel(session.peer, event.read_id)
    meter.rates[_path(session)] = meter.probed_bytes / max(meter.probed_seconds, 1e-9)
    meter.probes += 1
    meter.probed_bytes, meter.probed_seconds = 0, 0.0
    if meter.probes < len(_ROUNDS) * len(session.meter.paths):
        request_next(sessions, session)
        return False
    _choose_path(sessions, session)
    return True


def _path(session: HandoffSession) -> str:
    """Return the path of the next probe."""
    return session.meter.paths[session.meter.probes // len(_ROUNDS)]


def _ids(session: HandoffSession) -> array[int]:
    """Return the wire blocks of the next probe; both sides count probes alike."""
    return _ROUNDS[session.meter.probes % len(_ROUNDS)]


def _choose_path(sessions: HandoffSessions, session: HandoffSession) -> None:
    meter = session.meter
    sessions.measured(session)
    fastest = max(meter.paths, key=lambda path: meter.rates[path])
    if sessions.speaks_for_engine:
        for path, rate in meter.rates.items():
            sessions.stats.gauge("handoff_transport_bytes_per_second", rate, label=path)
    measured = ", ".join(f"{path} {rate / 1e9:.2f} GB/s" for path, rate in meter.rates.items())
    logger.info("%s: pages go over %s; measured at connect: %s", session.name, fastest, measured)
    if meter.rates[fastest] < sessions.preference.min_rate:
        floor = sessions.preference.min_rate / 1e9
        raise Refused("rate", f"{measured} to {session.name}, min_rate is {floor:.2f} GB/s")
    meter.path = fastest
    sessions.publish_counts()
