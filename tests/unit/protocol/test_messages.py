"""Messages: round trips, ranges, and nothing but ProtocolError for anything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import KVConnectError, ProtocolError
from kvconnect.protocol.codec import MAX_MESSAGE
from kvconnect.protocol.hello import MAX_TEXT
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.messages import (
    PROBE_READ_ID,
    Alive,
    Cancel,
    Decline,
    Fail,
    GroupHello,
    HandoffHello,
    Message,
    Probe,
    ReadDone,
    ReadRequest,
    Reject,
    Renew,
    decode,
    encode,
)
from kvconnect.protocol.prompts import NO_PROMPT
from kvconnect.types import Rank

TRANSFER = b"0123456789abcdef"

HELLO = HandoffHello(
    features=["layers"],
    software="kvconnect 0.1.0",
    engine_id="prefill-0",
    epoch=77,
    rank=Rank(1, 2, 0, 1),
    identity=Identity(weights=Weights(files="f"), draft=Weights(version="v"), mixes_weights=True),
    format={"model": "m", "dtype": "bfloat16", "tokens_ahead": 1},
    groups=[
        GroupHello(
            block_tokens=64,
            page_tokens=16,
            window=128,
            layers=["model.layers.0.attn", "model.layers.1.attn"],
            kv_heads=8,
            heads=4,
            row_bytes=256,
            order="HNC",
            splittable=True,
        )
    ],
)

MESSAGES: list[Message] = [
    HELLO,
    Reject("model", "model is 'a' here, 'b' there"),
    ReadRequest(3, TRANSFER, True, [(0, 0, 5), (1, 2, 3)], NO_PROMPT),
    Cancel(3),
    ReadDone(3),
    Fail(3, "gone", "the lease has expired"),
    Alive([1, 2, 3]),
    Renew([TRANSFER]),
    Decline(TRANSFER),
    Probe(read_id=PROBE_READ_ID),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


def changed(message: Message, path: tuple[Any, ...], value: object) -> bytes:
    """The message's bytes with one value, found by keys and places, replaced."""
    plain = msgspec.msgpack.decode(encode(message))
    place = plain
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return msgspec.msgpack.encode(plain)


WANT = ReadRequest(3, TRANSFER, False, [(0, 0, 5)], NO_PROMPT)
GROUP = ("groups", 0)


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (WANT, ("read_id",), -1),
        (WANT, ("read_id",), 2**63),
        (WANT, ("read_id",), PROBE_READ_ID),
        (WANT, ("read_id",), "3"),
        (WANT, ("transfer",), TRANSFER[:15]),
        (WANT, ("prompt", 0), -1),
        (WANT, ("prompt", 1), bytes(15)),
        (WANT, ("prompt", 2), bytes(17)),
        (WANT, ("prompt",), None),
        (WANT, ("transfer",), TRANSFER + b"x"),
        (WANT, ("transfer",), TRANSFER.decode() + "x"),
        (WANT, ("early",), 1),
        (WANT, ("parts",), []),
        (WANT, ("parts",), [[0, 0, 1]] * 1025),
        (WANT, ("parts", 0), [0, 0]),
        (WANT, ("parts", 0), [-1, 0, 1]),
        (WANT, ("parts", 0), [64, 0, 1]),
        (WANT, ("parts", 0), [0, -1, 1]),
        (WANT, ("parts", 0), [0, 1 << 40, 1]),
        (WANT, ("parts", 0), [0, 0, 0]),
        (WANT, ("parts", 0), [0, 0, 1 << 24]),
        (Cancel(1), ("type",), "hack"),
        (Alive([1]), ("read_ids",), [1] * 70_000),
        (Renew([TRANSFER]), ("transfers",), [b"short"]),
        (Renew([TRANSFER]), ("transfers",), [TRANSFER] * 4097),
        (Fail(1, "gone", ""), ("cause",), "x" * 65),
        (Fail(1, "gone", ""), ("cause",), ""),
        (HELLO, ("protocol",), [2, 1]),
        (HELLO, ("protocol",), [0, 1]),
        (HELLO, ("features",), ["x"] * 65),
        (HELLO, ("engine_id",), ""),
        (HELLO, ("engine_id",), "line\nbreak"),
        (HELLO, ("engine_id",), "newline\n"),
        (HELLO, ("engine_id",), "\x1b[2J"),
        (HELLO, ("software",), "c1\x9b"),
        (HELLO, ("engine_id",), "x" * 257),
        (HELLO, ("epoch",), -1),
        (HELLO, ("rank",), [2, 2, 0, 1]),
        (HELLO, ("rank",), [0, 2, 1, 1]),
        (HELLO, ("rank",), [-1, 2, 0, 1]),
        (HELLO, ("rank",), [0, 0, 0, 1]),
        (HELLO, ("rank",), [0, 1 << 20, 0, 1]),
        (HELLO, ("rank",), [1023, 1024, 1, 2]),
        (HELLO, ("rank",), [0, 1, 0]),
        (HELLO, ("format",), {"model": 1.5}),
        (HELLO, ("format",), {"model": -1}),
        (HELLO, ("format",), {"model": "x" * 1025}),
        (HELLO, ("format",), {str(n): n for n in range(65)}),
        (HELLO, ("groups",), []),
        (HELLO, (*GROUP, "block_tokens"), 0),
        (HELLO, (*GROUP, "page_tokens"), 24),
        (HELLO, (*GROUP, "page_tokens"), 128),
        (HELLO, (*GROUP, "window"), 0),
        (HELLO, (*GROUP, "kv_heads"), 0),
        (HELLO, (*GROUP, "kv_heads"), 1 << 16),
        (HELLO, (*GROUP, "heads"), 9),
        (HELLO, (*GROUP, "row_bytes"), 0),
        (HELLO, (*GROUP, "order"), "CNH"),
        (HELLO, (*GROUP, "splittable"), None),
        (HELLO, (*GROUP, "layers"), ["a", "a"]),
        (HELLO, (*GROUP, "layers"), ["x"] * 4097),
        (HELLO, (*GROUP, "layers"), [""]),
    ],
)
def test_a_value_out_of_range_is_refused(
    message: Message, path: tuple[Any, ...], value: object
) -> None:
    original = msgspec.msgpack.decode(encode(message))
    for step in path:
        original = original[step]
    assert decode(changed(message, path, original)) == message  # it is the value that matters
    with pytest.raises(ProtocolError):
        decode(changed(message, path, value))


def test_fields_of_a_later_version_are_ignored() -> None:
    assert decode(changed(HELLO, ("compression",), ["zstd"])) == HELLO
    assert decode(changed(HELLO, (*GROUP, "scales"), 2)) == HELLO


def test_a_missing_field_is_refused() -> None:
    for name in ("software", "engine_id", "epoch", "rank", "format", "groups"):
        plain = msgspec.msgpack.decode(encode(HELLO))
        del plain[name]
        with pytest.raises(ProtocolError, match=name):
            decode(msgspec.msgpack.encode(plain))


def test_texts_of_others_are_cut_and_printable() -> None:
    fail = decode(changed(Fail(1, "gone", ""), ("detail",), "\x1b[2J\n" + "x" * 5000))
    assert isinstance(fail, Fail)
    assert fail.detail.startswith("?[2J?x") and len(fail.detail) == MAX_TEXT
    turned = decode(changed(Reject("model", ""), ("field",), "surprise"))
    assert turned == Reject("other", "")  # a metric label: bounded


def test_a_message_longer_than_a_note_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode(bytes(MAX_MESSAGE + 1))


# Two messages up to their last value.
ALIVE = b"\x82\xa4type\xa5alive\xa8read_ids"
REJECT = b"\x83\xa4type\xa6reject\xa5field\xa5model\xa7message"

TRICKS = {
    "nothing": b"",
    "an announced list of 4 billion": ALIVE + b"\xdd\xff\xff\xff\xff\x01",
    "an announced map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "a name that is no UTF-8": b"\x82\xa4type\xa2\xff\xfe",
    "a text that is no UTF-8": REJECT + b"\xa1\xff",
    "deep nesting": b"\x82\xa4type\xa4done\xa1x" + b"\x91" * 500_000,
    "two in one": encode(ReadDone(1)) + encode(ReadDone(2)),
}


@pytest.mark.parametrize("data", TRICKS.values(), ids=TRICKS)
def test_tricks_end_in_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_control_without_the_trick_it_is_a_message() -> None:
    assert decode(ALIVE + b"\xdd\x00\x00\x00\x01\x01") == Alive([1])
    assert decode(REJECT + b"\xa1x") == Reject("model", "x")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        decode(data)
    except KVConnectError as error:
        assert type(error) is ProtocolError


@given(st.sampled_from(MESSAGES), st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_gives_a_message_or_a_protocol_error(
    message: Message, place: int, change: int
) -> None:
    data = bytearray(encode(message))
    data[place % len(data)] ^= change
    try:
        found = decode(bytes(data))  # may equal the message: a name that is unknown now is ignored
        assert decode(encode(found)) == found
    except KVConnectError as error:
        assert type(error) is ProtocolError


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_cut_message_is_refused(message: Message) -> None:
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:length])
