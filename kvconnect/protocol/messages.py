"""Messages between two workers, in msgpack.

The *reader* (decode side) connects, the *source* (prefill side) listens. Both send a
:class:`Hello` first. When they agree (``negotiation.py``), the reader requests pages::

    reader                                     source
      ReadRequest(want=1, transfer, prompt, --> |   compares the prompt with its own; sends pages
                  parts)                        |   on the data connections as they
      | <------------- Alive(wants=[1])         |   are computed; tells now and then that it does
      | <------------- PagesReady(want=1)       |   all pages are computed
      ReadDone(want=1) -----------------------> |   all pages have arrived, or
      Cancel(want=1) -------------------------> |   the reader needs them no more, or
      | <------------- Fail(want=1, cause)      |   the source cannot send them

A read's id is ``want``; the reader chooses it. Unknown fields are ignored, so that a later version
may add some. :func:`decode` rejects a field that is out of range. No message contains an address, a
block id or a path.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvconnect.errors import ProtocolError
from kvconnect.protocol.codec import MAX_MESSAGE, NO_CONTROLS, PROTOCOL, decode_struct
from kvconnect.protocol.identity import Identity
from kvconnect.protocol.prompts import PromptIdentity
from kvconnect.terminal import plain
from kvconnect.types import Rank

MAX_TEXT = 2048
"""Characters of a reason; longer ones are cut, unprintable characters become ``?``."""

REFUSAL_FIELDS = frozenset(
    {
        *("auth", "protocol", "ticket", "params", "groups", "window", "chunk", "block_tokens"),
        *("page_tokens", "splittable", "kv_heads", "heads", "row_bytes", "layers", "format"),
        *("model", "architecture", "dtype", "cache_dtype", "packing", "tokens_ahead", "other"),
        *("transport", "rate", "prompt", "weights", "tls", "address"),
    }
)
"""Every ``field`` of a :class:`Refused` between engines, and every cause of a connection that was
rejected: the label values of ``handoff_refused``."""

_INT64_MAX = (1 << 63) - 1

LAST_READ_ID = _INT64_MAX
PROBE_READ_ID = _INT64_MAX - 15
"""Read id of the first probe; the ids from here to ``LAST_READ_ID`` are for probes alone."""

Transfer = Annotated[bytes, Meta(min_length=16, max_length=16)]
ReadId = Annotated[int, Meta(ge=0, lt=PROBE_READ_ID)]
Order = Literal["HNC", "NHC"]

_Name = Annotated[str, Meta(max_length=256, pattern=NO_CONTROLS)]
_Word = Annotated[str, Meta(max_length=64, pattern=NO_CONTROLS)]
_Version = Annotated[int, Meta(ge=1, le=0xFFFF)]
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


class Hello(msgspec.Struct, kw_only=True, tag="hello"):
    """Who a worker is and how its KV cache is laid out; the first message, both ways.

    Attributes:
        protocol: first and last version of the wire protocol spoken.
        features: optional parts of the protocol known here; those both sides know are used.
        software: for logs only, never compared.
        engine_id, epoch: the engine, and which incarnation of it.
        rank: the worker's place in its engine.
        identity: which weights the worker computes with. Older versions do not send it.
        format: what must be equal on both sides for the bytes to mean the same, by name.
        groups: per KV-cache group, in the engine's order.
    """

    protocol: tuple[_Version, _Version] = PROTOCOL
    features: Annotated[list[_Word], Meta(max_length=64)] = []
    software: _Word
    engine_id: _Name
    epoch: Annotated[int, Meta(ge=0, le=_INT64_MAX)]
    rank: Rank
    identity: Identity = Identity()
    format: Annotated[dict[_Word, _FormatValue], Meta(max_length=64)]
    groups: Annotated[list[GroupHello], Meta(min_length=1, max_length=64)]


def _clean(text: str) -> str:
    return plain(text[:MAX_TEXT])


class Reject(msgspec.Struct, tag="turned"):
    """No agreement: the sender closes the connection next. ``message`` names both values.

    An unknown ``field`` reads as "other".
    """

    field: _Word
    message: str

    def __post_init__(self) -> None:
        if self.field not in REFUSAL_FIELDS:
            self.field = "other"
        self.message = _clean(self.message)


class ReadRequest(msgspec.Struct, tag="want"):
    """Reader: send pages of a transfer.

    ``parts``: (group, first wire block, count), groups ascending. ``early``: the source may not
    know the transfer yet (push). ``prompt``: the reader's, which must be the source's. ``held``:
    tokens of it whose KV the reader has.
    """

    want: ReadId
    transfer: Transfer
    early: bool
    parts: Annotated[list[tuple[_Group, _Block, _Blocks]], Meta(min_length=1, max_length=1024)]
    prompt: PromptIdentity
    held: Annotated[int, Meta(ge=0, lt=1 << 40)] = 0


class Cancel(msgspec.Struct, tag="cancel"):
    """Reader: send nothing more for this read."""

    want: ReadId


class ReadDone(msgspec.Struct, tag="done"):
    """Reader: all pages have arrived; the source may release them."""

    want: ReadId


class Fail(msgspec.Struct, tag="fail"):
    """Source: this read has failed. ``cause`` is a ``FailureCause``'s value."""

    want: ReadId
    cause: _Word
    detail: str

    def __post_init__(self) -> None:
        self.detail = _clean(self.detail)


class Alive(msgspec.Struct, tag="alive"):
    """Source: these reads are alive; their pages are still being computed."""

    wants: Annotated[list[ReadId], Meta(max_length=1 << 16)]


class PagesReady(msgspec.Struct, tag="ready"):
    """Source: all pages are computed; only the transfer remains. ``cached``: how many of the
    prompt's tokens the source's engine did not compute, because it had them."""

    want: ReadId
    cached: Annotated[int, Meta(ge=0, lt=1 << 40)] = 0


class Renew(msgspec.Struct, tag="renew"):
    """Reader: these transfers will still be read; extend their leases."""

    transfers: Annotated[list[Transfer], Meta(max_length=4096)]


class Decline(msgspec.Struct, tag="decline"):
    """Reader: this transfer will never be read."""

    transfer: Transfer


class Probe(msgspec.Struct, tag="probe"):
    """Reader: send the pages of a bandwidth probe, with this read id."""

    want: Annotated[int, Meta(ge=PROBE_READ_ID, le=_INT64_MAX)]


Message = (
    Hello
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
    """Return the message that the bytes hold.

    Raises:
        ProtocolError: they hold none, or one with a value out of range. Nothing else.
    """
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
    message = decode_struct(_DECODER, data)
    if isinstance(message, Hello):
        _check_hello(message)
    return message


def _check_hello(hello: Hello) -> None:
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
