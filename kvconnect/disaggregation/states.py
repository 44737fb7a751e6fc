"""The life cycles of hand-offs; that of a session is in :mod:`kvconnect.peers.sessions`."""

from __future__ import annotations

from enum import StrEnum

from kvconnect.life_cycles import Event, StateTable, row


class Lease(StrEnum):
    """The prefill scheduler's promise to keep the blocks of one transfer."""

    GROWING = "growing"  # the request runs, no reader has asked
    STREAMING = "streaming"  # the request runs, a reader has asked
    WAITING = "waiting"  # the request is over, no reader has asked
    READING = "reading"  # the request is over, a reader has asked
    WITHDRAWN = "withdrawn"  # workers were told to stop
    RELEASED = "released"


class TransferState(StrEnum):
    """One read request, on either side."""

    REQUESTED = "asked"  # waits for the connection or the transfer's offer
    MOVING = "moving"
    COMPLETE = "complete"  # the reader has every page
    STOPPING = "stopping"  # pages in flight end, no more are sent
    OVER = "over"


class Handoff(StrEnum):
    """One request's hand-off, as the decode scheduler sees it."""

    PENDING = "wanted"
    RECEIVING = "receiving"
    DROPPING = "dropping"  # not needed any more, but pages may still be written
    SETTLED = "settled"


LEASE = StateTable(
    Lease.GROWING,
    {
        Lease.GROWING: row(
            Lease.GROWING,
            Lease.WITHDRAWN,
            {Event.JOINED: Lease.STREAMING, Event.COMPUTED: Lease.WAITING},
        ),
        Lease.STREAMING: row(
            Lease.STREAMING,
            Lease.WITHDRAWN,
            {
                Event.JOINED: Lease.STREAMING,
                Event.COMPUTED: Lease.READING,
                Event.SERVED: Lease.WITHDRAWN,
            },
        ),
        Lease.WAITING: row(Lease.WAITING, Lease.WITHDRAWN, {Event.JOINED: Lease.READING}),
        Lease.READING: row(
            Lease.READING,
            Lease.WITHDRAWN,
            {Event.JOINED: Lease.READING, Event.SERVED: Lease.WITHDRAWN},
        ),
        Lease.WITHDRAWN: row(
            Lease.WITHDRAWN,
            Lease.WITHDRAWN,
            {
                Event.JOINED: Lease.WITHDRAWN,
                Event.COMPUTED: Lease.WITHDRAWN,
                Event.SERVED: Lease.WITHDRAWN,
                Event.ANSWERED: Lease.RELEASED,
            },
        ),
    },
)

TRANSFER = StateTable(
    TransferState.REQUESTED,
    {
        TransferState.REQUESTED: row(
            TransferState.OVER, TransferState.OVER, {Event.STARTED: TransferState.MOVING}
        ),
        TransferState.MOVING: row(
            TransferState.OVER, TransferState.STOPPING, {Event.COMPLETED: TransferState.COMPLETE}
        ),
        TransferState.COMPLETE: row(TransferState.OVER, TransferState.STOPPING, {}),
        TransferState.STOPPING: row(
            TransferState.OVER, TransferState.STOPPING, {Event.DRAINED: TransferState.OVER}
        ),
    },
)

HANDOFF = StateTable(
    Handoff.PENDING,
    {
        Handoff.PENDING: {
            Event.PEER_LOST: Handoff.PENDING,
            Event.EXPIRE: Handoff.PENDING,  # the engine decides how long a request may wait
            Event.ABORT: Handoff.SETTLED,
            Event.PLANNED: Handoff.RECEIVING,
        },
        Handoff.RECEIVING: {
            Event.PEER_LOST: Handoff.RECEIVING,  # only workers know when writes end
            Event.EXPIRE: Handoff.RECEIVING,
            Event.ABORT: Handoff.DROPPING,
            Event.ANSWERED: Handoff.SETTLED,
        },
        Handoff.DROPPING: row(
            Handoff.DROPPING, Handoff.DROPPING, {Event.ANSWERED: Handoff.SETTLED}
        ),
    },
)
