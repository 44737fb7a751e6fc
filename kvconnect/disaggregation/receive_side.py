"""The decode side of one worker's hand-offs: carries out what ``receiver.py`` decides."""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvconnect.disaggregation import receiver
from kvconnect.disaggregation.peer_boundary import guard
from kvconnect.disaggregation.receiver import Action, AskPages, CancelWant, Origin, Receiver, Thank
from kvconnect.disaggregation.sessions import Session, Sessions
from kvconnect.errors import ProtocolError, Refused
from kvconnect.offload.messages import Instructions, JobReport, Keep, PeerTransfer, Receive
from kvconnect.protocol.messages import (
    Alive,
    Cancel,
    Decline,
    Fail,
    Message,
    PagesReady,
    ReadDone,
    ReadRequest,
    Renew,
)
from kvconnect.protocol.topology import sources_for
from kvconnect.transport.base import Drained, Fence, IncomingPages, PagesReceived, PeerId
from kvconnect.types import Endpoint, FailureCause, JobId, TransferId, TransferType

logger = logging.getLogger(__name__)

_PATIENCE = 3  # renewals for an engine that stands still: as long as a lease lasts

_CAUSES = {cause.value: cause for cause in FailureCause}


class ReceiveSide:
    """Not synchronised: the agent holds its lock around every call."""

    def __init__(self, links: Sessions) -> None:
        self._links = links
        groups = links.hello.groups
        self._machine = Receiver(
            [group.block_tokens for group in groups], [len(group.layers) for group in groups]
        )
        self._keeps: dict[Origin, list[Keep]] = {}  # until the connection is there
        self._renewals: dict[TransferId, tuple[Keep, float]] = {}  # and when the next is due
        self.stepped_at = math.inf  # when the engine's last step ended; inf: in one, or not known
        self._finished: list[tuple[JobReport, Receive]] = []
        self._moved: dict[JobId, list[PeerTransfer]] = {}  # of receives that are not over
        self._fence: Fence | None = None  # of the last step that received something

    def begin_step(self, work: Instructions, now: float, fence: Fence | None) -> None:
        """Take a step's receives, drops and renewals. Pages land only after ``fence``: work
        launched before may still use the blocks."""
        if work.receives:
            self._fence = fence
        for job in work.receives:
            self._renewals.pop(job.transfer, None)
            self._run(self._machine.receive(job, self._endpoints(job), now))
        for drop in work.drops:
            self._run(self._machine.drop(drop.job))
        for keep in work.keeps if self._links.is_first else ():
            if keep.every_s:
                self._renewals[keep.transfer] = keep, now + keep.every_s
            else:
                self._renewals.pop(keep.transfer, None)
                self._keep(keep)

    def tick(self, now: float) -> None:
        """Time has passed; a few times per second. Leases of requests that wait for their turn are
        renewed, also for an engine that stands still, but not for long: the other side may stand
        still as well, and wait for them."""
        self._run(self._machine.tick(now))
        for transfer, (keep, due) in self._renewals.items():
            if due <= now <= self.stepped_at + _PATIENCE * keep.every_s:
                self._renewals[transfer] = keep, now + keep.every_s
                self._keep(keep)

    @property
    def has_finished(self) -> bool:
        """Whether :meth:`take_finished` has something."""
        return bool(self._finished)

    def take_finished(self) -> list[tuple[JobReport, Receive]]:
        """Return receives that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def on_message(self, link: Session, message: Message) -> None:
        """A source says something.

        Raises:
            ProtocolError: nothing a source may say.
        """
        if isinstance(message, Fail):
            cause = _CAUSES.get(message.cause, FailureCause.PEER)
            self._run(self._machine.failed(link.peer, message.want, cause))
        elif isinstance(message, Alive):
            self._machine.alive(link.peer, message.wants, time.monotonic())
        elif isinstance(message, PagesReady):
            link.meter.all_ready(message.want)
        else:
            raise ProtocolError(f"{type(message).__name__} from a source")

    def on_received(self, link: Session, event: PagesReceived) -> None:
        """Pages have landed.

        Raises:
            ProtocolError: pages that were not asked for.
        """
        link.meter.record(self._links.stats, TransferType.RECV, event, link.name)
        self._links.stats.count("handoff_digest_failed_blocks", len(event.bad))
        blocks = range(event.first, event.first + event.count)
        now = time.monotonic()
        self._run(
            self._machine.received(event.peer, event.want, event.number, blocks, event.bad, now)
        )

    def on_quiet(self, event: Drained) -> None:
        """The transport has stopped a want."""
        self._run(self._machine.quiet(event.peer, event.want))

    def on_connected(self, origin: Origin, link: Session) -> None:
        """There is an agreement with a worker that was needed."""
        self._run(self._machine.connected(origin, link.peer, link.views))
        for keep in self._keeps.pop(origin, ()):
            _tell_keep(self._links, link, keep)

    def on_lost(self, peer: PeerId, origin: Origin | None, cause: FailureCause) -> None:
        """A connection is gone, or could not be made; ``origin``: what it was made for."""
        self._run(self._machine.peer_lost(peer))
        if origin is not None:
            self._keeps.pop(origin, None)
            self._run(self._machine.refused(origin, cause))

    def _endpoints(self, job: Receive) -> list[Endpoint]:
        """Return those workers of the source that have something for this one; none if its heads
        cannot be ours, upon which the job fails."""
        if job.source is None:
            return []
        hello = self._links.hello
        heads = [group.kv_heads for group in hello.groups]
        try:
            needed = sources_for(hello.rank, job.source.tp, job.source.pp, heads)
        except Refused as error:
            logger.warning("hand-off from engine %s refused: %s", job.source.engine_id, error)
            self._links.stats.count("handoff_refused", label=error.field)
            return []
        # A source may leave out workers that it knows to have nothing for this one.
        by_rank = {(e.pp_rank, e.tp_rank): e for e in job.source.endpoints}
        return [by_rank[place] for place in needed if place in by_rank]

    def _run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, receiver.Finished):
                came = tuple(self._moved.pop(action.job.job, ()))
                self._finished.append((replace(action.report, moved=came), action.job))
            elif isinstance(action, receiver.NeedPeer):
                link = self._links.need(action.origin)
                if link is not None:
                    self.on_connected(action.origin, link)
            elif (link := self._links.get(PeerId(action.peer))) is not None:
                with guard(self._links, link.peer):  # the engine's thread comes by here too
                    self._do(link, action)

    def _do(self, link: Session, action: AskPages | CancelWant | Thank) -> None:
        if isinstance(action, AskPages):
            self._ask(link, action)
        elif isinstance(action, CancelWant):
            link.meter.forget(action.want)
            self._links.tell(link.peer, Cancel(want=action.want))
            self._links.transport.cancel(link.peer, action.want)
        else:
            *_, moved = link.meter.finish(self._links.stats, action.want, "recv")
            if moved is not None:
                self._moved.setdefault(action.job, []).append(moved)
            self._links.tell(link.peer, ReadDone(want=action.want))
            self._links.transport.cancel(link.peer, action.want)

    def _ask(self, link: Session, ask: AskPages) -> None:
        spans = {span.group: (span.first, span.block_ids) for span in ask.spans}
        nothing = (0, array("q"))
        by_unit = [spans.get(group, nothing) for group in link.unit_group]
        link.meter.open(ask.want, asked=True)
        self._links.transport.submit(
            IncomingPages(link.peer, ask.want, link.units, by_unit, self._fence, link.meter.path)
        )
        parts = [(span.group, span.first, len(span.block_ids)) for span in ask.spans]
        self._links.tell(
            link.peer,
            ReadRequest(want=ask.want, transfer=ask.transfer, early=ask.early, parts=parts),
        )

    def _keep(self, keep: Keep) -> None:
        origin = Origin(keep.source.endpoints[0], keep.source.engine_id, keep.source.epoch)
        link = self._links.need(origin)
        if link is None:
            self._keeps.setdefault(origin, []).append(keep)
        else:
            _tell_keep(self._links, link, keep)


def _tell_keep(links: Sessions, link: Session, keep: Keep) -> None:
    transfer = keep.transfer
    message = Renew(transfers=[transfer]) if keep.every_s else Decline(transfer=transfer)
    links.tell(link.peer, message)
