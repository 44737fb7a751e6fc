"""What the two halves of ``doctor transport`` say to each other, as msgpack notes.

The *reader* connects and asks, the *source* listens and answers::

    Hello -> Hello                       who you are talking to
    Ask(want, page_bytes, ids) -> pages  no note: the pages are the answer
    GetCpu -> Cpu                        CPU seconds of the source so far
    GetLink -> Link                      where to measure plain sockets
    anything -> No                       the end

No message holds an address or a path, and every number has a range.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnect.doctor.test_buffer import MAX_DEVICE
from kvconnect.errors import ProtocolError
from kvconnect.protocol.codec import decode_struct
from kvconnect.transport.base import MAX_MESSAGE_BYTES

VERSION = 1
WORD_BYTES = 16

_Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
_Page = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
_Word = Annotated[bytes, Meta(min_length=WORD_BYTES, max_length=WORD_BYTES)]


class DoctorHello(msgspec.Struct, tag="doctor"):
    """The first message, both ways. ``area_bytes``: memory with pages in it; ``device``: where."""

    area_bytes: _Bytes
    device: Annotated[str, Meta(max_length=MAX_DEVICE)]
    version: Annotated[int, Meta(ge=1, le=0xFFFF)] = VERSION


class TransferRequest(msgspec.Struct, tag="ask"):
    """Reader: send these pages of your memory under this want."""

    want: Annotated[int, Meta(ge=1, lt=1 << 62)]
    page_bytes: Annotated[int, Meta(ge=1, le=1 << 24)]
    ids: Annotated[list[_Page], Meta(min_length=1, max_length=1 << 16)]


class GetCpu(msgspec.Struct, tag="get_cpu"):
    """Reader: how much CPU time have you used?"""


class Cpu(msgspec.Struct, tag="cpu"):
    """Source: user and system seconds of the whole process."""

    seconds: Annotated[float, Meta(ge=0)]


class GetLink(msgspec.Struct, tag="get_link"):
    """Reader: get ready to send so many bytes on each of some plain sockets, each time asked."""

    connections: Annotated[int, Meta(ge=1, le=16)]
    nbytes: Annotated[int, Meta(ge=1, le=1 << 32)]


class LinkPort(msgspec.Struct, tag="link"):
    """Source: connect to this port of my address and say ``word`` first."""

    port: _Port
    word: _Word


class No(msgspec.Struct, tag="no"):
    """Source: I hang up, and why; the last message."""

    reason: Annotated[str, Meta(max_length=1024)]


Message = DoctorHello | TransferRequest | GetCpu | Cpu | GetLink | LinkPort | No

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the note that carries a message."""
    return _encoder.encode(message)


def decode(note: bytes) -> Message:
    """Return the message of a note.

    Raises:
        ProtocolError: too long, not one of the messages, or a number out of range.
    """
    if len(note) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a note of {len(note)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    message: Message = decode_struct(_decoder, note)
    return message
