"""Notes and versions: what was packed comes out, and nothing else does."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Misuse, ProtocolError, Refused
from kvconnect.protocol.codec import (
    MAX_MESSAGE,
    MessageReader,
    NixlPayload,
    common_protocol,
    pack_greeting,
    pack_message,
    pack_refusal,
    unpack_greeting,
)

# Notes ------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_notes_come_out_whatever_the_pieces(payloads: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(pack_message, payloads))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader = MessageReader()
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert [message for piece in pieces for message in reader.feed(piece)] == payloads


def test_notes_of_the_transport_itself_are_told_apart() -> None:
    plain, nixl = MessageReader().feed(pack_message(b"same") + pack_message(NixlPayload(b"same")))
    assert plain == nixl == b"same"
    assert (type(plain), type(nixl)) == (bytes, NixlPayload)


def test_a_heartbeat_is_an_empty_message() -> None:
    assert MessageReader().feed(pack_message(b"")) == [b""]


@pytest.mark.parametrize("period", [0, 1, 16])
def test_a_greeting_says_what_digests_are_asked_for(period: int) -> None:
    assert unpack_greeting(pack_greeting(period)) == (period, b"")
    assert unpack_greeting(pack_greeting(period, b"offer")) == (period, b"offer")


@pytest.mark.parametrize("payload", [b"", b"\x02", b"\xfe", b"hello"])
def test_another_note_is_no_greeting(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="no greeting"):
        unpack_greeting(payload)


def test_a_refusal_says_why_in_a_bounded_line() -> None:
    with pytest.raises(Refused, match=r"refused by the other side: not here$"):
        unpack_greeting(pack_refusal("not here"))
    with pytest.raises(Refused) as caught:
        unpack_greeting(pack_refusal("two\nlines" + "x" * MAX_MESSAGE)[:MAX_MESSAGE])
    assert "two?lines" in str(caught.value) and len(str(caught.value)) < 400
    with pytest.raises(Refused):  # bytes that are no text
        unpack_greeting(pack_refusal("") + b"\xff\xfe")


def test_the_longest_note_passes_and_one_byte_more_does_not() -> None:
    longest = bytes(MAX_MESSAGE)
    assert MessageReader().feed(pack_message(longest)) == [longest]
    with pytest.raises(Misuse):
        pack_message(longest + b"x")
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE + 1)):
        MessageReader().feed(struct.pack("<I", MAX_MESSAGE + 1))


def test_nothing_is_kept_for_a_note_that_is_too_long() -> None:
    reader = MessageReader()
    with pytest.raises(ProtocolError):
        reader.feed(struct.pack("<I", 0xFFFFFFFF))
    with pytest.raises(ProtocolError):
        reader.feed(b"more")


# Versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 9), (4, 4), 4)],
)
def test_the_highest_common_version_is_used(
    ours: tuple[int, int], theirs: tuple[int, int], version: int
) -> None:
    assert common_protocol(ours, theirs) == version


def test_no_common_version_names_both_ranges() -> None:
    with pytest.raises(Refused, match="1 to 2 here, 3 to 4 there") as caught:
        common_protocol((1, 2), (3, 4))
    assert caught.value.field == "protocol"


@pytest.mark.parametrize("backwards", [(2, 1), (0, 1), (-1, 5)])
def test_a_range_that_is_none_breaks_the_protocol(backwards: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError):
        common_protocol((1, 1), backwards)
