"""A prefill worker's side of hand-offs: who is sent which pages, and when.

Every wanted wire block of every layer goes to each reader exactly once, as early as it can be
read: layer by layer while a step computes, the rest when the step is written. A reader that asks
late gets what is ready at once. Blocks are given back when nothing reads them any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvconnect.disaggregation.reads import (
    AcceptedRead,
    Action,
    AllReady,
    Break,
    CancelRead,
    GroupView,
    Known,
    Refuse,
    SendPages,
    Served,
    ServedRead,
    Step,
    StillThere,
    Tell,
    check,
    guarded,
)
from kvconnect.disaggregation.states import TRANSFER, Event, TransferState
from kvconnect.errors import Misuse
from kvconnect.offload.messages import NoticeKind, OfferBlocks, TransferEvent, Withdraw
from kvconnect.types import FailureCause, TransferId

__all__ = [
    "MAX_PARKED",
    "MAX_WANTS",
    "AcceptedRead",
    "Action",
    "AllReady",
    "Break",
    "CancelRead",
    "GroupView",
    "Refuse",
    "SendPages",
    "Sender",
    "Served",
    "StillThere",
    "Tell",
]

MAX_PARKED = 2048
"""Wants that may wait for transfers this side does not know yet; more are refused. No peer may have
more of them than there is room left, so that one alone cannot keep the others out. As many
declines may wait; more are ignored."""

MAX_WANTS = 4096
"""Wants of one peer that are not over; more are refused."""


class _Book:
    """Transfers and their readers, who are also known by peer and want. Readers that are over are
    forgotten, but for those who have everything: no reader is served a transfer twice."""

    def __init__(self) -> None:
        self.known: dict[TransferId, Known] = {}
        self.readers: dict[int, dict[int, ServedRead]] = {}

    def get(self, peer: int, want: int) -> ServedRead | None:
        """Return who asked for it, if that is not over."""
        return self.readers.get(peer, {}).get(want)

    def join(self, ask: AcceptedRead, step: Step) -> list[Action]:
        """Begin to serve a reader with what is there."""
        known = self.known[ask.transfer]
        if known.cause is not None:
            return [Refuse(ask.peer, ask.want, known.cause, "the blocks are not kept any more")]
        if known.serves(ask.reader):
            detail = "this reader was served already"
            return [Refuse(ask.peer, ask.want, FailureCause.REFUSED, detail)]
        if len(self.readers.get(ask.peer, ())) >= MAX_WANTS:
            detail = f"{MAX_WANTS} wants of this peer are not over"
            return [Refuse(ask.peer, ask.want, FailureCause.REFUSED, detail)]
        reader = ServedRead(ask)
        self.readers.setdefault(ask.peer, {})[ask.want] = reader
        known.readers[ask.peer, ask.want] = reader
        actions: list[Action] = [reader.start()]
        for span, fence in known.ready.values():
            actions += reader.send_all(span, fence)
        return actions + step.catch_up(known, reader)

    def settle(self, reader: ServedRead) -> list[Action]:
        """Forget a reader that is over, and its transfer where that is due."""
        if reader.state is TransferState.OVER:
            known = self.known.get(reader.ask.transfer)
            if known is not None:
                known.readers.pop((reader.ask.peer, reader.ask.want), None)
            self._forget(reader)
        return self.settle_transfer(reader.ask.transfer)

    def settle_transfer(self, transfer: TransferId) -> list[Action]:
        """Forget a withdrawn transfer once nothing of it is in flight."""
        known = self.known.get(transfer)
        if known is None or known.cause is None:
            return []
        if any(reader.in_flight for reader in known.readers.values()):
            return []
        del self.known[transfer]
        for reader in known.readers.values():
            self._forget(reader)
        return [Tell(TransferEvent(transfer, NoticeKind.WITHDRAWN))]

    def _forget(self, reader: ServedRead) -> None:
        peer, want = reader.ask.peer, reader.ask.want
        of_peer = self.readers.get(peer, {})
        of_peer.pop(want, None)
        if not of_peer:
            self.readers.pop(peer, None)

    def beat(self, stands: bool) -> list[Action]:
        """Tell readers that their pages are to come, and the scheduler that pages move. While the
        engine ``stands`` still, it computes none: who waits for one gives up in time."""
        wants: dict[int, list[int]] = {}
        actions: list[Action] = []
        for transfer, known in self.known.items():
            moving = known.moving()
            for reader in moving:
                if reader.in_flight or (reader.left and not stands):
                    wants.setdefault(reader.ask.peer, []).append(reader.ask.want)
            # What is in flight moves, or the transport ends it: the lease must not run out.
            if any(reader.moved or reader.in_flight for reader in moving):
                actions.append(Tell(TransferEvent(transfer, NoticeKind.RENEWED)))
            for reader in moving:
                reader.moved = False
        return actions + [StillThere(peer, tuple(numbers)) for peer, numbers in wants.items()]


class Sender:
    """Readers of one prefill worker. One thread; ``now`` is in seconds of one monotonic clock.

    Events about wants that are over are ignored: messages cross. Per step the order is: offers,
    then withdrawals, then ``layer_written``, then ``step_written``.
    """

    def __init__(self, layers: Sequence[int], deadline_s: float, heartbeat_s: float) -> None:
        """``layers``: per group, how many layers this worker has. A want for an unknown transfer
        is refused after ``deadline_s``, a decline of one forgotten; readers hear from us every
        ``heartbeat_s``."""
        self.stands = False  # the engine makes no steps
        self._layers = tuple(layers)
        self._deadline_s = deadline_s
        self._heartbeat_s = heartbeat_s
        self._book = _Book()
        self._step = Step()
        self._parked: dict[
            tuple[int, int], tuple[AcceptedRead, float]
        ] = {}  # (peer, want), deadline
        self._declined: dict[TransferId, float] = {}  # not known yet; deadline
        self._last_want: dict[int, int] = {}  # by peer
        self._beat_at = 0.0

    def __repr__(self) -> str:
        book = self._book
        wants = sum(map(len, book.readers.values()))
        return f"<Sender {len(book.known)} transfers, {wants} wants>"

    def offer(self, offer: OfferBlocks) -> list[Action]:
        """These blocks are written in the current step; an empty offer announces a transfer.

        Raises:
            Misuse: the step has begun to write.
        """
        if self._step.written:
            raise Misuse("an offer after the step's first layer")
        actions: list[Action] = []
        known = self._book.known.get(offer.transfer)
        if known is None:
            known = self._book.known[offer.transfer] = Known()
            if self._declined.pop(offer.transfer, None) is not None:
                actions += self.decline(offer.transfer)
            parked = [key for key, (ask, _) in self._parked.items() if ask[2] == offer.transfer]
            for key in parked:
                ask, _ = self._parked.pop(key)
                actions += guarded(ask.peer, partial(self._book.join, ask, self._step))
        self._step.pending += [(known, span) for span in offer.spans]
        return actions

    def layer_written(self, group: int, layer: int, fence: Any) -> list[Action]:
        """One layer of all blocks offered in this step can be read once ``fence`` has passed.

        A draft model runs its layers several times in a step; the first run writes the prompt's
        blocks, so only the first call counts.

        Raises:
            Misuse: there is no such layer.
        """
        if not 0 <= layer < self._layers[group]:
            raise Misuse(f"group {group}: there is no layer {layer}")
        if (group, layer) in self._step.written:
            return []
        return self._step.write_layer(group, layer, fence)

    def step_written(self, fence: Any) -> list[Action]:
        """All blocks offered in this step can be read once ``fence`` has passed."""
        actions = self._step.write_rest(self._layers, fence)
        self._step = Step()
        return actions

    def want(self, ask: AcceptedRead, now: float) -> list[Action]:
        """A reader asks.

        Raises:
            ProtocolError: the want's number is not above the peer's earlier ones, or its parts
                are not ones that this peer may ask for. The caller closes the peer.
        """
        check(ask, self._last_want.get(ask.peer, -1))
        self._last_want[ask.peer] = ask.want
        if ask.transfer in self._book.known:
            return self._book.join(ask, self._step)
        if not ask.early:
            return [Refuse(ask.peer, ask.want, FailureCause.GONE, "the blocks are not kept here")]
        own = sum(peer == ask.peer for peer, _ in self._parked)
        if own >= MAX_PARKED - len(self._parked):
            detail = f"{len(self._parked)} requests wait for their prefill already"
            return [Refuse(ask.peer, ask.want, FailureCause.REFUSED, detail)]
        self._parked[ask.peer, ask.want] = ask, now + self._deadline_s
        self._declined.pop(ask.transfer, None)  # this request came after the one that is over
        return []

    def cancel(self, peer: int, want: int) -> list[Action]:
        """A reader gave up."""
        self._parked.pop((peer, want), None)
        reader = self._book.get(peer, want)
        if reader is None or reader.state is not TransferState.MOVING:
            return []
        actions = [*reader.stop(), reader.tell(NoticeKind.LEFT)]
        return actions + self._book.settle(reader)

    def done(self, peer: int, want: int) -> list[Action]:
        """A reader has everything, from every worker."""
        reader = self._book.get(peer, want)
        if reader is None or reader.state is not TransferState.MOVING:
            return []
        reader.state = TRANSFER.after(reader.state, Event.COMPLETED)
        return reader.served()

    def sent(self, peer: int, want: int) -> list[Action]:
        """One ``SendPages`` has left this machine's memory."""
        reader = self._book.get(peer, want)
        if reader is None or not reader.in_flight:
            return []
        reader.sent(reader.in_flight - 1)
        return reader.served() + self._book.settle(reader)

    def quiet(self, peer: int, want: int) -> list[Action]:
        """The transport answered a ``CancelRead``."""
        reader = self._book.get(peer, want)
        if reader is None:
            return []
        reader.sent(0)
        return self._book.settle(reader)

    def peer_lost(self, peer: int) -> list[Action]:
        """The connection is gone; nothing of the peer is in flight any more."""
        self._last_want.pop(peer, None)
        self._parked = {key: parked for key, parked in self._parked.items() if key[0] != peer}
        actions: list[Action] = []
        for reader in list(self._book.readers.get(peer, {}).values()):
            if reader.state is TransferState.MOVING:
                actions.append(reader.tell(NoticeKind.LEFT))
            elif reader.in_flight:
                reader.in_flight = 0
                actions += reader.served()
            reader.state, reader.in_flight = TRANSFER.after(reader.state, Event.PEER_LOST), 0
            actions += self._book.settle(reader)
        return actions

    def withdraw(self, order: Withdraw) -> list[Action]:
        """Stop a transfer; WITHDRAWN is told, once, when nothing reads its blocks."""
        known = self._book.known.setdefault(order.transfer, Known())
        self._step.pending = [item for item in self._step.pending if item[0] is not known]
        return known.withdraw(order.cause) + self._book.settle_transfer(order.transfer)

    def renew(self, transfer: TransferId) -> list[Action]:
        """A decode engine says that it still wants a transfer."""
        known = transfer in self._book.known
        return [Tell(TransferEvent(transfer, NoticeKind.RENEWED))] if known else []

    def decline(self, transfer: TransferId) -> list[Action]:
        """A decode engine says that it does not want a transfer, perhaps before its prefill."""
        if transfer in self._book.known:
            return [Tell(TransferEvent(transfer, NoticeKind.DECLINED))]
        if len(self._declined) < MAX_PARKED:
            self._declined[transfer] = math.inf  # the next tick sets the deadline
        return []

    def tick(self, now: float) -> list[Action]:
        """Time has passed; call it about every heartbeat."""
        late = [key for key, (_, deadline) in self._parked.items() if deadline <= now]
        detail = "its prefill did not begin in time"
        actions: list[Action] = [Refuse(*key, FailureCause.GONE, detail) for key in late]
        for key in late:
            del self._parked[key]
        latest = now + self._deadline_s
        declined = self._declined.items()
        self._declined = {key: min(end, latest) for key, end in declined if end > now}
        if now < self._beat_at:
            return actions
        self._beat_at = now + self._heartbeat_s
        return actions + self._book.beat(self.stands)
