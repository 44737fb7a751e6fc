"""Hand-off parameters: what belongs to a role is read, and nothing a client claims beside it."""

from __future__ import annotations

import pytest

from kvconnect.errors import Refused
from kvconnect.protocol.handoff_request import (
    STANDING_TICKET_KEY,
    STANDING_TICKET_RANK_KEY,
    TICKET_KEY,
    HandoffRequest,
    parse_request,
)
from kvconnect.protocol.tickets import verify

KEY = b"a key that both sides hold"
NOW = 1_000_000.0
TRANSFER = bytes(range(16))


def refused(text: object, key: bytes = KEY, now: float = NOW, **more: str) -> str:
    """The reason why a ticket is refused."""
    with pytest.raises(Refused) as caught:
        verify(text, (key,), now, **more)
    assert caught.value.field == "ticket"
    return str(caught.value)


def test_roles_are_told_apart() -> None:
    assert parse_request({"do_remote_decode": True}) == HandoffRequest("send")
    assert parse_request({"do_remote_prefill": True, "do_remote_decode": False}) == HandoffRequest(
        "recv"
    )
    assert parse_request({"do_remote_prefill": None}) == parse_request({}) == HandoffRequest("none")


def test_what_belongs_to_a_role_is_read() -> None:
    hexed = TRANSFER.hex()
    assert parse_request(
        {"do_remote_decode": True, "transfer_id": hexed.upper(), STANDING_TICKET_KEY: True}
    ) == HandoffRequest("send", TRANSFER, wants_standing_ticket=True)
    ranked = {"do_remote_decode": True, STANDING_TICKET_KEY: True, STANDING_TICKET_RANK_KEY: 3}
    assert parse_request(ranked) == HandoffRequest("send", wants_standing_ticket=True, rank=3)
    assert parse_request(
        {"do_remote_prefill": True, "transfer_id": hexed, TICKET_KEY: "text"}
    ) == HandoffRequest("recv", TRANSFER, "text")
    alone = {"transfer_id": hexed, TICKET_KEY: "text"}
    assert parse_request(alone) == HandoffRequest("recv", TRANSFER, "text")
    assert parse_request({"do_remote_decode": True, **alone}).role == "send"


def test_what_a_client_claims_beside_the_ticket_is_ignored() -> None:
    """A request that names an address of its own gets no further than one without."""
    claims = {
        "remote_host": "169.254.169.254",
        "remote_port": 80,
        "remote_block_ids": [[0, 1]],
        "remote_engine_id": "other",
        "tp_size": 1_000_000,
    }
    asked = parse_request({"do_remote_prefill": True, **claims})
    assert asked == HandoffRequest("recv")
    assert "missing" in refused(asked.ticket)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, "both"),
        ({"do_remote_decode": 1}, "true or false"),
        ({"do_remote_prefill": "yes"}, "true or false"),
        ({"do_remote_decode": True, STANDING_TICKET_KEY: "please"}, "true or false"),
        (
            {"do_remote_decode": True, STANDING_TICKET_KEY: True, STANDING_TICKET_RANK_KEY: "1"},
            "data-parallel rank",
        ),
        (
            {"do_remote_decode": True, STANDING_TICKET_KEY: True, STANDING_TICKET_RANK_KEY: True},
            "data-parallel rank",
        ),
        (
            {"do_remote_decode": True, STANDING_TICKET_KEY: True, STANDING_TICKET_RANK_KEY: -1},
            "data-parallel rank",
        ),
        ({"do_remote_decode": True, "transfer_id": 5}, "hexadecimal"),
        ({"do_remote_decode": True, "transfer_id": ""}, "hexadecimal"),
        ({"do_remote_decode": True, "transfer_id": "ab" * 15}, "hexadecimal"),
        ({"do_remote_decode": True, "transfer_id": "ab" * 16 + "\n"}, "hexadecimal"),
        ({"do_remote_decode": True, "transfer_id": " " + "ab" * 16}, "hexadecimal"),
        ({"do_remote_prefill": True, "transfer_id": "zz" * 16}, "hexadecimal"),
    ],
)
def test_params_that_make_no_sense_are_refused(params: dict[str, object], reason: str) -> None:
    with pytest.raises(Refused, match=reason) as caught:
        parse_request(params)
    assert caught.value.field == "params"
