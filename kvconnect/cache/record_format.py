"""Names and format of stored blocks, independent of the engine.

Each engine has its own block hashes and its own byte layout. Engines that share stored blocks must
agree on two things:

- the name of a block: :func:`page_names`, a hash chain over its tokens.
- the meaning of its bytes: a :class:`RecordFormat`, whose fields are all in its fingerprint. The
  bytes are units of heads (``head_shards``). A row is a token's K, then its V, in any layout of the
  engine's kernels; :func:`parts` finds both in a page.

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

    A name identifies its page and all pages before it. It is the digest of the previous name and
    the page's token ids, as 32-bit little-endian numbers; SGLang uses the same rule. ``parent`` is
    the name of the page before ``tokens``. Not for prompts with inputs other than tokens (images).

    Raises:
        Misuse: a token id does not fit in 32 bits, or ``page_tokens`` is less than 1.
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
    """Format of blocks that all engines can read and write.

    The fields are everything, besides the tokens, that the bytes depend on. Blocks that depend on
    more (a cache other than plain K and V of full attention, scales, settings of one engine) need
    a format of that engine.

    Attributes:
        model: identifies the weights and their configuration.
        dtype: of the stored values, and of their computation.
        layers: numbers of the model's layers, in order.
        tokens: tokens per block.
        heads: KV heads of the model.
        unit: heads per unit.
        row: bytes of K and of V of one token, for one layer and head.
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
        """Name of the format, 16 bytes. ``records`` changes when the rules of this module do."""
        return fingerprint({"records": 1, **asdict(self)})


def fingerprint(fields: Mapping[str, object]) -> bytes:
    """Return the 16-byte name of a format of stored blocks. ``fields`` has everything but the
    tokens that the bytes depend on, as plain JSON."""
    text = json.dumps(fields, sort_keys=True)
    return blake2b(text.encode(), digest_size=16, person=_STORED).digest()


def parts(
    page: LayerPages, sizes: Sequence[int], in_planes: bool = False
) -> tuple[LayerPages, ...]:
    """Return one view per part of a layer's rows, for instance K and V.

    Args:
        sizes: of the parts, in order.
        in_planes: per head, a page has the first parts of all tokens, then their second parts, and
            so on. vLLM's vector kernels for the CPU transpose K: each value of K has its own plane,
            V has one plane.

    Raises:
        Misuse: the sizes do not add up to a row.
    """
    if min(sizes, default=0) < 1 or sum(sizes) != page.row_bytes:
        raise Misuse(f"rows of {page.row_bytes} bytes cut into {tuple(sizes)}")
    found = []
    for start, size in zip(accumulate(sizes[:-1], initial=0), sizes, strict=True):
        part = replace(page, offset=page.offset + start, row_bytes=size)
        if in_planes:  # each plane before this one holds all tokens of the page
            part = replace(part, offset=page.offset + start * page.tokens, token_stride=size)
        found.append(part)
    return tuple(found)
