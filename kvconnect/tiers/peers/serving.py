"""Answers other engines that ask for blocks of this worker's host tier."""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from kvconnect.errors import KVConnectError, ProtocolError
from kvconnect.offload.host_arena import HostArena
from kvconnect.protocol.addresses import source_of
from kvconnect.protocol.cache_messages import (
    WHOLE,
    Ask,
    CacheMessage,
    Fetch,
    FetchOutcome,
    Found,
    Sent,
    encode,
)
from kvconnect.protocol.reads import Cancel
from kvconnect.tiers.backends.base import StoreMeter
from kvconnect.tiers.peers.same_machine import OwnMemory
from kvconnect.tiers.peers.served import ServedBlock, ServedBlocks
from kvconnect.transport.base import (
    Disconnect,
    Drained,
    OutgoingPages,
    PagesSent,
    PeerId,
    PeerMessage,
    Transport,
    Unit,
)
from kvconnect.types import TransferType

logger = logging.getLogger(__name__)

MOST_BYTES = 512 << 20
"""Bytes that are being sent at a time, half of them to one address. A fetch beyond them is answered
with BUSY."""

FETCH_S = 10.0
MIN_BYTES_PER_S = 16_000_000
"""A fetch may take ``FETCH_S`` seconds plus the time of its bytes at this rate: a reader that is
slower keeps bytes from others. It would have given up before."""

_BURST_S = 1.0  # of a limited rate


class GroupUnits(NamedTuple):
    """The units of one page of a group's blocks, each with its place in a slot: ``parts`` by
    number, and all of the page. Most blocks are one page."""

    parts: Mapping[int, Unit]
    whole: Unit

    def get(self, number: int) -> Unit | None:
        """Return a unit by its number on the wire."""
        return self.whole if number == WHOLE else self.parts.get(number)


@dataclass(eq=False)
class _Sending:
    """A fetch whose pages are being sent."""

    blocks: Sequence[ServedBlock | None]
    nbytes: int
    orders: int  # that are not handed to the network yet
    ends_by: float = math.inf  # set by the next tick


class SendLimit:
    """Limits the bytes that are being sent, in all and to one address, and those sent per second
    (``rate``, 0: no limit)."""

    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._paid_until = 0.0  # when all bytes so far are within the rate
        self.nbytes = 0
        self._to: Counter[str] = Counter()  # bytes by address

    def admit(self, nbytes: int, address: str) -> bool:
        """Return whether as many more bytes may be sent now, and count them if so. A fetch that is
        larger than a limit is admitted alone."""
        if self.nbytes and self.nbytes + nbytes > MOST_BYTES:
            return False
        if self._to[address] and self._to[address] + nbytes > MOST_BYTES // 2:
            return False
        if self._rate:
            now = self._clock()
            if self._paid_until > now + _BURST_S:
                return False
            self._paid_until = max(self._paid_until, now) + nbytes / self._rate
        self.nbytes += nbytes
        self._to[address] += nbytes
        return True

    def ended(self, nbytes: int, address: str) -> None:
        """Bytes are not being sent any more."""
        self.nbytes -= nbytes
        self._to[address] -= nbytes
        if not self._to[address]:
            del self._to[address]


class Serving:
    """The source's side of all connections. For one thread.

    ``groups``: per group, the units of each page of this worker's blocks. ``meter`` gets the bytes
    sent and the blocks refused.
    """

    def __init__(
        self,
        transport: Transport,
        served: ServedBlocks,
        host: HostArena,
        groups: Sequence[Sequence[GroupUnits]],
        limit: SendLimit,
        meter: StoreMeter,
    ) -> None:
        self.served = served
        self._transport = transport
        self._host = host
        self._groups = groups
        self._limit = limit
        self._meter = meter
        self._memory = OwnMemory(host, served)
        self._sending: dict[tuple[PeerId, int], _Sending] = {}
        self._addresses: dict[PeerId, str] = {}  # of readers, see source_of

    def on_up(self, peer: PeerId, host: str) -> None:
        """A reader has connected from this IP address."""
        self._addresses[peer] = source_of(host)

    def tick(self, now: float) -> None:
        """End the readers that read too slowly; call this a few times per second."""
        for (peer, fetch), sending in self._sending.items():
            limit_s = FETCH_S + sending.nbytes / MIN_BYTES_PER_S
            sending.ends_by = min(sending.ends_by, now + limit_s)
            if now >= sending.ends_by:
                why = f"fetch {fetch} of {sending.nbytes} bytes took longer than {limit_s:.0f} s"
                self._transport.submit(Disconnect(peer, why))

    def tell_memory(self, peer: PeerId, nonce: bytes) -> None:
        """Tell a reader on this machine how to read the host tier itself."""
        self._say(peer, self._memory.tell(peer, nonce))

    def on_message(self, peer: PeerId, message: CacheMessage) -> None:
        """Answer a message; raises :class:`ProtocolError` for one that a reader does not send."""
        if isinstance(message, Ask):
            blocks = [self.served.find(key) for key in message.keys]
            found = bytes(block is not None for block in blocks)
            self._say(peer, Found(message.ask, found, self._memory.places(peer, blocks)))
        elif isinstance(message, Fetch):
            self._fetch(peer, message)
        elif isinstance(message, Cancel):
            if (peer, message.read_id) in self._sending:
                self._transport.cancel(peer, message.read_id)
        else:
            raise ProtocolError(f"{type(message).__name__} from a reader")

    def on_sent(self, event: PagesSent) -> None:
        """Pages of a fetch were handed to the network."""
        sending = self._sending.get((event.peer, event.read_id))
        if sending is None:
            return
        self._meter.moved(TransferType.CPU_TO_PEER, event.nbytes, event.seconds)
        sending.orders -= 1
        if not sending.orders:
            self._end(event.peer, event.read_id)
            self._say(event.peer, Sent(event.read_id, bytes(map(self._outcome, sending.blocks))))

    def on_drained(self, event: Drained) -> None:
        """A fetch that its reader stopped has ended."""
        self._end(event.peer, event.read_id)

    def on_down(self, peer: PeerId) -> None:
        """A reader is gone."""
        self._memory.forget(peer)
        for number, fetch in [each for each in self._sending if each[0] == peer]:
            self._end(number, fetch)
        self._addresses.pop(peer, None)

    def close(self) -> None:
        """The host tier will be freed."""
        self._memory.close()

    def _fetch(self, peer: PeerId, fetch: Fetch) -> None:
        if (peer, fetch.read_id) in self._sending:
            raise ProtocolError(f"fetch {fetch.read_id} is asked for twice")
        if fetch.group >= len(self._groups):
            raise ProtocolError(f"there is no group {fetch.group} here")
        group = self._groups[fetch.group]
        units = [
            [unit for number in fetch.units if (unit := page.get(number)) is not None]
            for page in group
        ]
        if len(units[0]) < len(fetch.units):
            raise ProtocolError(f"some of the units {fetch.units} are not kept here")
        size = sum(unit.block_bytes for unit in units[0])
        blocks = self._intact([self.served.find(key) for key in fetch.keys], group)
        count = sum(block is not None for block in blocks)
        nbytes = count * size
        if not count or not self._limit.admit(nbytes, self._addresses[peer]):
            outcome = FetchOutcome.BUSY if count else FetchOutcome.ABSENT
            self._meter.refused(count)
            self._say(peer, Sent(fetch.read_id, bytes([outcome]) * len(blocks)))
            return
        runs = list(_runs(blocks))
        sending = _Sending(blocks, nbytes, len(runs) * len(fetch.units))
        self._sending[peer, fetch.read_id] = sending
        for first, page, slots in runs:
            for place, unit in enumerate(units[page]):
                order = OutgoingPages(peer, fetch.read_id, place, unit, first, slots)
                self._transport.submit(order)

    def _intact(
        self, blocks: Sequence[ServedBlock | None], group: Sequence[GroupUnits]
    ) -> list[ServedBlock | None]:
        """Return blocks, None for those in slots whose bytes do not match their digest."""
        nbytes = sum(page.whole.block_bytes for page in group)
        slots = {block.slot: block for block in blocks if block is not None}
        bad = {slot for slot, block in slots.items() if not self._is_intact(block, nbytes)}
        return [None if block is None or block.slot in bad else block for block in blocks]

    def _is_intact(self, block: ServedBlock, nbytes: int) -> bool:
        try:
            self._host.verify(block.slot, nbytes)
        except KVConnectError as error:  # corrupt, or without the digest that it must have
            if self.served.is_current(block):  # else it is being overwritten
                logger.error("%s; the block is not served", error)
                self.served.withdraw([block.slot])
            return False
        return True

    def _outcome(self, block: ServedBlock | None) -> FetchOutcome:
        if block is None:
            return FetchOutcome.ABSENT
        current = self.served.is_current(block)
        return FetchOutcome.SENT if current else FetchOutcome.OVERWRITTEN

    def _end(self, peer: PeerId, fetch: int) -> None:
        sending = self._sending.pop((peer, fetch), None)
        if sending is not None:
            self._limit.ended(sending.nbytes, self._addresses[peer])

    def _say(self, peer: PeerId, message: CacheMessage) -> None:
        self._transport.submit(PeerMessage(peer, encode(message)))


def _runs(blocks: Sequence[ServedBlock | None]) -> Iterator[tuple[int, int, array[int]]]:
    """Yield (first wire block, page, slots) of each run of blocks that are there and are the same
    page of their slots."""
    numbered = enumerate(blocks)
    for page, run in groupby(numbered, key=lambda item: item[1] and item[1].page):
        if page is not None:
            pairs = list(run)
            slots = array("q", [block.slot for _, block in pairs if block is not None])
            yield pairs[0][0], page, slots
