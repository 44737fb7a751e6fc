"""What a starting batch offers before its page numbers have come from the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvconnect.disaggregation.messages import OfferBlocks
from kvconnect.engines.sglang.device_numbers import DeviceNumbers
from kvconnect.engines.sglang.rooms import SendRoom, transfer_of
from kvconnect.transport.base import Fence
from kvconnect.types import Span


@dataclass(frozen=True)
class AheadOffer:
    """What a starting batch offers of one room: blocks from ``first`` on, and perhaps a state.
    ``pages``: the slots of the first token of each block."""

    number: int
    room: SendRoom
    first: int
    pages: DeviceNumbers | None
    state: DeviceNumbers | None

    @property
    def numbers(self) -> Iterator[DeviceNumbers]:
        """Those that must have arrived first."""
        yield from (each for each in (self.pages, self.state) if each is not None)

    def resolve(self, page_tokens: int, state_group: int) -> OfferBlocks:
        """Return the offer, and record it in the room. The numbers must have arrived."""
        spans = []
        if self.pages is not None:
            ids = array("q", [slot // page_tokens for slot in self.pages.read()])
            self.room.record_ahead(self.first, ids)
            spans.append(Span(0, self.first, ids))
        if self.state is not None:
            state = Span(state_group, 0, array("q", self.state.read()))
            self.room.record_state_ahead(state)
            spans.append(state)
        return OfferBlocks(transfer_of(self.number), tuple(spans))


@dataclass(frozen=True)
class UnresolvedBatch:
    """A batch whose numbers are on their way, and what of it was launched: layers, or with None
    the whole forward, each with where that was."""

    offers: Sequence[AheadOffer]
    page_tokens: int
    launched: list[tuple[str | None, Fence | None]] = field(default_factory=list)

    @property
    def numbers(self) -> Iterator[DeviceNumbers]:
        """Those of all its offers."""
        for offer in self.offers:
            yield from offer.numbers
