"""Frames of pages on data connections: one header, the payload, the digests.

A **frame** is one header of ``HEADER_BYTES``, ``nbytes`` of payload, then the digests: one u64
(little endian, XXH3-64 of the block's bytes in wire order) for every wire block i of
``[first, first + count)`` with ``(i + unit) % digest_period == 0``, in ascending order; none if
the period is 0. Adding the unit makes a period of 16 select other blocks in every layer.

No I/O.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from kvconnect.errors import Misuse, ProtocolError

HEADER_BYTES = 64
DIGEST_BYTES = 8
DIGEST_PERIODS = (0, 1, 16)

_MAGIC = b"KVCF"
_FRAME_VERSION = 1
_HEADER = struct.Struct("<4sHHqqqqii12s")  # followed by the CRC-32 of these bytes
_CRC = struct.Struct("<I")
_RESERVED = bytes(12)


class FrameHeader(NamedTuple):
    """Header of one data frame. All counts start at 0; ``nbytes`` excludes the digests."""

    sequence: int  # of the frame on its connection
    read_id: int
    unit: int
    first: int  # wire block
    count: int  # type: ignore[assignment]  # wire blocks, at least 1; hides tuple.count
    nbytes: int  # of payload, at least 1
    digest_period: int  # one of DIGEST_PERIODS


def pack_header(h: FrameHeader) -> bytes:
    """Return the header's ``HEADER_BYTES``; :class:`Misuse` if a number is out of range."""
    try:
        body = _HEADER.pack(
            _MAGIC,
            _FRAME_VERSION,
            h.digest_period,
            h.sequence,
            h.read_id,
            h.first,
            h.nbytes,
            h.unit,
            h.count,
            _RESERVED,
        )
    except struct.error as error:
        raise Misuse(f"{h}: {error}") from error
    if not _is_sound(h):
        raise Misuse(f"{h} is out of range")
    return body + _CRC.pack(zlib.crc32(body))


def unpack_header(data: bytes | memoryview) -> FrameHeader:
    """Return what a header says.

    Whether read_id, unit and blocks are expected, and whether ``nbytes`` fits them, is for the
    receiver to check: it alone knows.

    Raises:
        ProtocolError: wrong length, magic, version or checksum, or a number out of range.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"frame header of {len(data)} bytes, not {HEADER_BYTES}")
    magic, version, period, sequence, read_id, first, nbytes, unit, count, reserved = (
        _HEADER.unpack_from(data)
    )
    if magic != _MAGIC:
        raise ProtocolError(f"no frame starts with {bytes(magic)!r}")
    if _CRC.unpack_from(data, _HEADER.size) != (zlib.crc32(data[: _HEADER.size]),):
        raise ProtocolError("frame header does not match its checksum")
    if version != _FRAME_VERSION or reserved != _RESERVED:
        raise ProtocolError(f"frame header of version {version}, {_FRAME_VERSION} is known")
    header = FrameHeader(sequence, read_id, unit, first, count, nbytes, period)
    if not _is_sound(header):
        raise ProtocolError(f"{header} is out of range")
    return header


def _is_sound(h: FrameHeader) -> bool:
    return (
        min(h.sequence, h.read_id, h.unit, h.first) >= 0
        and min(h.count, h.nbytes) >= 1
        and h.digest_period in DIGEST_PERIODS
    )


def digested(first: int, count: int, unit: int, period: int) -> range:
    """Return the wire blocks of ``[first, first + count)`` whose digests follow the payload."""
    if not period:
        return range(0)
    return range(first + -(first + unit) % period, first + count, period)


def stricter(one: int, other: int) -> int:
    """Return the period that hashes more blocks; 0 hashes none."""
    return min(one, other) or max(one, other)
