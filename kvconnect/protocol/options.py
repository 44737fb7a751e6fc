"""What a client may ask of KVConnect in ``kv_transfer_params``, besides a hand-off."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

OPTIONS_KEY = "kvconnect"
"""Key of the options in ``kv_transfer_params``, of a request and of its response."""
RECEIPT = "receipt"
"""Key of a receipt. A request has ``true`` or a nonce there, see :func:`nonce_of`."""
RECEIPT_EVENT = "KVConnectReceipt"
"""Type of the KV event that holds a receipt, and the nonce of the request that asked for it."""
SHARE = "share"
"""The engine shall answer with a ticket of the scope ``share``, under ``SHARE_TICKET_KEY``, and the
seconds until it expires, under ``SHARE_EXPIRY_KEY``."""
SHARE_TICKET_KEY = "kvconnect_share"
SHARE_EXPIRY_KEY = "kvconnect_share_expires_in"
SOURCE = "source"
"""Share ticket of another engine, which may have blocks of the prompt."""
IF_ABLE = "if_able"
"""The engine shall offer a hand-off if it sends, and compute as without one if it does not."""
HINTS = "hints"
"""Key of what was done with a request's hints, beside its receipt."""

_NONCE = re.compile(r"[0-9a-f]{32}")


def nonce_of(asked: Mapping[str, Any] | None) -> str | None:
    """Return the nonce under which a request wants its receipt published among the KV events, None
    if it has none. vLLM passes no ``kv_transfer_params`` on in streams."""
    options = asked.get(OPTIONS_KEY) if asked else None
    nonce = options.get(RECEIPT) if isinstance(options, dict) else None
    return nonce if isinstance(nonce, str) and _NONCE.fullmatch(nonce) else None


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
