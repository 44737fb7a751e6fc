"""The identity of a prompt: both sides of a hand-off must have the same before KV counts.

Prefill and decode each read the client's request. A chat template with today's date, another
tokenizer file or another adapter under one name make two prompts of it, and KV of one is garbage
for the other. So each read request carries decode's identity, and prefill compares it with its own.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

_DIGEST_BYTES = 16
_SHOWN = 8  # bytes of a digest in messages
_UNKNOWN = bytes(_DIGEST_BYTES)

_Digest = Annotated[bytes, Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]


class PromptIdentity(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt's KV depends on, except the model.

    Attributes:
        tokens: length of the whole prompt.
        ids: digest of its token ids.
        context: digest of its media, adapter and salt.
        media: digest of the hashes of media that are not part of the others; zeros if there are
            none, or if other servers make other hashes of the same media.
    """

    tokens: Annotated[int, Meta(ge=0, lt=1 << 40)]
    ids: _Digest
    context: _Digest
    media: _Digest = _UNKNOWN

    def __str__(self) -> str:
        ids, context, media = (
            digest[:_SHOWN].hex() for digest in (self.ids, self.context, self.media)
        )
        hashes = "" if self.media == _UNKNOWN else f", hashes of media {media}"
        return f"{self.tokens} tokens (ids {ids}, media, adapter and salt {context}{hashes})"


NO_PROMPT = PromptIdentity(0, bytes(_DIGEST_BYTES), bytes(_DIGEST_BYTES))
"""Identity of a transfer that belongs to no prompt; a real prompt never has it."""


def identify(ids: Iterable[int], context: object, media: bytes = b"") -> PromptIdentity:
    """Return the identity of a prompt. ``context``: all else that its KV depends on, in a form that
    has one JSON text. ``media``: what the others leave out; empty if it cannot be compared."""
    tokens = array("q", ids)
    text = json.dumps(context)  # in ASCII: a client's salt may hold half of a surrogate pair
    return PromptIdentity(
        len(tokens),
        ids=_digest(tokens.tobytes()),
        context=_digest(text.encode()),
        media=_digest(media) if media else _UNKNOWN,
    )


def difference(prefill: PromptIdentity, decode: PromptIdentity) -> str:
    """Return how two identities differ, with both values; "" if they are equal."""
    same_ids = (prefill.tokens, prefill.ids) == (decode.tokens, decode.ids)
    same_media = prefill.media == decode.media or _UNKNOWN in (prefill.media, decode.media)
    if same_ids and same_media and prefill.context == decode.context:
        return ""
    what = "media, adapter or salt" if same_ids else "token ids"
    return f"the prompts differ in their {what}: prefill has {prefill}, decode has {decode}"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]
