"""A prefill planner's input and output in short: requests to read, spans, what it sends."""

from __future__ import annotations

from array import array
from typing import Any

from kvconnect.disaggregation.messages import OfferBlocks
from kvconnect.disaggregation.prefill_actions import (
    Action,
    RefuseRead,
    ReportNotice,
    ReportServed,
    SendPages,
)
from kvconnect.disaggregation.prefill_planner import PrefillPlanner
from kvconnect.disaggregation.prefill_reads import AcceptedRead
from kvconnect.disaggregation.wire_blocks import GroupView
from kvconnect.protocol.prompts import identify
from kvconnect.types import Rank, Span, TransferId

T, U = TransferId(b"t" * 16), TransferId(b"u" * 16)
ONE = Rank(0, 1, 0, 1)
VIEW = GroupView(1, 9, (0, 1))
VIEWS = {0: VIEW}
PROMPT, OTHER_PROMPT = identify([1, 2, 3], None), identify([1, 2, 4], None)


def sender(*layers: int) -> PrefillPlanner:
    return PrefillPlanner(layers or (2,), deadline_s=10.0, heartbeat_s=1.0)


def span(first: int, *ids: int, group: int = 0) -> Span:
    return Span(group, first, array("q", ids))


def ask(read_id: int = 1, peer: int = 3, early: bool = False, **other: Any) -> AcceptedRead:
    fields = {"transfer": T, "reader": ONE, "views": VIEWS, "parts": [(0, 0, 4)], **other}
    return AcceptedRead(peer=peer, read_id=read_id, early=early, **fields)


def pages(actions: list[Action]) -> list[tuple[int, int, list[int], Any]]:
    """(unit, first, ids, fence) of what is sent."""
    sends = [action for action in actions if isinstance(action, SendPages)]
    return [(a.number, a.first, list(a.ids), a.fence) for a in sends]


def notices(actions: list[Action]) -> list[str]:
    return [
        action.notice.kind.value
        for action in actions
        if isinstance(action, ReportNotice | ReportServed)
    ]


def refusals(actions: list[Action]) -> list[tuple[int, int, str]]:
    return [(a.peer, a.read_id, a.cause.value) for a in actions if isinstance(a, RefuseRead)]


def written(*spans: Span, layers: tuple[int, ...] = (2,)) -> PrefillPlanner:
    one = sender(*layers)
    one.offer(OfferBlocks(T, spans))
    one.step_written("step")
    return one
