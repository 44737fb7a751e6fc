"""What a prefill worker's state machine tells its executor to do, in order."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from kvconnect.disaggregation.messages import TransferEvent
from kvconnect.types import FailureCause


class SendPages(NamedTuple):
    """Submit an ``OutgoingPages``: wire blocks ``first ...`` of unit ``number`` at wire-block ids
    ``ids``, once ``fence`` has passed. The caller reports each with ``PrefillPlanner.sent``."""

    peer: int
    read_id: int
    group: int
    number: int
    first: int
    ids: array[int]
    fence: Any


class CancelRead(NamedTuple):
    """Cancel a read at the transport; the caller reports its end with
    ``PrefillPlanner.drained``."""

    peer: int
    read_id: int


class RefuseRead(NamedTuple):
    """Tell a reader that its read request is refused, or not served any more."""

    peer: int
    read_id: int
    cause: FailureCause
    detail: str


class SendAlive(NamedTuple):
    """Tell a reader that these read requests are still being served."""

    peer: int
    read_ids: tuple[int, ...]


class AnnounceReady(NamedTuple):
    """Tell a reader that its last page has been computed; only the transfer remains. ``cached``:
    tokens of the prompt that this engine did not compute."""

    peer: int
    read_id: int
    cached: int = 0


class ReportNotice(NamedTuple):
    """Report a notice to the scheduler."""

    notice: TransferEvent


class ReportServed(NamedTuple):
    """Report to the scheduler that a reader has every page, with the bytes and seconds of the
    read. Nothing of the read is in flight any more."""

    peer: int
    read_id: int
    notice: TransferEvent


class DropPeer(NamedTuple):
    """End a peer's connection: serving it raised an unexpected error."""

    peer: int
    error: Exception


Action = (
    SendPages
    | CancelRead
    | RefuseRead
    | SendAlive
    | AnnounceReady
    | ReportNotice
    | ReportServed
    | DropPeer
)
