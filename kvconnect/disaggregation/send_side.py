"""The prefill side of one worker's hand-offs: carries out what ``sender.py`` decides."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from kvconnect.disaggregation import peer_boundary, sender
from kvconnect.disaggregation.peer_boundary import guard
from kvconnect.disaggregation.sender import AcceptedRead, Action, Sender
from kvconnect.disaggregation.sessions import Session, Sessions
from kvconnect.errors import ProtocolError
from kvconnect.offload.messages import Instructions, NoticeKind, TransferEvent
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
from kvconnect.transport.base import Drained, Fence, OutgoingPages, PagesSent, PeerId
from kvconnect.types import Rank, TransferId, TransferType

HEARTBEAT_S = 1.0
"""How often readers are told that their pages are still to come."""


class SendSide:
    """Not synchronised: the agent holds its lock around every call."""

    def __init__(self, links: Sessions, deadline_s: float) -> None:
        self._links = links
        self._place = {
            name: (number, layer)
            for number, group in enumerate(links.hello.groups)
            for layer, name in enumerate(group.layers)
        }
        self._notices: dict[
            tuple[TransferId, NoticeKind, Rank | None], TransferEvent
        ] = {}  # in order
        layers = [len(group.layers) for group in links.hello.groups]
        self._machine = Sender(layers, deadline_s, HEARTBEAT_S)
        self._deadline_s = deadline_s
        self.stepped_at = math.inf  # when the engine's last step ended; inf: in one, or not known

    def begin_step(self, work: Instructions) -> None:
        """Take a step's offers and withdrawals, before its forward."""
        for offer in work.offers:
            self._run(self._machine.offer(offer))
        for order in work.withdrawals:
            self._run(self._machine.withdraw(order))

    def written(self, name: str | None, fence: Fence | None) -> None:
        """One layer of all blocks this step offers, or with None all layers, can be read once the
        fence has passed. A layer that shares another one's cache is not known here and left
        alone."""
        if name is None:
            self._run(self._machine.step_written(fence))
        elif (place := self._place.get(name)) is not None:
            self._run(self._machine.layer_written(*place, fence))

    def tick(self, now: float) -> None:
        """Time has passed; a few times per second."""
        self._machine.stands = now - self.stepped_at > self._deadline_s
        self._run(self._machine.tick(now))

    @property
    def has_notices(self) -> bool:
        """Whether :meth:`take_notices` has something."""
        return bool(self._notices)

    def take_notices(self) -> list[TransferEvent]:
        """Return what readers did since the last call."""
        notices, self._notices = list(self._notices.values()), {}
        return notices

    def on_message(self, link: Session, message: Message) -> None:
        """A reader says something.

        Raises:
            ProtocolError: nothing a reader may say.
        """
        peer = link.peer
        if isinstance(message, ReadRequest):
            self._links.stats.count("handoff_early_reads", int(message.early))
            self._links.stats.count("handoff_late_reads", int(not message.early))
            link.meter.open(message.want, asked=False)
            self._run(self._machine.want(_ask(link, message), time.monotonic()))
        elif isinstance(message, Cancel):
            link.meter.forget(message.want)
            self._run(self._machine.cancel(peer, message.want))
        elif isinstance(message, ReadDone):
            self._run(self._machine.done(peer, message.want))
        elif isinstance(message, Renew):
            for transfer in message.transfers:
                self._run(self._machine.renew(TransferId(transfer)))
        elif isinstance(message, Decline):
            self._run(self._machine.decline(TransferId(message.transfer)))
        else:
            raise ProtocolError(f"{type(message).__name__} from a reader")

    def on_sent(self, link: Session, event: PagesSent) -> None:
        """The transport has sent pages."""
        link.meter.record(self._links.stats, TransferType.SEND, event, link.name)
        self._run(self._machine.sent(event.peer, event.want))

    def on_quiet(self, event: Drained) -> None:
        """The transport has stopped a want."""
        self._run(self._machine.quiet(event.peer, event.want))

    def on_lost(self, peer: PeerId) -> None:
        """A connection is gone."""
        self._run(self._machine.peer_lost(peer))

    def _run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, sender.Tell):
                self._note(action.notice)
                continue
            link = self._links.get(PeerId(action.peer))
            if link is None:
                if isinstance(action, sender.Served):  # lost before we knew that all had left
                    self._note(action.notice)
                continue
            with guard(self._links, link.peer):  # the engine's thread comes by here too
                self._do(link, action)

    def _do(self, link: Session, action: Action) -> None:
        if isinstance(action, sender.SendPages):
            self._send(link, action)
        elif isinstance(action, sender.Served):
            nbytes, seconds, moved = link.meter.finish(self._links.stats, action.want, "send")
            self._note(action.notice._replace(nbytes=nbytes, seconds=seconds, moved=moved))
        elif isinstance(action, sender.CancelRead):
            link.meter.forget(action.want)
            self._links.transport.cancel(link.peer, action.want)
        elif isinstance(action, sender.Refuse):
            link.meter.forget(action.want)
            fail = Fail(want=action.want, cause=action.cause.value, detail=action.detail)
            self._links.tell(link.peer, fail)
        elif isinstance(action, sender.AllReady):
            self._links.tell(link.peer, PagesReady(want=action.want))
        elif isinstance(action, sender.StillThere):
            self._links.tell(link.peer, Alive(wants=list(action.wants)))
        else:
            assert isinstance(action, sender.Break)
            peer_boundary.end(self._links, link.peer, action.error)

    def _note(self, notice: TransferEvent) -> None:
        """Keep the last notice of its kind of each reader, behind those before it: a reader may
        ask, leave and ask again before the scheduler looks."""
        key = notice.transfer, notice.kind, notice.reader
        self._notices.pop(key, None)
        self._notices[key] = notice

    def _send(self, link: Session, pages: sender.SendPages) -> None:
        unit = link.units[pages.number]
        if link.meter.journal is not None:
            chunk = pages.group, pages.first, len(pages.ids)
            link.meter.journal.queued(pages.want, chunk)
        self._links.transport.submit(
            OutgoingPages(
                link.peer, pages.want, pages.number, unit, pages.first, pages.ids, pages.fence
            )
        )


def _ask(link: Session, want: ReadRequest) -> AcceptedRead:
    transfer = TransferId(want.transfer)
    return AcceptedRead(
        link.peer, want.want, transfer, want.early, link.reader, link.views, want.parts
    )
