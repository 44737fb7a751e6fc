"""Bytes between two workers: page frames on data connections, messages on control connections.

A **frame** is one header of ``HEADER_BYTES``, ``nbytes`` of payload, then the digests: one u64
(little endian, XXH3-64 of the block's bytes in wire order) for every wire block i of
``[first, first + count)`` with ``(i + unit) % digest_period == 0``, in ascending order; none if
the period is 0. Adding the unit makes a period of 16 select other blocks in every layer.

A **message** is its length (u32, little endian) and that many bytes; an empty one is a heartbeat.
The highest bit of the length marks a :class:`NixlPayload`. The first message is the **greeting**:
one byte, the digest period that its sender asks for, and perhaps an offer (``nixl_messages.py``).
The stricter period of both sides holds for all pages, in both directions.

No I/O. Lengths are checked before memory is reserved for them.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, TypeVar

import msgspec

from kvconnect.errors import Misuse, ProtocolError, Refused

PROTOCOL = (2, 2)
"""First and last version of the wire protocol that this code speaks."""

NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f]+\Z"
"""Pattern of a name that others choose and that ends up in logs: some characters, no controls."""

HEADER_BYTES = 64
MAX_MESSAGE = 1 << 20
DIGEST_BYTES = 8
DIGEST_PERIODS = (0, 1, 16)

_MAGIC = b"KVCF"
_FRAME_VERSION = 1
_HEADER = struct.Struct("<4sHHqqqqii12s")  # followed by the CRC-32 of these bytes
_CRC = struct.Struct("<I")
_RESERVED = bytes(12)
_LENGTH = struct.Struct("<I")
_NIXL_BIT = 1 << 31


_T = TypeVar("_T")


def decode_struct(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """Decode untrusted msgpack; raises :class:`ProtocolError` for anything malformed."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes that cannot be read: {error}") from error


def common_protocol(
    ours: tuple[int, int], theirs: tuple[int, int], names: tuple[str, str] = ("here", "there")
) -> int:
    """Return the highest protocol version in both ranges (first, last); ``names`` say whose.

    Raises:
        ProtocolError: a range runs backwards.
        Refused: field ``protocol``, there is none; the message names both ranges.
    """
    for first, last in (ours, theirs):
        if not 1 <= first <= last:
            raise ProtocolError(f"protocol range {first} to {last}")
    version = min(ours[1], theirs[1])
    if version < max(ours[0], theirs[0]):
        texts = [
            f"{low} to {high} {name}"
            for (low, high), name in zip((ours, theirs), names, strict=True)
        ]
        raise Refused(
            "protocol",
            f"no common protocol version: {texts[0]}, {texts[1]}; upgrade the older KVConnect",
        )
    return version


# Frames -----------------------------------------------------------------------------------------


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
            *(_MAGIC, _FRAME_VERSION, h.digest_period, h.sequence, h.read_id, h.first, h.nbytes),
            *(h.unit, h.count, _RESERVED),
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


# Messages ---------------------------------------------------------------------------------------


class NixlPayload(bytes):
    """A message of a NIXL path, see ``nixl_messages.py``."""


def pack_greeting(digest_period: int, offer: bytes = b"") -> bytes:
    """Return the payload of a greeting."""
    return bytes([digest_period]) + offer


def unpack_greeting(payload: bytes) -> tuple[int, bytes]:
    """Return the digest period asked for and the offer; :class:`ProtocolError` if this is no
    greeting."""
    if not payload or payload[0] not in DIGEST_PERIODS:
        raise ProtocolError("its first message is no greeting")
    return payload[0], payload[1:]


def pack_message(payload: bytes) -> bytes:
    """Return a message's bytes; no payload makes a heartbeat. :class:`Misuse` if it is too long."""
    if len(payload) > MAX_MESSAGE:
        raise Misuse(f"a message of {len(payload)} bytes, at most {MAX_MESSAGE} fit")
    flag = _NIXL_BIT if isinstance(payload, NixlPayload) else 0
    return _LENGTH.pack(len(payload) | flag) + payload


class MessageReader:
    """Splits a control connection's bytes into messages. Keeps less than one message and one
    chunk."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are complete now; ``b""`` is a heartbeat.

        Raises:
            ProtocolError: a message is longer than ``MAX_MESSAGE``. The reader cannot be used any
                more: where the next message starts is unknown.
        """
        self._buffer += data
        notes = []
        start = 0
        while len(self._buffer) >= start + _LENGTH.size:
            (marked,) = _LENGTH.unpack_from(self._buffer, start)
            length = marked & ~_NIXL_BIT
            if length > MAX_MESSAGE:
                raise ProtocolError(f"a message of {length} bytes; limit is {MAX_MESSAGE}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            kind = NixlPayload if marked & _NIXL_BIT else bytes
            notes.append(kind(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return notes
