"""Names and format of stored blocks, independent of the engine.

An engine names its blocks with hashes of its own and lays their bytes out in its own way. For one
engine to use what another has stored, both must agree on two things:

- *which tokens* a block is about: :func:`page_names`, a hash chain over the tokens.
- *what its bytes mean*: a :class:`RecordFormat`, all of which is in the name of the format. The
  bytes themselves are units of heads (``head_shards``), whose rows are a token's K and then its V,
  whatever the engine's kernels keep side by side; :func:`parts` finds those in a page.

Arithmetic only. Sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b, sha256
from itertools import accumulate
from typing import TYPE_CHECKING

from kvconnect.errors import Misuse

if TYPE_CHECKING:
    from kvconnect.cache.pages import LayerPages

_STORED = b"kvconnect.store1"
_TOKEN = "I"  # four bytes; the platforms of the engines are little-endian


def page_names(tokens: Sequence[int], page_tokens: int, parent: bytes = b"") -> list[bytes]:
    """Return the name of every full page of ``page_tokens`` tokens: a SHA-256 chain.

    A name stands for its page and all before it: the digest of the name before it, and of the token
    ids, four bytes each, low first. So SGLang names its pages, and anybody can. ``parent`` is the
    name of the page that ends where ``tokens`` begin. Prompts that are not made of tokens alone
    (images) must not be named so.

    Raises:
        Misuse: a token id that does not fit in 32 bits, or no page at all.
    """
    if page_tokens < 1:
        raise Misuse(f"pages of {page_tokens} tokens")
    whole = len(tokens) // page_tokens * page_tokens
    try:
        words = array(_TOKEN, tokens[:whole]).tobytes()
    except (OverflowError, TypeError) as error:
        raise Misuse(f"token ids: {error}") from error
    names, step = [], page_tokens * array(_TOKEN).itemsize
    for start in range(0, len(words), step):
        parent = sha256(parent + words[start : start + step]).digest()
        names.append(parent)
    return names


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """What blocks depend on, beside their tokens, that all engines can read and write.

    Engines whose blocks depend on more (another cache than plain K and V of full attention, scales,
    settings that only they know) have formats of their own.

    Attributes:
        model: tells the weights and their configuration from all others.
        dtype: of the values, and in which they were computed.
        layers: numbers of the model's layers, in order.
        tokens: of a block.
        heads: KV heads of the model.
        unit: of them, how many a unit has.
        row: bytes of K and of V that a layer keeps of one token for one head.
    """

    model: str
    dtype: str
    layers: tuple[int, ...]
    tokens: int
    heads: int
    unit: int
    row: tuple[int, int]

    @property
    def fingerprint(self) -> bytes:
        """Name of the format. The number in it changes when the rules of this file do."""
        return fingerprint({"records": 1, **asdict(self)})


def fingerprint(fields: Mapping[str, object]) -> bytes:
    """Return the name of a format of stored blocks, given all that their bytes depend on beside
    the tokens. The fields must be plain JSON."""
    text = json.dumps(fields, sort_keys=True)
    return blake2b(text.encode(), digest_size=16, person=_STORED).digest()


def parts(
    page: LayerPages, sizes: Sequence[int], in_planes: bool = False
) -> tuple[LayerPages, ...]:
    """Return one view per part of a layer whose rows hold several, K and V for instance.

    Args:
        sizes: of the parts, in order.
        in_planes: a page has, head by head, all tokens' first parts, then all tokens' second ones,
            and so on. vLLM's vector kernels for the CPU keep each value of K in a plane of its
            own, and V in one: K is transposed.

    Raises:
        Misuse: the sizes do not add up to a row.
    """
    if min(sizes, default=0) < 1 or sum(sizes) != page.row_bytes:
        raise Misuse(f"rows of {page.row_bytes} bytes cut into {tuple(sizes)}")
    found = []
    for start, size in zip(accumulate(sizes[:-1], initial=0), sizes, strict=True):
        part = replace(page, offset=page.offset + start, row_bytes=size)
        if in_planes:  # the planes before this one hold all tokens
            part = replace(part, offset=page.offset + start * page.tokens, token_stride=size)
        found.append(part)
    return tuple(found)
