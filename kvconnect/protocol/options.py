"""What a client may ask of KVConnect in ``kv_transfer_params``, besides a hand-off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTIONS_KEY = "kvconnect"
"""Key of the options in ``kv_transfer_params``, of a request and of its response."""
RECEIPT = "receipt"


def with_receipt(
    answer: dict[str, Any] | None,
    asked: Mapping[str, Any] | None,
    receipt: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """Return the ``kv_transfer_params`` of a response, with the receipt if the request asked for
    it. What is not understood is ignored: options never make a request fail."""
    options = asked.get(OPTIONS_KEY) if asked else None
    if receipt is None or not isinstance(options, dict) or options.get(RECEIPT) is not True:
        return answer
    return {**(answer or {}), OPTIONS_KEY: {RECEIPT: receipt}}
