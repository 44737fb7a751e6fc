"""The hand-off parameters of requests: an engine's role in a hand-off, and its ticket. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from kvconnect.errors import Refused
from kvconnect.types import TransferId

TICKET_KEY = "kvconnect_ticket"
STANDING_TICKET_KEY = "kvconnect_card"
STANDING_TICKET_RANK_KEY = "kvconnect_card_rank"
STANDING_TICKET_EXPIRY_KEY = "kvconnect_card_expires_in"

_TRANSFER_ID = re.compile(r"[0-9a-fA-F]{32}")


class HandoffRequest(NamedTuple):
    """The hand-off parameters of a request, from its ``kv_transfer_params``.

    ``role``: "send" (compute, then hand off), "recv" (take over) or "none". ``ticket`` is not
    verified and may be of any type; only :func:`kvconnect.protocol.tickets.verify` may read it.
    ``rank``: the data-parallel rank whose standing ticket is requested, -1 for any.
    """

    role: Literal["send", "recv", "none"] = "none"
    transfer_id: TransferId | None = None
    ticket: object = None
    wants_standing_ticket: bool = False
    rank: int = -1


def parse_request(params: Mapping[str, Any]) -> HandoffRequest:
    """Parse a request's ``kv_transfer_params``; keys of other connectors are ignored.

    Raises:
        Refused: field ``params``: both roles at once, a flag that is not true or false, a
            ``transfer_id`` that is not 32 hexadecimal digits, or an invalid rank.
    """
    sends, receives = (_flag(params, k) for k in ("do_remote_decode", "do_remote_prefill"))
    if sends and receives:
        raise Refused("params", "do_remote_decode and do_remote_prefill are both true: set one")
    # An engine with several connectors answers with a ticket but without a role.
    receives = receives or (TICKET_KEY in params and not sends)
    if not (sends or receives):
        return HandoffRequest()
    return HandoffRequest(
        role="send" if sends else "recv",
        transfer_id=_transfer_id(params.get("transfer_id")),
        ticket=params.get(TICKET_KEY),
        wants_standing_ticket=_flag(params, STANDING_TICKET_KEY) if sends else False,
        rank=_rank(params.get(STANDING_TICKET_RANK_KEY)),
    )


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise Refused("params", f"{key} must be true or false, not a {type(value).__name__}")


def _rank(value: object) -> int:
    if value is None:
        return -1
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Refused(
            "params", f"{STANDING_TICKET_RANK_KEY} must be a data-parallel rank: 0 or more"
        )
    return value


def _transfer_id(value: object) -> TransferId | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _TRANSFER_ID.fullmatch(value):
        raise Refused("params", "transfer_id must be 32 hexadecimal digits")
    return TransferId(bytes.fromhex(value))
