"""What a client may ask of KVConnect in ``kv_transfer_params``, besides a hand-off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTIONS_KEY = "kvconnect"
"""Key of the options in ``kv_transfer_params``, of a request and of its response."""
RECEIPT = "receipt"
SHARE = "share"
"""The engine shall answer with its share ticket, see :mod:`kvconnect.protocol.share_tickets`."""
SOURCE = "source"
"""Share ticket of another engine, which may have blocks of the prompt."""
HINTS = "hints"
"""Key of what was done with a request's hints, beside its receipt."""


def with_receipt(
    answer: dict[str, Any] | None,
    asked: Mapping[str, Any] | None,
    receipt: Mapping[str, Any] | None,
    hints: Mapping[str, int] | None = None,
) -> dict[str, Any] | None:
    """Return the ``kv_transfer_params`` of a response, with the receipt, and what became of its
    hints, if the request asked for a receipt. What is not understood is ignored: options never make
    a request fail."""
    options = asked.get(OPTIONS_KEY) if asked else None
    if receipt is None or not isinstance(options, dict) or options.get(RECEIPT) is not True:
        return answer
    said = {RECEIPT: receipt, **({} if hints is None else {HINTS: hints})}
    return {**(answer or {}), OPTIONS_KEY: said}
