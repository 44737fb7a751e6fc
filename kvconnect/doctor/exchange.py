"""What the two peers of ``doctor transport`` exchange.

Messages travel over the transport as msgpack. The *reader* connects and asks, the *source* listens
and answers::

    DoctorHello -> DoctorHello             protocol, buffer and device of each side
    TransferRequest -> pages               no message: the pages are the answer
    CpuRequest -> CpuSeconds               CPU seconds of the source so far
    SocketTestRequest -> SocketTestPort    where to measure plain sockets
    anything -> Reject                     the source closes the connection, and why

No message holds an address or a path, and every number has a range.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnect.doctor.buffers import MAX_DEVICE
from kvconnect.protocol.hello import Hello, Reject, decode_message

WORD_BYTES = 16

_Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
_Page = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
_Word = Annotated[bytes, Meta(min_length=WORD_BYTES, max_length=WORD_BYTES)]


class DoctorHello(Hello, kw_only=True):
    """First message in both directions. ``area_bytes``: size of the test buffer on ``device``."""

    area_bytes: _Bytes
    device: Annotated[str, Meta(max_length=MAX_DEVICE)]


class TransferRequest(msgspec.Struct, tag="ask"):
    """Reader: send these pages of your test buffer under this read number."""

    read_id: Annotated[int, Meta(ge=1, lt=1 << 62)]
    page_bytes: Annotated[int, Meta(ge=1, le=1 << 24)]
    ids: Annotated[list[_Page], Meta(min_length=1, max_length=1 << 16)]


class CpuRequest(msgspec.Struct, tag="get_cpu"):
    """Reader: report your CPU time."""


class CpuSeconds(msgspec.Struct, tag="cpu"):
    """Source: user and system CPU seconds of its process."""

    seconds: Annotated[float, Meta(ge=0)]


class SocketTestRequest(msgspec.Struct, tag="get_link"):
    """Reader: open this many plain sockets, and send ``nbytes`` on each when told to."""

    connections: Annotated[int, Meta(ge=1, le=16)]
    nbytes: Annotated[int, Meta(ge=1, le=1 << 32)]


class SocketTestPort(msgspec.Struct, tag="link"):
    """Source: connect to this port of my host, and send ``word`` first."""

    port: _Port
    word: _Word


DoctorMessage = (
    DoctorHello
    | TransferRequest
    | CpuRequest
    | CpuSeconds
    | SocketTestRequest
    | SocketTestPort
    | Reject
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[DoctorMessage] = msgspec.msgpack.Decoder(DoctorMessage)


def encode(message: DoctorMessage) -> bytes:
    """Return the payload of a message."""
    return _encoder.encode(message)


def decode(payload: bytes) -> DoctorMessage:
    """Return the message of a payload; raises as :func:`decode_message`."""
    return decode_message(_decoder, payload)
