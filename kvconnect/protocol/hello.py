"""How two workers meet: the first message of both sides, and the one that says why it ends there.

Both sides send a hello as soon as a connection is authenticated; its opening has said for which
service it is. Each service has a hello of its own that adds what it compares:
:class:`~kvconnect.protocol.messages.HandoffHello`,
:class:`~kvconnect.protocol.cache_messages.CacheHello` and the doctor's.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvconnect.errors import ProtocolError
from kvconnect.protocol.codec import (
    MAX_MESSAGE,
    NO_CONTROLS,
    PROTOCOL,
    common_protocol,
    decode_struct,
)
from kvconnect.protocol.identity import Identity
from kvconnect.terminal import plain

MAX_TEXT = 2048
"""Characters of a reason; longer ones are cut, unprintable characters become ``?``."""

REFUSAL_FIELDS = frozenset(
    {
        *("auth", "protocol", "ticket", "params", "groups", "window", "chunk", "block_tokens"),
        *("page_tokens", "splittable", "kv_heads", "heads", "row_bytes", "layers", "format"),
        *("model", "architecture", "dtype", "cache_dtype", "packing", "tokens_ahead", "other"),
        *("transport", "rate", "prompt", "weights", "tls", "address"),
        *("compute_dtype", "quantization"),
    }
)
"""Every ``field`` of a :class:`Refused` between engines, and every cause of a connection that was
rejected: the label values of ``handoff_refused``."""

_M = TypeVar("_M")
_Version = Annotated[int, Meta(ge=1, le=0xFFFF)]
_Word = Annotated[str, Meta(max_length=64, pattern=NO_CONTROLS)]


class Hello(msgspec.Struct, kw_only=True, tag="hello"):
    """Who a worker is; the first message, both ways.

    Attributes:
        protocol: first and last version of the wire protocol spoken.
        identity: which weights the worker computes with; nothing is known of those of the doctor.
    """

    protocol: tuple[_Version, _Version] = PROTOCOL
    identity: Identity = Identity()


class Reject(msgspec.Struct, tag="reject"):
    """No agreement: the sender closes the connection next. ``message`` names both values.

    An unknown ``field`` reads as "other".
    """

    field: _Word
    message: str

    def __post_init__(self) -> None:
        if self.field not in REFUSAL_FIELDS:
            self.field = "other"
        self.message = clean(self.message)


def clean(text: str) -> str:
    """Return a peer's text as logs may show it."""
    return plain(text[:MAX_TEXT])


class _AnyHello(msgspec.Struct, tag="hello"):
    """What all versions of a hello have had."""

    protocol: tuple[_Version, _Version]


_ANY_HELLO: msgspec.msgpack.Decoder[_AnyHello] = msgspec.msgpack.Decoder(_AnyHello)


def decode_message(decoder: msgspec.msgpack.Decoder[_M], data: bytes) -> _M:
    """Return the message that the bytes hold.

    Raises:
        ProtocolError: they hold none, or one with a value out of range.
        Refused: field ``protocol``, they are a hello of a version that is not read here.
    """
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
    try:
        return decode_struct(decoder, data)
    except ProtocolError:
        _check_version(data)
        raise


def _check_version(data: bytes) -> None:
    """Refuse a hello of another version, whatever else is in it."""
    try:
        hello = decode_struct(_ANY_HELLO, data)
    except ProtocolError:
        return
    common_protocol(PROTOCOL, hello.protocol)
