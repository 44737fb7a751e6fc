"""What the two sides of a connection tell each other so that hardware can write pages.

On a NIXL path the source writes into the reader's memory itself, so the reader must say where.
These messages travel on the control connection, beside the notes of the layer above::

    reader                                    source
      Units(1, [...]) ----------------------> |   where the pages of an agreement lie, once
      Places(7, 1, spans) or Plain(7) ------> |   where want 7 goes, or that it goes over TCP
      | <------------ Landed(7, 0, 0, 64, 3) |   write number 3 is complete; its mark says so too
      Stop(7) ------------------------------> |   nothing more, please
      | <-------------------------- Stopped(7) |   no write of want 7 can land any more

An :class:`Offer` comes with each side's greeting. The reader is the side that connected. Sizes are
bytes. Nothing here does I/O.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnect.wire.codec import MAX_NOTE, NO_CONTROLS, decode_struct
from kvconnect.wire.messages import LAST_WANT

MAX_METADATA = 256 << 10
"""Of one agent; a few areas take less than 1 KiB."""

MAX_UNIT_LISTS = 16
"""That one reader may describe; it has one, and one for the probe."""

MAX_UNITS = 4096

_Name = Annotated[str, Meta(max_length=128, pattern=NO_CONTROLS)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
_WantNumber = Annotated[int, Meta(ge=0, le=LAST_WANT)]
_Address = Annotated[int, Meta(ge=0, le=LAST_WANT)]
_Size = Annotated[int, Meta(ge=1, lt=1 << 62)]
_Block = Annotated[int, Meta(ge=0, lt=1 << 40)]
_Count = Annotated[int, Meta(ge=1, lt=1 << 31)]


class Offer(msgspec.Struct, kw_only=True):
    """What one side has. ``metadata`` lets the other side reach its memory, so only the reader
    has any; it is only looked at when the rest fits: NIXL may crash on that of another version."""

    backend: _Name
    version: Annotated[str, Meta(max_length=32, pattern=NO_CONTROLS)]
    agent: _Name
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA)]


class UnitPlace(msgspec.Struct, kw_only=True):
    """Where the reader keeps one unit: its area, and ``segments``, int64 little-endian triples
    (offset, stride, length), as :class:`~kvconnect.transport.base.Unit` explains them.
    ``device`` is the number of a CUDA device, -1 for CPU memory."""

    address: _Address
    nbytes: _Size
    device: Annotated[int, Meta(ge=-1, lt=1 << 16)]
    phases: _Count
    block_bytes: _Size
    segments: Annotated[bytes, Meta(min_length=24, max_length=MAX_NOTE)]


class Units(msgspec.Struct, tag="units", kw_only=True):
    """Units from place ``first`` on of a list with a number, for :class:`Places`. They come in
    order, in as many messages as it takes."""

    number: Annotated[int, Meta(ge=0, lt=MAX_UNIT_LISTS)]
    first: Annotated[int, Meta(ge=0, lt=MAX_UNITS)]
    units: Annotated[list[UnitPlace], Meta(min_length=1, max_length=MAX_UNITS)]


class Places(msgspec.Struct, tag="places", kw_only=True):
    """Where a want goes. ``spans[u]`` is the first wire block of unit u and which of ``ids`` its
    blocks are, int64 little-endian."""

    want: _WantNumber
    units: _Number
    spans: Annotated[list[tuple[_Block, _Number]], Meta(min_length=1, max_length=MAX_UNITS)]
    ids: list[Annotated[bytes, Meta(max_length=MAX_NOTE)]]


class Plain(msgspec.Struct, tag="plain", kw_only=True):
    """A want that goes over the data connections."""

    want: _WantNumber


class Landed(msgspec.Struct, tag="landed", kw_only=True):
    """Wire blocks ``first ... first + count - 1`` of a unit were written by write ``number`` of
    this connection in ``seconds``. ``digests``: see ``codec.py``."""

    want: _WantNumber
    unit: _Number
    first: _Block
    count: _Count
    nbytes: _Size
    number: _WantNumber
    seconds: Annotated[float, Meta(ge=0, le=86_400)]
    digests: Annotated[bytes, Meta(max_length=MAX_NOTE)]


class Stop(msgspec.Struct, tag="stop", kw_only=True):
    """The reader wants no more of this."""

    want: _WantNumber


class Stopped(msgspec.Struct, tag="stopped", kw_only=True):
    """No write of a want is under way, and none will start."""

    want: _WantNumber


RailMessage = Units | Places | Plain | Landed | Stop | Stopped

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RailMessage] = msgspec.msgpack.Decoder(RailMessage)
_offers = msgspec.msgpack.Decoder(Offer)


def encode(message: RailMessage | Offer) -> bytes:
    """Return a message's bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> RailMessage:
    """Return the message; ``ProtocolError`` for anything else."""
    return decode_struct(_decoder, data)


def decode_offer(data: bytes) -> Offer:
    """Return the offer; ``ProtocolError`` for anything else."""
    return decode_struct(_offers, data)


def misfit(ours: Offer, theirs: Offer) -> str:
    """Return why the two cannot work together, "" if they can.

    NIXL 1.4 and 1.5 understand one another; an agent of 1.3 or older dies of the metadata of a
    newer one, so what is not known to fit is not tried.
    """
    if ours.agent == theirs.agent:
        return "both sides are the same nixl agent: an engine that reads from itself"
    if ours.backend != theirs.backend:
        return f"nixl backend {ours.backend} here, {theirs.backend} there: use the same"
    known = [_release(ours.version), _release(theirs.version)]
    if min(known) < _OLDEST or known[0][0] != known[1][0]:  # an unknown version is (0, 0)
        oldest = ".".join(map(str, _OLDEST))
        return f"nixl {ours.version} here, {theirs.version} there: use {oldest} or later on both"
    return ""


_OLDEST = (1, 4)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:[.+]|$)", re.ASCII)


def _release(version: str) -> tuple[int, int]:
    """Return (major, minor), (0, 0) if it is not a version that was ever released."""
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
