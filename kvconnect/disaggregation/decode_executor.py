"""Decode side of one worker's hand-offs: carries out the actions of ``decode_planner.py``."""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvconnect.disaggregation import decode_actions
from kvconnect.disaggregation.decode_actions import Action, CancelReceive, ConfirmRead, RequestPages
from kvconnect.disaggregation.decode_planner import DecodePlanner
from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    Keep,
    PeerTransfer,
    Receive,
    ReceiveReport,
)
from kvconnect.disaggregation.sessions import HandoffSession, HandoffSessions
from kvconnect.errors import ProtocolError, Refused
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
from kvconnect.protocol.topology import sources_for
from kvconnect.transport.base import Drained, Fence, IncomingPages, PagesReceived, PeerId
from kvconnect.types import Endpoint, FailureCause, JobId, Origin, TransferId, TransferType

logger = logging.getLogger(__name__)

_PAUSED_RENEWALS = 3  # renewals that a paused engine still sends: enough for one lease
_DECLINE_TRIES = 5  # connections that are made for one decline; one that is lost costs a wait there
_DECLINE_EVERY_S = 1.0

_CAUSES = {cause.value: cause for cause in FailureCause}


class _WaitingKeep(NamedTuple):
    keep: Keep
    tries: int = 1  # connections that were made for it


class DecodeExecutor:
    """Not synchronised: the agent holds its lock around every call."""

    def __init__(self, sessions: HandoffSessions) -> None:
        self._sessions = sessions
        groups = sessions.hello.groups
        self._receiver = DecodePlanner(
            [group.block_tokens for group in groups],
            [len(group.layers) for group in groups],
            [group.heads for group in groups],
        )
        self._keeps: dict[Origin, list[_WaitingKeep]] = {}  # until the connection is ready
        self._undelivered: list[tuple[float, _WaitingKeep]] = []  # declines, with the next due time
        self._renewals: dict[TransferId, tuple[Keep, float]] = {}  # with the next due time
        # End of the engine's last step; inf: a step runs, or none was seen.
        self.step_ended_at = math.inf
        self._finished: list[tuple[ReceiveReport, Receive]] = []
        self._moved: dict[JobId, list[PeerTransfer]] = {}  # of unfinished receives
        self._fence: Fence | None = None  # of the last step that received something

    def begin_step(self, work: DisaggregationInstructions, now: float, fence: Fence | None) -> None:
        """Take a step's receives, drops and renewals. Pages are written only after ``fence``, since
        work launched earlier may still use the blocks."""
        if work.receives:
            self._fence = fence
        for job in work.receives:
            self._renewals.pop(job.transfer, None)
            self._run_actions(self._receiver.receive(job, self._endpoints(job), now))
        for drop in work.drops:
            self._run_actions(self._receiver.drop(drop.job))
        for keep in work.keeps if self._sessions.speaks_for_engine else ():
            if keep.every_s:
                self._renewals[keep.transfer] = keep, now + keep.every_s
            else:
                self._renewals.pop(keep.transfer, None)
                self._send_keep(_WaitingKeep(keep))

    def tick(self, now: float) -> None:
        """Expire receives and renew leases of requests that wait to be scheduled; call it a few
        times per second. For a paused engine, renewals stop after a while: the prefill engine may
        be paused too, and wait for these blocks."""
        self._run_actions(self._receiver.tick(now))
        for transfer, (keep, due) in self._renewals.items():
            if due <= now <= self.step_ended_at + _PAUSED_RENEWALS * keep.every_s:
                self._renewals[transfer] = keep, now + keep.every_s
                self._send_keep(_WaitingKeep(keep))
        due_now = [waiting for due, waiting in self._undelivered if due <= now]
        self._undelivered = [item for item in self._undelivered if item[0] > now]
        for waiting in due_now:
            self._send_keep(waiting)

    @property
    def has_finished(self) -> bool:
        """Whether :meth:`take_finished` has results."""
        return bool(self._finished)

    def take_finished(self) -> list[tuple[ReceiveReport, Receive]]:
        """Return receives that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def on_message(self, session: HandoffSession, message: Message) -> None:
        """Handle a source's message.

        Raises:
            ProtocolError: a source may not send this message.
        """
        if isinstance(message, Fail):
            cause = _CAUSES.get(message.cause, FailureCause.PEER)
            self._run_actions(
                self._receiver.failed(session.peer, message.read_id, cause, message.detail)
            )
        elif isinstance(message, Alive):
            self._receiver.alive(session.peer, message.read_ids, time.monotonic())
        elif isinstance(message, PagesReady):
            session.meter.all_ready(message.read_id)
            actions = self._receiver.ready(session.peer, message.read_id, message.cached)
            self._run_actions(actions)
        else:
            raise ProtocolError(f"{type(message).__name__} from a source")

    def on_received(self, session: HandoffSession, event: PagesReceived) -> None:
        """Pages have arrived.

        Raises:
            ProtocolError: the pages were not requested.
        """
        session.meter.record(self._sessions.stats, TransferType.RECV, event, session.name)
        self._sessions.stats.count("handoff_digest_failed_blocks", len(event.bad))
        blocks = range(event.first, event.first + event.count)
        now = time.monotonic()
        self._run_actions(
            self._receiver.received(event.peer, event.read_id, event.number, blocks, event.bad, now)
        )

    def on_drained(self, event: Drained) -> None:
        """The transport has ended a cancelled read."""
        self._run_actions(self._receiver.drained(event.peer, event.read_id))

    def on_connected(self, origin: Origin, session: HandoffSession) -> None:
        """The session with a needed worker is ready."""
        self._run_actions(self._receiver.connected(origin, session.peer, session.views))
        for waiting in self._keeps.pop(origin, ()):
            _send_keep_to(self._sessions, session, waiting.keep)

    def on_lost(self, peer: PeerId, origin: Origin | None, cause: FailureCause) -> None:
        """A connection is gone, or could not be made. ``origin``: the worker it was made to."""
        self._run_actions(self._receiver.peer_lost(peer))
        if origin is not None:
            due = time.monotonic() + _DECLINE_EVERY_S
            for keep, tries in self._keeps.pop(origin, ()):
                if cause is FailureCause.PEER and not keep.every_s and tries < _DECLINE_TRIES:
                    self._undelivered.append((due, _WaitingKeep(keep, tries + 1)))
            self._run_actions(self._receiver.refused(origin, cause))

    def _endpoints(self, job: Receive) -> list[Endpoint]:
        """Return the source workers that hold heads or layers of this worker. If the heads cannot
        be mapped, or one of the workers is not known, return none, and the job fails."""
        if job.source is None:
            return []
        hello = self._sessions.hello
        heads = [group.kv_heads for group in hello.groups]
        try:
            needed = sources_for(hello.rank, job.source.tp, job.source.pp, heads)
        except Refused as error:
            logger.warning("hand-off from engine %s refused: %s", job.source.engine_id, error)
            self._sessions.stats.count("handoff_refused", label=error.field)
            return []
        by_rank = {(e.pp_rank, e.tp_rank): e for e in job.source.endpoints}
        # A source may leave out pipeline stages that have nothing for this worker.
        stages = {pp_rank for pp_rank, _ in by_rank}
        needed = [place for place in needed if place[0] in stages]
        missing = [place for place in needed if place not in by_rank]
        if missing:
            text = "request %s: no hand-off, no address of prefill's (stage, tensor rank) %s"
            logger.warning(text, job.req_id, ", ".join(map(str, missing)))
            self._sessions.stats.count("handoff_refused", label="ticket")
            return []
        return [by_rank[place] for place in needed]

    def _run_actions(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, decode_actions.ReportFinished):
                came = tuple(self._moved.pop(action.job.job, ()))
                self._finished.append((replace(action.report, moved=came), action.job))
            elif isinstance(action, decode_actions.ConnectPeer):
                session = self._sessions.get_or_connect(action.origin)
                if session is not None:
                    self.on_connected(action.origin, session)
            elif (session := self._sessions.get(PeerId(action.peer))) is not None:
                with self._sessions.isolate(session.peer):  # this may be the engine's thread
                    self._run_action(session, action)

    def _run_action(
        self, session: HandoffSession, action: RequestPages | CancelReceive | ConfirmRead
    ) -> None:
        if isinstance(action, RequestPages):
            self._request(session, action)
        elif isinstance(action, CancelReceive):
            session.meter.forget(action.read_id)
            self._sessions.send(session.peer, Cancel(read_id=action.read_id))
            self._sessions.transport.cancel(session.peer, action.read_id)
        else:
            moved = session.meter.finish(self._sessions.stats, action.read_id, "recv").moved
            if moved is not None:
                self._moved.setdefault(action.job, []).append(moved)
            self._sessions.send(session.peer, ReadDone(read_id=action.read_id))
            self._sessions.transport.cancel(session.peer, action.read_id)

    def _request(self, session: HandoffSession, request: RequestPages) -> None:
        spans = {span.group: (span.first, span.block_ids) for span in request.spans}
        nothing = (0, array("q"))
        by_unit = [spans.get(group, nothing) for group in session.unit_group]
        session.meter.open(request.read_id, asked=True)
        self._sessions.transport.submit(
            IncomingPages(
                session.peer,
                request.read_id,
                session.units,
                by_unit,
                self._fence,
                session.meter.path,
            )
        )
        parts = [(span.group, span.first, len(span.block_ids)) for span in request.spans]
        self._sessions.send(
            session.peer,
            ReadRequest(
                read_id=request.read_id,
                transfer=request.transfer,
                early=request.early,
                parts=parts,
                prompt=request.prompt,
                held=request.held,
            ),
        )

    def _send_keep(self, waiting: _WaitingKeep) -> None:
        source = waiting.keep.source
        origin = Origin(source.endpoints[0], source.engine_id, source.epoch)
        session = self._sessions.get_or_connect(origin)
        if session is None:
            self._keeps.setdefault(origin, []).append(waiting)
        else:
            _send_keep_to(self._sessions, session, waiting.keep)


def _send_keep_to(sessions: HandoffSessions, session: HandoffSession, keep: Keep) -> None:
    transfer = keep.transfer
    message = Renew(transfers=[transfer]) if keep.every_s else Decline(transfer=transfer)
    sessions.send(session.peer, message)
