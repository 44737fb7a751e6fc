"""An SGLang plugin that breaks hand-off on purpose, with this folder on PYTHONPATH: a server sends
the page before the one that was asked for while the file named by KVCONNECT_FAULTY exists, the
same of state components while that named by KVCONNECT_FAULTY_STATE does, and no pages at all while
that named by KVCONNECT_HELD does, as over a link that is very slow."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

from kvconnect.disaggregation import prefill_reads, wire_blocks
from kvconnect.disaggregation.prefill_executor import PrefillExecutor
from kvconnect.types import Span

KV, ROWS = 0, 1  # groups; shifted rows of metadata would be noticed by SGLang itself

_wire_ids = wire_blocks.wire_ids
_send, _tick = PrefillExecutor._send, PrefillExecutor.tick
_waiting: list[tuple[Any, ...]] = []


def register() -> None:
    vars(prefill_reads).update(wire_ids=_shifted)
    PrefillExecutor._send, PrefillExecutor.tick = _held, _let_go


def _is_there(variable: str) -> bool:
    return variable in os.environ and Path(os.environ[variable]).exists()


def _shifted(span: Span, ratio: int, first: int, stop: int) -> array[int]:
    ids = _wire_ids(span, ratio, first, stop)
    fault = "KVCONNECT_FAULTY" if span.group == KV else "KVCONNECT_FAULTY_STATE"
    if span.group == ROWS or not _is_there(fault):
        return ids
    return array("q", [max(page - 1, 0) for page in ids])


def _held(*order: Any) -> None:
    _waiting.append(order)
    _flush()


def _let_go(side: PrefillExecutor, now: float) -> None:
    _flush()
    _tick(side, now)


def _flush() -> None:
    while _waiting and not _is_there("KVCONNECT_HELD"):
        _send(*_waiting.pop(0))
