"""Messages on control connections, and the versions of the wire protocol.

A **message** is its length (u32, little endian) and that many bytes; an empty one is a heartbeat.
The highest bit of the length marks a :class:`NixlPayload`. The first message is the **greeting**:
one byte, the digest period that its sender asks for, and perhaps an offer (``nixl_messages.py``).
The stricter period of both sides holds for all pages, in both directions. A side that does not want
the connection sends a **refusal** instead, which is ``_REFUSAL`` and the reason, and closes.

No I/O. Lengths are checked before memory is reserved for them.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from kvconnect.errors import Misuse, ProtocolError, Refused
from kvconnect.protocol.frames import DIGEST_PERIODS
from kvconnect.terminal import plain

PROTOCOL = (4, 4)
"""First and last version of the wire protocol that this code speaks."""

NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f]+\Z"
"""Pattern of a name that others choose and that ends up in logs: some characters, no controls."""

MAX_MESSAGE = 1 << 20

_LENGTH = struct.Struct("<I")
_NIXL_BIT = 1 << 31
_REFUSAL = 0xFF  # where a greeting has its digest period
_LONGEST_REASON = 300  # characters


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


class NixlPayload(bytes):
    """A message of a NIXL path, see ``nixl_messages.py``."""


def pack_greeting(digest_period: int, offer: bytes = b"") -> bytes:
    """Return the payload of a greeting."""
    return bytes([digest_period]) + offer


def pack_refusal(reason: str) -> bytes:
    """Return the payload that refuses a connection in place of a greeting."""
    return bytes([_REFUSAL]) + reason.encode()


def unpack_greeting(payload: bytes) -> tuple[int, bytes]:
    """Return the digest period asked for and the offer.

    Raises:
        Refused: this is a refusal; the message is the other side's reason.
        ProtocolError: this is no greeting.
    """
    if payload[:1] == bytes([_REFUSAL]):
        reason = payload[1:].decode(errors="replace")
        raise Refused("other", f"refused by the other side: {plain(reason[:_LONGEST_REASON])}")
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
