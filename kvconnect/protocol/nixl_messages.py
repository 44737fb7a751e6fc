"""Messages between the two sides of a NIXL path.

The source writes pages into the reader's memory itself, so the reader tells it where. These
messages use the control connection, beside those of ``messages.py``::

    reader                                  source
      UnitLocations(number=1) -------------> |   addresses of the reader's units, once
      Destinations(read_id=7, units=1) -------> |   the pages of read 7 go there, or
      UseTcp(read_id=7) ----------------------> |   the pages of read 7 go over TCP
      | <-- PagesWritten(read_id=7, number=3)   |   write 3 of this connection is complete
      StopWriting(read_id=7) -----------------> |   write nothing more for read 7
      | <---------- WritesStopped(read_id=7)    |   no write of read 7 can arrive any more

The greeting of each side (``codec.py``) contains a :class:`NixlOffer`. The reader is the side that
connected. A read's id is ``read_id``. Sizes are in bytes. Nothing here does I/O.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnect.protocol.codec import MAX_MESSAGE, NO_CONTROLS, decode_struct
from kvconnect.protocol.reads import LAST_READ_ID

MAX_METADATA = 256 << 10
"""Limit on the metadata of one agent, in bytes; that of a few regions takes less than 1 KiB."""

MAX_UNIT_LISTS = 16
"""Limit on the lists of units of one reader. It uses two: one for pages, one for the probe."""

MAX_UNITS = 4096

_Name = Annotated[str, Meta(max_length=128, pattern=NO_CONTROLS)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
_ReadNumber = Annotated[int, Meta(ge=0, le=LAST_READ_ID)]
_Address = Annotated[int, Meta(ge=0, le=LAST_READ_ID)]
_Size = Annotated[int, Meta(ge=1, lt=1 << 62)]
_Block = Annotated[int, Meta(ge=0, lt=1 << 40)]
_Count = Annotated[int, Meta(ge=1, lt=1 << 31)]


class NixlOffer(msgspec.Struct, kw_only=True):
    """What one side has. ``metadata`` lets the other side reach its memory, so only the reader
    sends any. It is read only if the other fields fit: NIXL may crash on that of another
    version. ``owner``: the worker that has the agent, and perhaps another one for the other
    direction; workers of before that field send none."""

    backend: _Name
    version: Annotated[str, Meta(max_length=32, pattern=NO_CONTROLS)]
    agent: _Name
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA)]
    owner: Annotated[str, Meta(max_length=64)] = ""


class UnitLocation(msgspec.Struct, kw_only=True):
    """Where the reader keeps one unit.

    ``address``, ``nbytes`` and ``device`` describe its memory region; ``device`` is the number of
    a CUDA device, -1 for CPU memory. ``segments`` holds int64 little-endian triples (offset,
    stride, length), see :class:`~kvconnect.transport.base.Unit`."""

    address: _Address
    nbytes: _Size
    device: Annotated[int, Meta(ge=-1, lt=1 << 16)]
    phases: _Count
    block_bytes: _Size
    segments: Annotated[bytes, Meta(min_length=24, max_length=MAX_MESSAGE)]


class UnitLocations(msgspec.Struct, tag="units", kw_only=True):
    """A slice of the numbered list of units that :class:`Destinations` refers to, from index
    ``first`` on. A long list is sent in several messages, in order."""

    number: Annotated[int, Meta(ge=0, lt=MAX_UNIT_LISTS)]
    first: Annotated[int, Meta(ge=0, lt=MAX_UNITS)]
    units: Annotated[list[UnitLocation], Meta(min_length=1, max_length=MAX_UNITS)]


class Destinations(msgspec.Struct, tag="places", kw_only=True):
    """Where the pages of a read go. ``units`` is the number of a :class:`UnitLocations` list.
    ``spans[u]``: unit u's (first wire block, index into ``ids``). ``ids``: wire-block ids, int64
    little-endian."""

    read_id: _ReadNumber
    units: _Number
    spans: Annotated[list[tuple[_Block, _Number]], Meta(min_length=1, max_length=MAX_UNITS)]
    ids: list[Annotated[bytes, Meta(max_length=MAX_MESSAGE)]]


class UseTcp(msgspec.Struct, tag="plain", kw_only=True):
    """Reader: send the pages of this read over the TCP data connections."""

    read_id: _ReadNumber


class PagesWritten(msgspec.Struct, tag="landed", kw_only=True):
    """Source: write ``number`` of this connection has written wire blocks
    ``first ... first + count - 1`` of a unit, in ``seconds``. ``digests``: see ``codec.py``."""

    read_id: _ReadNumber
    unit: _Number
    first: _Block
    count: _Count
    nbytes: _Size
    number: _ReadNumber
    seconds: Annotated[float, Meta(ge=0, le=86_400)]
    digests: Annotated[bytes, Meta(max_length=MAX_MESSAGE)]


class StopWriting(msgspec.Struct, tag="stop", kw_only=True):
    """Reader: write nothing more for this read."""

    read_id: _ReadNumber


class WritesStopped(msgspec.Struct, tag="stopped", kw_only=True):
    """Source: no write of this read is under way, and none will start."""

    read_id: _ReadNumber


NixlMessage = UnitLocations | Destinations | UseTcp | PagesWritten | StopWriting | WritesStopped

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[NixlMessage] = msgspec.msgpack.Decoder(NixlMessage)
_offers = msgspec.msgpack.Decoder(NixlOffer)


def encode(message: NixlMessage | NixlOffer) -> bytes:
    """Return a message's bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> NixlMessage:
    """Return the message; ``ProtocolError`` for anything else."""
    return decode_struct(_decoder, data)


def decode_offer(data: bytes) -> NixlOffer:
    """Return the offer; ``ProtocolError`` for anything else."""
    return decode_struct(_offers, data)


def mismatch(ours: NixlOffer, theirs: NixlOffer) -> str:
    """Return why the two cannot work together, "" if they can.

    NIXL 1.4 and 1.5 understand each other. An agent of 1.3 or older crashes on newer metadata, so
    versions that are not known to fit are not tried.
    """
    if ours.agent == theirs.agent or (ours.owner and ours.owner == theirs.owner):
        return "both sides are the same worker: an engine that reads from itself"
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
