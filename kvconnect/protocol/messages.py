"""Messages between two workers, in msgpack.

The *reader* (decode side) connects, the *source* (prefill side) listens. Both send a
:class:`HandoffHello` first. When they agree (``negotiation.py``), the reader requests pages::

    reader                                     source
      ReadRequest(read_id=1, transfer, prompt, |   compares the prompt with its own; sends pages
                  parts) --------------------> |   on the data connections as they
      | <---------- Alive(read_ids=[1])        |   are computed; tells now and then that it does
      | <---------- PagesReady(read_id=1)      |   all pages are computed
      ReadDone(read_id=1) -------------------> |   all pages have arrived, or
      Cancel(read_id=1) ---------------------> |   the reader needs them no more, or
      | <---------- Fail(read_id=1, cause)     |   the source cannot send them

Unknown fields are ignored, so that a later version may add some. :func:`decode` rejects a field
that is out of range. No message contains an address, a block id or a path.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvconnect.errors import ProtocolError
from kvconnect.protocol.codec import NO_CONTROLS
from kvconnect.protocol.hello import Hello, Reject, clean, decode_message
from kvconnect.protocol.prompts import PromptIdentity
from kvconnect.protocol.reads import LAST_READ_ID, PROBE_READ_ID, Cancel, ReadId
from kvconnect.types import Rank

_INT64_MAX = (1 << 63) - 1

Transfer = Annotated[bytes, Meta(min_length=16, max_length=16)]
Order = Literal["HNC", "NHC"]

_Name = Annotated[str, Meta(max_length=256, pattern=NO_CONTROLS)]
_Word = Annotated[str, Meta(max_length=64, pattern=NO_CONTROLS)]
_Tokens = Annotated[int, Meta(ge=1, le=1 << 30)]
_Heads = Annotated[int, Meta(ge=1, le=1024)]
_Bytes = Annotated[int, Meta(ge=1, le=1 << 30)]
_Group = Annotated[int, Meta(ge=0, lt=64)]
_Block = Annotated[int, Meta(ge=0, lt=1 << 40)]
_Blocks = Annotated[int, Meta(ge=1, lt=1 << 24)]
_FormatValue = Annotated[str, Meta(max_length=1024)] | Annotated[int, Meta(ge=0, le=_INT64_MAX)]

_MOST_WORKERS = 1024  # of one engine


class GroupHello(msgspec.Struct, kw_only=True):
    """One KV-cache group on one worker.

    Attributes:
        block_tokens: tokens per block of the engine's block table.
        page_tokens: tokens per physical page; divides ``block_tokens``.
        window, chunk: how far back attention reaches, in tokens; None means all the way.
        layers: names of the layers of this group that this worker (pipeline stage) has.
        kv_heads: of the model, over all ranks; 1 for MLA.
        heads: on this worker.
        row_bytes: bytes of one token of one head of one layer, or of one layer's whole block if it
            is moved as one row; the most where layers differ.
        layer_row_bytes: the same for each of ``layers``, where layers differ; else empty.
        order: of a page's dims in memory: heads outside tokens, or tokens outside heads.
        splittable: a page may be cut between tokens.
    """

    block_tokens: _Tokens
    page_tokens: _Tokens
    window: _Tokens | None = None
    chunk: _Tokens | None = None
    layers: Annotated[list[_Name], Meta(max_length=4096)]
    kv_heads: _Heads
    heads: _Heads
    row_bytes: _Bytes
    layer_row_bytes: Annotated[list[_Bytes], Meta(max_length=4096)] = []
    order: Order
    splittable: bool


class HandoffHello(Hello, kw_only=True):
    """Who a worker is and how its KV cache is laid out; the first message, both ways.

    Attributes:
        features: optional parts of the protocol known here; those both sides know are used.
        software: for logs only, never compared.
        engine_id, epoch: the engine, and which incarnation of it.
        rank: the worker's place in its engine.
        format: what must be equal on both sides for the bytes to mean the same, by name.
        groups: per KV-cache group, in the engine's order.
    """

    features: Annotated[list[_Word], Meta(max_length=64)] = msgspec.field(default_factory=list)
    software: _Word
    engine_id: _Name
    epoch: Annotated[int, Meta(ge=0, le=_INT64_MAX)]
    rank: Rank
    format: Annotated[dict[_Word, _FormatValue], Meta(max_length=64)]
    groups: Annotated[list[GroupHello], Meta(min_length=1, max_length=64)]


class ReadRequest(msgspec.Struct, tag="read"):
    """Reader: send pages of a transfer.

    ``parts``: (group, first wire block, count), groups ascending. ``early``: the source may not
    know the transfer yet (push). ``prompt``: the reader's, which must be the source's. ``held``:
    tokens of it whose KV the reader has.
    """

    read_id: ReadId
    transfer: Transfer
    early: bool
    parts: Annotated[list[tuple[_Group, _Block, _Blocks]], Meta(min_length=1, max_length=1024)]
    prompt: PromptIdentity
    held: Annotated[int, Meta(ge=0, lt=1 << 40)] = 0


class ReadDone(msgspec.Struct, tag="done"):
    """Reader: all pages have arrived; the source may release them."""

    read_id: ReadId


class Fail(msgspec.Struct, tag="fail"):
    """Source: this read has failed. ``cause`` is a ``FailureCause``'s value."""

    read_id: ReadId
    cause: _Word
    detail: str

    def __post_init__(self) -> None:
        self.detail = clean(self.detail)


class Alive(msgspec.Struct, tag="alive"):
    """Source: these reads are alive; their pages are still being computed."""

    read_ids: Annotated[list[ReadId], Meta(max_length=1 << 16)]


class PagesReady(msgspec.Struct, tag="ready"):
    """Source: all pages are computed; only the transfer remains. ``cached``: how many of the
    prompt's tokens the source's engine did not compute, because it had them."""

    read_id: ReadId
    cached: Annotated[int, Meta(ge=0, lt=1 << 40)] = 0


class Renew(msgspec.Struct, tag="renew"):
    """Reader: these transfers will still be read; extend their leases."""

    transfers: Annotated[list[Transfer], Meta(max_length=4096)]


class Decline(msgspec.Struct, tag="decline"):
    """Reader: this transfer will never be read."""

    transfer: Transfer


class Probe(msgspec.Struct, tag="probe"):
    """Reader: send the pages of a bandwidth probe, with this read id."""

    read_id: Annotated[int, Meta(ge=PROBE_READ_ID, le=LAST_READ_ID)]


Message = (
    HandoffHello
    | Reject
    | ReadRequest
    | Cancel
    | ReadDone
    | Fail
    | Alive
    | PagesReady
    | Renew
    | Decline
    | Probe
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return a message's bytes."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Return the message that the bytes hold; raises as :func:`decode_message`."""
    message = decode_message(_DECODER, data)
    if isinstance(message, HandoffHello):
        _check_hello(message)
    return message


def _check_hello(hello: HandoffHello) -> None:
    """Check what concerns more than one field."""
    tp_rank, tp, pp_rank, pp = hello.rank
    # Of the product: who reads from whom is worked out for every worker of the other engine.
    if not (0 <= tp_rank < tp and 0 <= pp_rank < pp and tp * pp <= _MOST_WORKERS):
        raise ProtocolError(f"there is no {hello.rank}")
    if hello.protocol[0] > hello.protocol[1]:
        raise ProtocolError(f"protocol range {hello.protocol} runs backwards")
    for number, group in enumerate(hello.groups):
        if group.block_tokens % group.page_tokens:
            raise ProtocolError(
                f"group {number}: blocks of {group.block_tokens} tokens in pages of "
                f"{group.page_tokens}"
            )
        if group.heads > group.kv_heads:
            raise ProtocolError(f"group {number}: {group.heads} of {group.kv_heads} heads")
        if len(set(group.layers)) != len(group.layers):
            raise ProtocolError(f"group {number} names a layer twice")
