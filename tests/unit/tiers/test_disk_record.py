"""The bytes on the disk: what is written is what is read, and nothing else is believed."""

from __future__ import annotations

import random
import struct
from array import array

import pytest
import xxhash

from kvconnect.tiers.backends.disk.record import (
    PAGE,
    Columns,
    RecordHead,
    SegmentHead,
    index_bytes,
    pack_index,
    pack_record,
    pack_segment,
    pages_of,
    unpack_index,
    unpack_record,
    unpack_segment,
)

IDENTITY = bytes(range(16))
SEGMENT = SegmentHead(IDENTITY, 1_700_000_000, b"format")
RECORD = RecordHead(b"key\x00with zero\x00", b"format\x00", 123_456, 1_700_000_001, 2**64 - 1)


def packed_record(head: RecordHead = RECORD) -> bytearray:
    page = bytearray(PAGE)
    pack_record(head, IDENTITY, memoryview(page))
    return page


def test_heads_come_back() -> None:
    page = pack_segment(SEGMENT)
    assert (len(page), unpack_segment(page)) == (PAGE, SEGMENT)
    assert unpack_record(packed_record(), IDENTITY) == RECORD
    gone = RECORD._replace(live=False)
    assert unpack_record(packed_record(gone), IDENTITY) == gone
    longest = RECORD._replace(key=b"k" * 255, fingerprint=b"f" * 64)
    assert unpack_record(packed_record(longest), IDENTITY) == longest


def test_no_flipped_bit_passes() -> None:
    segment, record = pack_segment(SEGMENT), packed_record()
    rng = random.Random(0)
    for page, unpack, nbytes in (
        (segment, unpack_segment, 109),
        (record, lambda p: unpack_record(p, IDENTITY), 370),
    ):
        assert any(page[nbytes - 8 : nbytes]) and not any(page[nbytes:])  # the digest ends there
        for bit in rng.sample(range(8 * nbytes), 300):
            changed = bytearray(page)
            changed[bit // 8] ^= 1 << bit % 8
            assert unpack(changed) is None
        assert unpack(page) is not None


def test_a_record_of_another_segment_is_none() -> None:
    assert unpack_record(packed_record(), bytes(16)) is None


def test_an_empty_page_is_nothing() -> None:
    assert unpack_segment(bytes(PAGE)) is None
    assert unpack_record(bytes(PAGE), IDENTITY) is None


@pytest.mark.parametrize(
    "keys", [[b"k%07d" % n for n in range(999)], [b"a", b"bc" * 100, b"d"], []]
)
def test_an_index_comes_back(keys: list[bytes]) -> None:
    columns = Columns.empty()
    for number, key in enumerate(keys):
        columns.add(1 + number * 3, RecordHead(key, b"f", number + 1, number + 5, 0))
    data = pack_index(IDENTITY, columns, 3000)
    assert unpack_index(data, IDENTITY) == (columns, 3000)
    assert len(data) <= index_bytes(keys)
    assert unpack_index(data, bytes(16)) is None
    for cut in (0, 10, len(data) - 1):
        assert unpack_index(data[:cut], IDENTITY) is None
    for at in random.Random(1).sample(range(len(data)), 40):
        changed = bytearray(data)
        changed[at] ^= 0x10
        assert unpack_index(bytes(changed), IDENTITY) is None


def sealed(data: bytes) -> bytes:
    """Return an index with its digest made anew, as whoever can write the folder can make it."""
    return data[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))


@pytest.mark.parametrize("keys", [[b"k1", b"k2", b"k3"], [b"a", b"bc", b"def"]])
def test_an_index_that_contradicts_itself_is_none(keys: list[bytes]) -> None:
    columns = Columns.empty()
    for number, key in enumerate(keys):
        columns.add(1 + number * 2, RecordHead(key, b"f", PAGE, 5, 0))
    data = pack_index(IDENTITY, columns, 7)
    assert unpack_index(sealed(data), IDENTITY) == (columns, 7)  # the control
    used, count, blob, width = 28, 32, 36, 40
    for at, numbers in (
        (used, (0, 1, 6)),
        (count, (0, 1, 2, 4, 2**31, 2**32 - 1)),
        (blob, (0, 1, 5, 7, 2**32 - 1)),
        (42, (0, 6, 7, 2**32 - 1)),  # the first page
        (54, (0, PAGE * 6, 2**32 - 1)),  # the first length
    ):
        for number in numbers:
            changed = bytearray(data)
            struct.pack_into("<I", changed, at, number)
            assert unpack_index(sealed(changed), IDENTITY) is None, (at, number)
    for number in range(2**16):
        changed = bytearray(data)
        struct.pack_into("<H", changed, width, number)
        found = unpack_index(sealed(changed), IDENTITY)
        assert (found is None) == (changed != data)
    for cut in range(1, len(data) - 50):
        assert unpack_index(sealed(data[:50] + data[50 + cut :]), IDENTITY) is None
        assert unpack_index(sealed(data + bytes(cut)), IDENTITY) is None


def test_rows_can_be_picked() -> None:
    columns = Columns([b"a", b"b", b"c"], *(array("I", [n, n + 1, n + 2]) for n in (1, 10, 20)))
    expected = Columns([b"c", b"a"], *(array("I", pair) for pair in ([3, 1], [12, 10], [22, 20])))
    assert columns.pick([2, 0]) == expected


def test_a_record_takes_whole_pages() -> None:
    assert [pages_of(n) for n in (1, PAGE, PAGE + 1)] == [2, 2, 3]
