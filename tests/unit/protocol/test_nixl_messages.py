"""What two transports tell each other about writes into memory."""

from __future__ import annotations

import msgspec
import pytest

from kvconnect.errors import ProtocolError
from kvconnect.protocol import nixl_messages
from kvconnect.protocol.messages import LAST_READ_ID
from kvconnect.protocol.nixl_messages import (
    Destinations,
    NixlOffer,
    PagesWritten,
    StopWriting,
    UnitLocation,
    UnitLocations,
    UseTcp,
    WritesStopped,
)

UNIT = UnitLocation(
    address=1 << 40, nbytes=1 << 30, device=-1, phases=1, block_bytes=8, segments=bytes(24)
)
LANDED = PagesWritten(
    read_id=LAST_READ_ID,
    unit=2,
    first=3,
    count=4,
    nbytes=32,
    number=1,
    seconds=0.5,
    digests=bytes(8),
)
MESSAGES = [
    UnitLocations(number=3, first=0, units=[UNIT]),
    Destinations(read_id=7, units=3, spans=[(0, 0), (4, 1)], ids=[bytes(8), bytes(16)]),
    UseTcp(read_id=7),
    LANDED,
    StopWriting(read_id=7),
    WritesStopped(read_id=7),
]
OFFER = NixlOffer(backend="UCX", version="1.5.1", agent="kvconnect-1", metadata=b"opaque")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_arrive_as_they_were(message: nixl_messages.NixlMessage) -> None:
    assert nixl_messages.decode(nixl_messages.encode(message)) == message


def test_an_offer_arrives_as_it_was() -> None:
    assert nixl_messages.decode_offer(nixl_messages.encode(OFFER)) == OFFER


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("read_id", -1),
        ("unit", 1 << 31),
        ("first", -1),
        ("count", 0),
        ("nbytes", 0),
        ("number", -1),
        ("seconds", -0.1),
        ("digests", bytes((1 << 20) + 1)),
    ],
)
def test_what_is_out_of_range_is_refused(field: str, value: object) -> None:
    plain = msgspec.to_builtins(LANDED, builtin_types=(bytes,))
    assert nixl_messages.decode(msgspec.msgpack.encode(plain)) == LANDED
    with pytest.raises(ProtocolError):
        nixl_messages.decode(msgspec.msgpack.encode({**plain, field: value}))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", nixl_messages.encode(OFFER)])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        nixl_messages.decode(data)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({}, ""),
        ({"version": "1.4.0"}, ""),
        ({"agent": "kvconnect-1"}, "both sides are the same worker"),
        ({"owner": "worker-1"}, "both sides are the same worker"),
        ({"owner": "worker-2"}, ""),
        ({"version": "1.3.2"}, "nixl 1.5.1 here, 1.3.2 there"),
        ({"version": "2.0.0"}, "nixl 1.5.1 here, 2.0.0 there"),
        ({"version": "1.6rc1"}, "nixl 1.5.1 here, 1.6rc1 there"),
        ({"version": "1.6.0+local"}, ""),
        ({"version": "unknown"}, "nixl 1.5.1 here, unknown there"),
        ({"backend": "LIBFABRIC"}, "backend UCX here, LIBFABRIC there"),
    ],
)
def test_sides_that_do_not_fit_say_why(theirs: dict[str, str], why: str) -> None:
    ours = msgspec.structs.replace(OFFER, owner="worker-1")
    other = msgspec.structs.replace(OFFER, **{"agent": "kvconnect-2", **theirs})
    found = nixl_messages.mismatch(ours, other)
    assert (why in found) if why else found == ""


def test_offers_without_an_owner_are_of_different_workers() -> None:
    """Older versions send none, and ignore what they do not know."""
    other = msgspec.structs.replace(OFFER, agent="kvconnect-2")
    assert nixl_messages.mismatch(OFFER, other) == ""
    older = msgspec.to_builtins(OFFER, builtin_types=(bytes,))
    del older["owner"]
    assert nixl_messages.decode_offer(msgspec.msgpack.encode(older)) == OFFER
    newer = {**older, "owner": "worker-1", "later": 1}
    assert nixl_messages.decode_offer(msgspec.msgpack.encode(newer)).owner == "worker-1"
