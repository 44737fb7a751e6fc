"""Prefill side of one worker's hand-offs: carries out the actions of ``prefill_planner.py``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from kvconnect.disaggregation import prefill_actions
from kvconnect.disaggregation.messages import DisaggregationInstructions, NoticeKind, TransferEvent
from kvconnect.disaggregation.prefill_actions import Action
from kvconnect.disaggregation.prefill_planner import PrefillPlanner
from kvconnect.disaggregation.prefill_reads import AcceptedRead
from kvconnect.disaggregation.sessions import HandoffSession, HandoffSessions
from kvconnect.disaggregation.transfer_meter import ChunkKey
from kvconnect.errors import ProtocolError
from kvconnect.protocol.messages import (
    Alive,
    Decline,
    Fail,
    Message,
    PagesReady,
    ReadDone,
    ReadRequest,
    Renew,
)
from kvconnect.protocol.reads import Cancel
from kvconnect.transport.base import Drained, Fence, OutgoingPages, PagesSent, PeerId
from kvconnect.types import FailureCause, Rank, TransferId, TransferType

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Seconds between heartbeats to readers that wait for pages."""


class PrefillExecutor:
    """Not synchronised: the agent holds its lock around every call."""

    def __init__(self, sessions: HandoffSessions, deadline_s: float) -> None:
        self._sessions = sessions
        self._layer_places = {
            name: (number, layer)
            for number, group in enumerate(sessions.hello.groups)
            for layer, name in enumerate(group.layers)
        }
        # In order of arrival.
        self._notices: dict[tuple[TransferId, NoticeKind, Rank | None], TransferEvent] = {}
        layers = [len(group.layers) for group in sessions.hello.groups]
        self._sender = PrefillPlanner(layers, deadline_s, HEARTBEAT_S)
        self._deadline_s = deadline_s
        # End of the engine's last step; inf: a step runs, or none was seen.
        self.step_ended_at = math.inf

    def begin_step(self, work: DisaggregationInstructions) -> None:
        """Take a step's offers and withdrawals; call it before the forward."""
        for offer in work.offers:
            self._run_actions(self._sender.offer(offer))
        for order in work.withdrawals:
            self._run_actions(self._sender.withdraw(order))

    def sending_to(self, transfer: TransferId) -> list[PeerId]:
        """See :meth:`PrefillPlanner.sending_to`."""
        return [PeerId(peer) for peer in self._sender.sending_to(transfer)]

    def outdate(self) -> None:
        """See :meth:`PrefillPlanner.outdate`."""
        self._sender.outdate()

    def written(self, name: str | None, fence: Fence | None) -> None:
        """The step's blocks can be read once ``fence`` has passed: in layer ``name``, or with None
        in all layers. A layer that shares another layer's cache is ignored."""
        if name is None:
            self._run_actions(self._sender.step_written(fence))
        elif (place := self._layer_places.get(name)) is not None:
            group, layer = place
            self._run_actions(self._sender.layer_written(group, layer, fence))

    def tick(self, now: float) -> None:
        """Send heartbeats and expire requests; call it a few times per second."""
        self._sender.engine_paused = now - self.step_ended_at > self._deadline_s
        self._run_actions(self._sender.tick(now))

    @property
    def has_notices(self) -> bool:
        """Whether :meth:`take_notices` has notices."""
        return bool(self._notices)

    def take_notices(self) -> list[TransferEvent]:
        """Return the notices about readers since the last call."""
        notices, self._notices = list(self._notices.values()), {}
        return notices

    def on_message(self, session: HandoffSession, message: Message) -> None:
        """Handle a reader's message.

        Raises:
            ProtocolError: a reader may not send this message.
        """
        peer = session.peer
        if isinstance(message, ReadRequest):
            self._sessions.stats.count("handoff_early_reads", int(message.early))
            self._sessions.stats.count("handoff_late_reads", int(not message.early))
            session.meter.open(message.read_id, asked=False)
            read = _accepted(session, message, self._sessions.hello.groups[0].block_tokens)
            self._run_actions(self._sender.on_request(read, time.monotonic()))
        elif isinstance(message, Cancel):
            session.meter.forget(message.read_id)
            self._run_actions(self._sender.cancel(peer, message.read_id))
        elif isinstance(message, ReadDone):
            self._run_actions(self._sender.done(peer, message.read_id))
        elif isinstance(message, Renew):
            for transfer in message.transfers:
                self._run_actions(self._sender.renew(TransferId(transfer)))
        elif isinstance(message, Decline):
            transfer = TransferId(message.transfer)
            self._run_actions(self._sender.decline(transfer, peer, session.reader))
        else:
            raise ProtocolError(f"{type(message).__name__} from a reader")

    def on_sent(self, session: HandoffSession, event: PagesSent) -> None:
        """The transport has sent pages."""
        session.meter.record(self._sessions.stats, TransferType.SEND, event, session.name)
        self._run_actions(self._sender.sent(event.peer, event.read_id))

    def on_drained(self, event: Drained) -> None:
        """The transport has ended a cancelled read."""
        self._run_actions(self._sender.drained(event.peer, event.read_id))

    def on_lost(self, peer: PeerId) -> None:
        """A connection is gone."""
        self._run_actions(self._sender.peer_lost(peer))

    def _run_actions(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, prefill_actions.ReportNotice):
                self._keep_notice(action.notice)
                continue
            session = self._sessions.get(PeerId(action.peer))
            if session is None:
                # The connection may end before its last PagesSent event.
                if isinstance(action, prefill_actions.ReportServed):
                    self._keep_notice(action.notice)
                continue
            with self._sessions.isolate(session.peer):  # this may be the engine's thread
                self._run_action(session, action)

    def _run_action(self, session: HandoffSession, action: Action) -> None:
        if isinstance(action, prefill_actions.SendPages):
            self._send(session, action)
        elif isinstance(action, prefill_actions.ReportServed):
            measured = session.meter.finish(self._sessions.stats, action.read_id, "send")
            self._keep_notice(action.notice._replace(**measured._asdict()))
        elif isinstance(action, prefill_actions.CancelRead):
            session.meter.forget(action.read_id)
            self._sessions.transport.cancel(session.peer, action.read_id)
        elif isinstance(action, prefill_actions.RefuseRead):
            session.meter.forget(action.read_id)
            if action.cause is FailureCause.PROMPT:
                logger.warning("refused a read of %s: %s", session.name, action.detail)
                self._sessions.stats.count("handoff_refused", label="prompt")
            fail = Fail(read_id=action.read_id, cause=action.cause.value, detail=action.detail)
            self._sessions.send(session.peer, fail)
        elif isinstance(action, prefill_actions.AnnounceReady):
            ready = PagesReady(read_id=action.read_id, cached=action.cached)
            self._sessions.send(session.peer, ready)
        elif isinstance(action, prefill_actions.SendAlive):
            self._sessions.send(session.peer, Alive(read_ids=list(action.read_ids)))
        else:
            assert isinstance(action, prefill_actions.DropPeer)
            self._sessions.end(session.peer, action.error)

    def _keep_notice(self, notice: TransferEvent) -> None:
        """Keep the latest notice per transfer, kind and reader, in order: a reader may ask, leave
        and ask again before the scheduler polls."""
        key = notice.transfer, notice.kind, notice.reader
        self._notices.pop(key, None)
        self._notices[key] = notice

    def _send(self, session: HandoffSession, pages: prefill_actions.SendPages) -> None:
        unit = session.units[pages.number]
        if session.meter.trace is not None:
            chunk = ChunkKey(pages.group, pages.first, len(pages.ids))
            session.meter.trace.queued(pages.read_id, chunk)
        self._sessions.transport.submit(
            OutgoingPages(
                session.peer, pages.read_id, pages.number, unit, pages.first, pages.ids, pages.fence
            )
        )


def _accepted(session: HandoffSession, message: ReadRequest, block_tokens: int) -> AcceptedRead:
    transfer = TransferId(message.transfer)
    return AcceptedRead(
        session.peer,
        message.read_id,
        transfer,
        message.early,
        session.reader,
        session.views,
        message.parts,
        message.prompt,
        message.held // block_tokens,
    )
