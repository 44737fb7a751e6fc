"""What a decode worker's state machine tells its executor to do, in order."""

from __future__ import annotations

from typing import NamedTuple

from kvconnect.disaggregation.messages import Receive, ReceiveReport
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity
from kvconnect.types import JobId, Origin, Span, TransferId


class ConnectPeer(NamedTuple):
    """Connect to a worker; the caller answers with ``connected`` or ``refused``. Not repeated
    before the answer."""

    origin: Origin


class RequestPages(NamedTuple):
    """Submit an ``IncomingPages`` and send a read request. ``spans``: per group the first wire
    block and the wire-block ids here; the request's parts are (group, first, count) of each.
    ``held``: tokens of the prompt that this engine has."""

    peer: int
    read_id: int
    transfer: TransferId
    early: bool
    spans: tuple[Span, ...]
    prompt: PromptIdentity = NO_PROMPT
    held: int = 0


class CancelReceive(NamedTuple):
    """Tell the peer, and cancel the read at the transport; the caller answers with ``drained``."""

    peer: int
    read_id: int


class ConfirmRead(NamedTuple):
    """Tell the peer that the read is complete, and cancel it at the transport, so that no stray
    page is written later; the caller answers with ``drained``. ``job`` may have other reads."""

    peer: int
    read_id: int
    job: JobId


class ReportFinished(NamedTuple):
    """The job is over; no page of it is written any more."""

    report: ReceiveReport
    job: Receive


Action = ConnectPeer | RequestPages | CancelReceive | ConfirmRead | ReportFinished
