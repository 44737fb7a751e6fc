"""State machine of a prefill worker: which pages are sent to which reader, and when.

Every requested wire block of every layer is sent to each reader exactly once, as early as
possible: layer by layer while a step computes, the rest when the step is written. A reader that
asks late gets the finished blocks at once. Blocks are returned when nothing reads them any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from kvconnect.bounded import remember
from kvconnect.disaggregation.messages import NoticeKind, OfferBlocks, TransferEvent, Withdraw
from kvconnect.disaggregation.prefill_actions import (
    Action,
    RefuseRead,
    ReportNotice,
    SendAlive,
)
from kvconnect.disaggregation.prefill_reads import (
    AcceptedRead,
    OfferedTransfer,
    ServedRead,
    StepWrites,
    check_read,
    isolated,
)
from kvconnect.disaggregation.states import TRANSFER, TransferState
from kvconnect.errors import Misuse
from kvconnect.life_cycles import Event
from kvconnect.types import FailureCause, Rank, TransferId

MAX_PARKED_READS = 2048
"""Limit on read requests that wait for an unknown transfer; more are refused. One peer may hold at
most as many as remain free, so that no peer can block the others. The same limit applies to
declines of unknown transfers; the oldest are forgotten."""

MAX_READS = 4096
"""Limit on unfinished read requests of one peer; more are refused."""


class _ParkedRead(NamedTuple):
    request: AcceptedRead
    deadline: float


class _KeptDecline(NamedTuple):
    peer: int
    reader: Rank
    deadline: float


class _TransferTable:
    """Offered transfers and their reads, also by peer and read id. Finished reads are forgotten,
    except complete ones: no reader is served a transfer twice."""

    def __init__(self) -> None:
        self.offered: dict[TransferId, OfferedTransfer] = {}
        self.readers: dict[int, dict[int, ServedRead]] = {}

    def get(self, peer: int, read_id: int) -> ServedRead | None:
        """Return the read, unless it is over."""
        return self.readers.get(peer, {}).get(read_id)

    def join(self, request: AcceptedRead, writes: StepWrites) -> list[Action]:
        """Begin to serve a reader with the blocks that are ready."""
        offered = self.offered[request.transfer]
        if offered.cause is not None:
            return [
                RefuseRead(request.peer, request.read_id, offered.cause, "the blocks were released")
            ]
        if offered.outdated:
            detail = "the blocks are of the prefill engine's former weights"
            return [RefuseRead(request.peer, request.read_id, FailureCause.GONE, detail)]
        if mismatch := offered.mismatch(request):
            return mismatch
        if offered.serves(request.reader):
            detail = "this transfer was already sent to this reader"
            return [RefuseRead(request.peer, request.read_id, FailureCause.REFUSED, detail)]
        if len(self.readers.get(request.peer, ())) >= MAX_READS:
            detail = f"this peer has {MAX_READS} unfinished read requests"
            return [RefuseRead(request.peer, request.read_id, FailureCause.REFUSED, detail)]
        reader = ServedRead(request, offered)
        self.readers.setdefault(request.peer, {})[request.read_id] = reader
        offered.readers[request.peer, request.read_id] = reader
        offered.answered.add(request.reader)
        actions: list[Action] = [reader.start()]
        for span, fence in offered.ready.values():
            actions += reader.send_all(span, fence)
        return actions + writes.catch_up(offered, reader)

    def settle(self, reader: ServedRead) -> list[Action]:
        """Forget a finished read, and its transfer if nothing uses that any more."""
        if reader.state is TransferState.OVER:
            offered = self.offered.get(reader.request.transfer)
            if offered is not None:
                offered.readers.pop((reader.request.peer, reader.request.read_id), None)
            self._forget(reader)
        return self.settle_transfer(reader.request.transfer)

    def settle_transfer(self, transfer: TransferId) -> list[Action]:
        """Forget a withdrawn transfer once nothing of it is in flight."""
        offered = self.offered.get(transfer)
        if offered is None or offered.cause is None:
            return []
        if any(reader.in_flight for reader in offered.readers.values()):
            return []
        del self.offered[transfer]
        for reader in offered.readers.values():
            self._forget(reader)
        return [ReportNotice(TransferEvent(transfer, NoticeKind.WITHDRAWN))]

    def _forget(self, reader: ServedRead) -> None:
        peer, read_id = reader.request.peer, reader.request.read_id
        of_peer = self.readers.get(peer, {})
        of_peer.pop(read_id, None)
        if not of_peer:
            self.readers.pop(peer, None)

    def heartbeat(self, engine_paused: bool) -> list[Action]:
        """Tell readers that their pages will come, and the scheduler that pages move. A paused
        engine computes no pages, so readers that wait for one are not told, and time out."""
        read_ids: dict[int, list[int]] = {}
        actions: list[Action] = []
        for transfer, offered in self.offered.items():
            moving = offered.moving()
            for reader in moving:
                if reader.in_flight or (reader.left and not engine_paused):
                    read_ids.setdefault(reader.request.peer, []).append(reader.request.read_id)
            # Pages in flight move, or the transport ends them: the lease must not expire.
            if any(reader.moved or reader.in_flight for reader in moving):
                actions.append(ReportNotice(TransferEvent(transfer, NoticeKind.RENEWED)))
            for reader in moving:
                reader.moved = False
        return actions + [SendAlive(peer, tuple(numbers)) for peer, numbers in read_ids.items()]


class PrefillPlanner:
    """Readers of one prefill worker. One thread; ``now`` is in seconds of one monotonic clock.

    Events about finished reads are ignored, since messages cross. Call order per step: offers,
    withdrawals, ``layer_written`` for each layer, ``step_written``.
    """

    def __init__(self, layers: Sequence[int], deadline_s: float, heartbeat_s: float) -> None:
        """``layers``: per group, how many layers this worker has. After ``deadline_s``, a read
        request for an unknown transfer is refused and a decline of one is forgotten. Readers get a
        heartbeat every ``heartbeat_s``."""
        self.engine_paused = False  # the engine runs no steps
        self._layers = tuple(layers)
        self._deadline_s = deadline_s
        self._heartbeat_s = heartbeat_s
        self._transfers = _TransferTable()
        self._writes = StepWrites()
        self._parked: dict[tuple[int, int], _ParkedRead] = {}  # by peer and read id
        self._declined: dict[TransferId, _KeptDecline] = {}  # of unknown transfers
        self._last_read_id: dict[int, int] = {}  # by peer
        self._heartbeat_at = 0.0

    def __repr__(self) -> str:
        transfers = self._transfers
        reads = sum(map(len, transfers.readers.values()))
        return f"<PrefillPlanner {len(transfers.offered)} transfers, {reads} reads>"

    def offer(self, offer: OfferBlocks) -> list[Action]:
        """These blocks are written in the current step; an empty offer announces a transfer. The
        first one names the prompt that readers must have.

        Raises:
            Misuse: the step has begun to write.
        """
        if self._writes.written:
            raise Misuse("an offer after the step's first layer")
        actions: list[Action] = []
        offered = self._transfers.offered.get(offer.transfer)
        if offered is None:
            offered = OfferedTransfer(offer.prompt, reusable=offer.reusable)
            self._transfers.offered[offer.transfer] = offered
            if (kept := self._declined.pop(offer.transfer, None)) is not None:
                actions += self.decline(offer.transfer, kept.peer, kept.reader)
            parked = [
                key for key, item in self._parked.items() if item.request.transfer == offer.transfer
            ]
            for key in parked:
                request = self._parked.pop(key).request
                actions += isolated(
                    request.peer, partial(self._transfers.join, request, self._writes)
                )
        offered.cached = max(offered.cached, offer.cached)
        self._writes.pending += [(offered, span) for span in offer.spans]
        return actions

    def outdate(self) -> None:
        """The engine has other weights from now on: whoever asks for a transfer that is offered
        already is refused. The scheduler withdraws it later."""
        for offered in self._transfers.offered.values():
            offered.outdated = True

    def layer_written(self, group: int, layer: int, fence: Any) -> list[Action]:
        """One layer of all blocks offered in this step can be read once ``fence`` has passed.

        A draft model runs its layers several times in a step; the first run writes the prompt's
        blocks, so only the first call counts.

        Raises:
            Misuse: there is no such layer.
        """
        if not 0 <= layer < self._layers[group]:
            raise Misuse(f"group {group}: there is no layer {layer}")
        if (group, layer) in self._writes.written:
            return []
        return self._writes.write_layer(group, layer, fence)

    def step_written(self, fence: Any) -> list[Action]:
        """All blocks offered in this step can be read once ``fence`` has passed."""
        actions = self._writes.write_rest(self._layers, fence)
        self._writes = StepWrites()
        return actions

    def on_request(self, request: AcceptedRead, now: float) -> list[Action]:
        """A reader requests pages.

        Raises:
            ProtocolError: the read id is not above the peer's earlier ones, or a part is not one
                that the peer may read. The caller closes the connection.
        """
        check_read(request, self._last_read_id.get(request.peer, -1))
        self._last_read_id[request.peer] = request.read_id
        offered = self._transfers.offered.get(request.transfer)
        waits = request.early and (
            offered is None or offered.is_for_next(request.peer, request.reader)
        )
        if offered is not None and not waits:
            return self._transfers.join(request, self._writes)
        if not waits:
            return [
                RefuseRead(
                    request.peer, request.read_id, FailureCause.GONE, "the blocks are not held here"
                )
            ]
        own = sum(peer == request.peer for peer, _ in self._parked)
        if own >= MAX_PARKED_READS - len(self._parked):
            detail = f"{len(self._parked)} read requests already wait for their prefill"
            return [RefuseRead(request.peer, request.read_id, FailureCause.REFUSED, detail)]
        self._parked[request.peer, request.read_id] = _ParkedRead(request, now + self._deadline_s)
        self._declined.pop(request.transfer, None)  # the decline was for an earlier request
        return []

    def cancel(self, peer: int, read_id: int) -> list[Action]:
        """A reader cancels a read. If it was the only one of a transfer that has not begun, nobody
        will read the transfer, and the prefill need not wait for a reader."""
        parked = self._parked.pop((peer, read_id), None)
        if parked is not None:
            request = parked.request
            others = (item.request for item in self._parked.values())
            if any(other.transfer == request.transfer for other in others):
                return []
            return self.decline(request.transfer, peer, request.reader)
        reader = self._transfers.get(peer, read_id)
        if reader is None or reader.state is not TransferState.MOVING:
            return []
        actions = [*reader.stop(), reader.notice(NoticeKind.LEFT)]
        return actions + self._transfers.settle(reader)

    def done(self, peer: int, read_id: int) -> list[Action]:
        """A reader has every page, from every worker."""
        reader = self._transfers.get(peer, read_id)
        if reader is None or reader.state is not TransferState.MOVING:
            return []
        reader.state = TRANSFER.after(reader.state, Event.COMPLETED)
        return reader.served()

    def sent(self, peer: int, read_id: int) -> list[Action]:
        """The transport has sent one ``SendPages``."""
        reader = self._transfers.get(peer, read_id)
        if reader is None or not reader.in_flight:
            return []
        reader.sent(reader.in_flight - 1)
        return reader.served() + self._transfers.settle(reader)

    def drained(self, peer: int, read_id: int) -> list[Action]:
        """The transport has ended a cancelled read."""
        reader = self._transfers.get(peer, read_id)
        if reader is None:
            return []
        reader.sent(0)
        return self._transfers.settle(reader)

    def peer_lost(self, peer: int) -> list[Action]:
        """A connection is gone; nothing of the peer is in flight any more."""
        self._last_read_id.pop(peer, None)
        self._parked = {key: parked for key, parked in self._parked.items() if key[0] != peer}
        actions: list[Action] = []
        for reader in list(self._transfers.readers.get(peer, {}).values()):
            if reader.state is TransferState.MOVING:
                actions.append(reader.notice(NoticeKind.LEFT))
            elif reader.in_flight:
                reader.in_flight = 0
                actions += reader.served()
            reader.state, reader.in_flight = TRANSFER.after(reader.state, Event.PEER_LOST), 0
            actions += self._transfers.settle(reader)
        return actions

    def withdraw(self, order: Withdraw) -> list[Action]:
        """Stop a transfer; one WITHDRAWN notice follows when nothing reads its blocks."""
        offered = self._transfers.offered.setdefault(order.transfer, OfferedTransfer())
        self._writes.pending = [item for item in self._writes.pending if item[0] is not offered]
        return offered.withdraw(order.cause) + self._transfers.settle_transfer(order.transfer)

    def sending_to(self, transfer: TransferId) -> list[int]:
        """Return the peers to which pages of a transfer are under way."""
        offered = self._transfers.offered.get(transfer)
        readers = offered.readers.values() if offered is not None else ()
        return [reader.request.peer for reader in readers if reader.in_flight]

    def renew(self, transfer: TransferId) -> list[Action]:
        """A decode engine still needs a transfer."""
        offered = transfer in self._transfers.offered
        return [ReportNotice(TransferEvent(transfer, NoticeKind.RENEWED))] if offered else []

    def decline(self, transfer: TransferId, peer: int, reader: Rank) -> list[Action]:
        """A decode engine does not need a transfer; perhaps before the prefill began."""
        offered = self._transfers.offered.get(transfer)
        if offered is not None and not offered.is_for_next(peer, reader):
            offered.answered.add(reader)
            return [ReportNotice(TransferEvent(transfer, NoticeKind.DECLINED))]
        # The next tick sets the deadline.
        kept = _KeptDecline(peer, reader, math.inf)
        remember(self._declined, transfer, kept, MAX_PARKED_READS)
        return []

    def tick(self, now: float) -> list[Action]:
        """Expire parked requests and send heartbeats; call it about every heartbeat."""
        late = [key for key, item in self._parked.items() if item.deadline <= now]
        detail = "the prefill did not begin in time"
        actions: list[Action] = [
            RefuseRead(peer, read_id, FailureCause.GONE, detail) for peer, read_id in late
        ]
        for key in late:
            del self._parked[key]
        latest = now + self._deadline_s
        declined = [item for item in self._declined.items() if item[1].deadline > now]
        self._declined = {
            key: kept._replace(deadline=min(kept.deadline, latest)) for key, kept in declined
        }
        if now < self._heartbeat_at:
            return actions
        self._heartbeat_at = now + self._heartbeat_s
        return actions + self._transfers.heartbeat(self.engine_paused)
