"""Frames and notes: what was packed comes out, and nothing else does."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Misuse, ProtocolError, Refused
from kvconnect.protocol.codec import (
    HEADER_BYTES,
    MAX_MESSAGE,
    FrameHeader,
    MessageReader,
    NixlPayload,
    common_protocol,
    digested,
    pack_greeting,
    pack_header,
    pack_message,
    stricter,
    unpack_greeting,
    unpack_header,
)

HEADER = FrameHeader(
    sequence=7, read_id=3, unit=2, first=40, count=5, nbytes=5 * 65536, digest_period=16
)
INT64 = st.integers(0, 2**63 - 1)
INT31 = st.integers(0, 2**31 - 1)

# Frames -----------------------------------------------------------------------------------------


@given(
    st.builds(
        FrameHeader,
        sequence=INT64,
        read_id=INT64,
        unit=INT31,
        first=INT64,
        count=st.integers(1, 2**31 - 1),
        nbytes=st.integers(1, 2**63 - 1),
        digest_period=st.sampled_from([0, 1, 16]),
    )
)
def test_a_header_comes_out_as_it_went_in(header: FrameHeader) -> None:
    data = pack_header(header)
    assert len(data) == HEADER_BYTES
    assert unpack_header(memoryview(data)) == header


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    data = pack_header(HEADER)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            unpack_header(bytes(changed))


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_has_one_length(length: int) -> None:
    with pytest.raises(ProtocolError, match="header of"):
        unpack_header((pack_header(HEADER) + b"x")[:length])


WRONG = [
    {"sequence": -1},
    {"read_id": -1},
    {"unit": -1},
    {"first": -1},
    {"count": 0},
    {"count": -5},
    {"nbytes": 0},
    {"digest_period": 2},
]


@pytest.mark.parametrize("wrong", [*WRONG, {"read_id": 2**63}, {"unit": 2**31}])
def test_a_header_out_of_range_is_not_packed(wrong: dict[str, int]) -> None:
    with pytest.raises(Misuse):
        pack_header(HEADER._replace(**wrong))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_header_out_of_range_is_not_unpacked(
    wrong: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvconnect.protocol.codec._is_sound", lambda header: True)
        data = pack_header(HEADER._replace(**wrong))
    with pytest.raises(ProtocolError, match="out of range"):
        unpack_header(data)


@given(
    first=st.integers(0, 100),
    count=st.integers(1, 100),
    unit=st.integers(0, 40),
    period=st.sampled_from([0, 1, 16]),
)
def test_digested_blocks_are_those_of_the_rule(
    first: int, count: int, unit: int, period: int
) -> None:
    expected = [i for i in range(first, first + count) if period and (i + unit) % period == 0]
    assert list(digested(first, count, unit, period)) == expected


def test_a_block_cut_over_two_frames_is_digested_alike() -> None:
    whole = list(digested(3, 60, 5, 16))
    assert whole == [*digested(3, 21, 5, 16), *digested(24, 39, 5, 16)] != []


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


@pytest.mark.parametrize("payload", [b"", b"\x02", b"\xff", b"hello"])
def test_another_note_is_no_greeting(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="no greeting"):
        unpack_greeting(payload)


def test_the_stricter_digest_period_hashes_more() -> None:
    order = [0, 16, 1]
    for i, one in enumerate(order):
        for j, other in enumerate(order):
            assert stricter(one, other) == order[max(i, j)]


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
