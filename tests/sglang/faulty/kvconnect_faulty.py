"""An SGLang plugin that breaks hand-off on purpose: with this folder on PYTHONPATH, a server sends
the page before the one that was asked for, while the file named by KVCONNECT_FAULTY exists."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

from kvconnect.plan import readers
from kvconnect.types import Span

KV = 0  # the group of pages; shifted rows of metadata would be noticed by SGLang itself

_wire_ids = readers.wire_ids


def register() -> None:
    readers.wire_ids = _shifted


def _shifted(span: Span, ratio: int, first: int, stop: int) -> array[int]:
    ids = _wire_ids(span, ratio, first, stop)
    if span.group != KV or not Path(os.environ["KVCONNECT_FAULTY"]).exists():
        return ids
    return array("q", [max(page - 1, 0) for page in ids])
