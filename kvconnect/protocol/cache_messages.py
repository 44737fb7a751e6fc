"""Messages between engines that read blocks from one another's host memory, in msgpack.

The *reader* connects, the *source* listens. Both send a :class:`CacheHello` first. A reader asks
all its sources at once, and reads from those that answered::

    reader                                     source
      Ask(ask=1, keys) ---------------------> |
      | <------------------- Found(ask=1, found)
      Fetch(read_id=2, units, keys) --------> |   sends pages on the data connections
      | <-------------- Sent(read_id=2, outcomes)   they are handed to the network
      Cancel(read_id=2) --------------------> |   the reader does not wait any longer

A source on the same machine answers the hello with :class:`HostTierAddresses`. Its answers have the
places of blocks then, which the reader copies itself (:mod:`kvconnect.tiers.peers.same_machine`)::

      CacheHello(nonce) --------------------> |
      | <------------------ HostTierAddresses
      Ask(ask=1, keys) ---------------------> |
      | <----------- Found(ask=1, found, places)

Ids are the reader's. Unknown fields are ignored.
:func:`decode` rejects a field that is out of range. Addresses and slots are only those of the
source's own memory, which nobody writes by them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnect.errors import ProtocolError
from kvconnect.protocol.hello import Hello, Reject, decode_message
from kvconnect.protocol.reads import Cancel, ReadId

MAX_ASKED = 4096
"""Keys of one :class:`Ask`."""
MAX_FETCHED = 1024
"""Keys of one :class:`Fetch`."""

WHOLE = (1 << 16) - 1
"""Number of the unit that is a whole block as its slot has it. Only workers with the same
``CacheHello.layout`` may ask for it."""

_Key = Annotated[bytes, Meta(min_length=18, max_length=81)]  # as kvconnect.cache.keys makes them
_Unit = Annotated[int, Meta(ge=0, lt=1 << 16)]
_Fingerprint = Annotated[bytes, Meta(min_length=1, max_length=64)]
_Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
_Group = Annotated[int, Meta(ge=0, lt=64)]
_Pages = Annotated[int, Meta(ge=1, le=1 << 16)]
_Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Slot = Annotated[int, Meta(ge=0, lt=1 << 32)]
_U64 = Annotated[int, Meta(ge=0)]  # whose upper limit is that of the format
NONCE_BYTES = 16
_Units = Annotated[dict[_Unit, _Bytes], Meta(min_length=1, max_length=1024)]


class FetchOutcome(IntEnum):
    """What became of one block of a :class:`Fetch`."""

    ABSENT = 0  # nothing was sent
    SENT = 1
    OVERWRITTEN = 2  # it was sent, but its memory changed meanwhile: do not use it
    BUSY = 3  # nothing was sent: the source sends as much as it may


class CacheHello(Hello, kw_only=True):
    """Who a worker is, and which blocks it keeps; the first message, both ways.

    Attributes:
        engine: random bytes of the process, by which a worker knows itself.
        format: fingerprint of the units' bytes; only workers with the same one share blocks.
        layout: fingerprint of a whole block's bytes in a slot.
        groups: per KV-cache group, the units of a page that this worker has, with their bytes.
        pages: of a block, per group: pages are what is asked for. Empty: each block is one page.
        nonce: of a reader that can read the memory of a source on its machine; else empty.
    """

    engine: Annotated[bytes, Meta(min_length=16, max_length=16)]
    format: _Fingerprint
    layout: _Fingerprint
    groups: Annotated[list[_Units], Meta(min_length=1, max_length=64)]
    pages: Annotated[list[_Pages], Meta(max_length=64)] = msgspec.field(default_factory=list)
    nonce: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""


class HostTierAddresses(msgspec.Struct, tag="addresses"):
    """Source: where this process has its host tier, for a reader on the same machine.

    Attributes:
        nonce: address of the nonce of this connection's reader.
        slots: address of slot 0; slot n is n times ``slot_bytes`` behind it.
        versions: address of the slots' versions, of 8 bytes each.
    """

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    nonce: _Address
    slots: _Address
    slot_bytes: Annotated[int, Meta(ge=1, lt=1 << 30)]
    versions: _Address


class Place(msgspec.Struct, array_like=True, frozen=True):
    """In which slot a block is, the slot's version, and the block's digest if it has one."""

    slot: _Slot
    version: _U64
    digest: _U64 | None


class Ask(msgspec.Struct, tag="ask"):
    """Reader: which of these blocks are there?"""

    ask: ReadId
    keys: Annotated[list[_Key], Meta(min_length=1, max_length=MAX_ASKED)]


class Found(msgspec.Struct, tag="found"):
    """Source: ``found[i]`` is 1 if ``keys[i]`` is there, else 0. ``places``: of those that are
    there, in order, if the reader was told of this source's memory; else empty."""

    ask: ReadId
    found: Annotated[bytes, Meta(max_length=MAX_ASKED)]
    places: Annotated[list[Place], Meta(max_length=MAX_ASKED)] = []


class Fetch(msgspec.Struct, tag="fetch"):
    """Reader: send these units of these blocks of one group. Wire block i is ``keys[i]``."""

    read_id: ReadId
    group: _Group
    units: Annotated[list[_Unit], Meta(min_length=1, max_length=1024)]
    keys: Annotated[list[_Key], Meta(min_length=1, max_length=MAX_FETCHED)]


class Sent(msgspec.Struct, tag="sent"):
    """Source: nothing more is sent for a fetch. ``outcomes[i]`` is a :class:`FetchOutcome`."""

    read_id: ReadId
    outcomes: Annotated[bytes, Meta(max_length=MAX_FETCHED)]


CacheMessage = CacheHello | Reject | HostTierAddresses | Ask | Found | Fetch | Sent | Cancel

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[CacheMessage] = msgspec.msgpack.Decoder(CacheMessage)


def encode(message: CacheMessage) -> bytes:
    """Return a message's bytes."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> CacheMessage:
    """Return the message that the bytes hold; raises as :func:`decode_message`."""
    message = decode_message(_DECODER, data)
    if isinstance(message, Fetch):
        for what, named in (("unit", message.units), ("block", message.keys)):
            if len(set(named)) < len(named):
                raise ProtocolError(f"fetch {message.read_id} names a {what} twice")
    return message
