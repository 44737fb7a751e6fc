"""Frames: what was packed comes out, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Misuse, ProtocolError
from kvconnect.protocol.frames import (
    HEADER_BYTES,
    FrameHeader,
    digested,
    pack_header,
    stricter,
    unpack_header,
)

HEADER = FrameHeader(
    sequence=7, read_id=3, unit=2, first=40, count=5, nbytes=5 * 65536, digest_period=16
)
INT64 = st.integers(0, 2**63 - 1)
INT31 = st.integers(0, 2**31 - 1)


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
        patch.setattr("kvconnect.protocol.frames._is_sound", lambda header: True)
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


def test_the_stricter_digest_period_hashes_more() -> None:
    order = [0, 16, 1]
    for i, one in enumerate(order):
        for j, other in enumerate(order):
            assert stricter(one, other) == order[max(i, j)]
