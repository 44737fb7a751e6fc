"""What a block of KV cache is, in words that belong to no engine.

An engine names its blocks with hashes of its own and lays their bytes out in its own way. For one
engine to use what another has stored, both must agree on two things, and both are here:

- *which tokens* a block is about: :func:`chain` names every ``CHAIN_TOKENS`` tokens together with
  all that came before. Blocks and pages of any size that is a multiple of that find one another.
- *what its bytes mean*: a :class:`PageFormat`, and :func:`obstacle`, which says in words why two
  of them cannot be converted.

The conversion is ``pages.unit_segments``: both sides cut their pages into wire blocks with the same
heads, tokens and ``CANONICAL_ORDER``, so bytes gathered here can be scattered there. Kernels differ
in what they keep of a token side by side; :func:`parts` cuts rows so that the same parts follow one
another on both sides.

Arithmetic only. Sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from struct import error as PackError
from struct import pack
from typing import TYPE_CHECKING

from kvconnect.errors import Misuse

if TYPE_CHECKING:
    from kvconnect.pages import LayerPages, Order

CHAIN_TOKENS = 16
"""Tokens per key: what the usual block sizes have in common."""

CANONICAL_ORDER: Order = "HNC"
"""Of heads and tokens in bytes meant for any engine: whoever has fewer heads finds its own in one
piece."""

ROWS = "rows"
"""The packing of a page in which all parts of a token (of one head) lie side by side, or apart but
each in a layer of its own. So do GPU kernels of vLLM (K and V in one row) and SGLang (in two)."""

PLANES = "planes"
"""The packing of a page that has, head by head, all tokens' first parts, then all tokens' second
ones, and so on. vLLM's vector kernels for the CPU keep each value of K in a plane of its own, and V
in one: K is transposed."""

# The version is in what is hashed, so keys of two versions never meet.
_ROOT, _LINK = b"kvconnect.root.1", b"kvconnect.link.1"
_STORED = b"kvconnect.store1"
_KEY_BYTES = 32


def root(model: str, dtype: str, adapter: str = "", salt: str = "") -> bytes:
    """Return the key of the empty prefix: all that KV depends on beside the tokens.

    Args:
        model: names the weights and their configuration; equal for equal ones only.
        dtype: in which K and V are kept.
        adapter: names the LoRA adapter, "" for none.
        salt: the request's own, "" for none; who does not know it finds nothing.
    """
    text = json.dumps([CHAIN_TOKENS, model, dtype, adapter, salt])
    return blake2b(text.encode(), digest_size=_KEY_BYTES, person=_ROOT).digest()


def chain(tokens: Sequence[int], parent: bytes) -> list[bytes]:
    """Return the key of every full ``CHAIN_TOKENS`` tokens; each names all tokens up to its end.

    ``parent`` is the key of what lies before ``tokens``: :func:`root`'s, or the last one that an
    earlier call returned. Prompts that are not made of tokens alone (images) must not be named so.

    Raises:
        Misuse: a token id that does not fit in 32 bits, or a parent that is no key.
    """
    if len(parent) != _KEY_BYTES:
        raise Misuse(f"a parent key of {len(parent)} bytes, expected {_KEY_BYTES}")
    keys = []
    for start in range(0, len(tokens) - CHAIN_TOKENS + 1, CHAIN_TOKENS):
        try:
            words = pack(f"<{CHAIN_TOKENS}I", *tokens[start : start + CHAIN_TOKENS])
        except PackError as error:
            raise Misuse(f"token ids from {start} on: {error}") from error
        parent = blake2b(parent + words, digest_size=_KEY_BYTES, person=_LINK).digest()
        keys.append(parent)
    return keys


def page_keys(keys: Sequence[bytes], page_tokens: int) -> list[bytes]:
    """Return the key of every full page, given those that :func:`chain` made from the start.

    Raises:
        Misuse: pages that end between two keys.
    """
    if page_tokens < 1 or page_tokens % CHAIN_TOKENS:
        raise Misuse(f"pages of {page_tokens} tokens: not a multiple of {CHAIN_TOKENS}")
    step = page_tokens // CHAIN_TOKENS
    return list(keys[step - 1 :: step])


def fingerprint(fields: Mapping[str, object]) -> bytes:
    """Return the name of a format of stored blocks, given all that their bytes depend on beside
    the tokens. The fields must be plain JSON."""
    text = json.dumps(fields, sort_keys=True)
    return blake2b(text.encode(), digest_size=16, person=_STORED).digest()


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What one worker's pages hold.

    Attributes:
        model: names the weights and their configuration, as in :func:`root`.
        dtype: of the values; with a scale, also whose: two fp8 caches with scales of their own
            are not alike.
        parts: bytes that a layer keeps of one token for one head, part by part: (K, V), or
            (latent,) with MLA; of a page in planes, one per plane.
        layers: (first, end) of the model's layers.
        heads: (first, end) of the model's KV heads; (0, 1) with MLA.
        tokens: of one page.
        packing: ``ROWS``, ``PLANES``, or a kernel's name for an arrangement of its own, which only
            that kernel reads, and only whole pages of it.
    """

    model: str
    dtype: str
    parts: tuple[int, ...]
    layers: tuple[int, int]
    heads: tuple[int, int]
    tokens: int
    packing: str = ROWS


def obstacle(ours: PageFormat, theirs: PageFormat) -> str:
    """Return why pages of ``theirs`` cannot be turned into ``ours``, "" if they can.

    Block sizes of which one divides the other, other heads per rank, another order of heads and
    tokens, K and V side by side or apart, and planes can all be converted.
    """
    for name in ("model", "dtype", "layers"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name} is {mine!r} here and {other!r} there"
    if max(ours.heads[0], theirs.heads[0]) >= min(ours.heads[1], theirs.heads[1]):
        return f"heads {ours.heads} here and {theirs.heads} there have none in common"
    if max(ours.tokens, theirs.tokens) % min(ours.tokens, theirs.tokens):
        return f"pages of {ours.tokens} tokens here and {theirs.tokens} there: neither divides"
    return _packed_apart(ours, theirs) or _parted(ours, theirs)


def _packed_apart(ours: PageFormat, theirs: PageFormat) -> str:
    """What a kernel packs in a way of its own is of use as a whole, and to that kernel only."""
    packings = {ours.packing, theirs.packing}
    if packings <= {ROWS, PLANES}:
        return ""
    if len(packings) > 1:
        return f"packing is {ours.packing!r} here and {theirs.packing!r} there"
    mine, other = (ours.heads, ours.tokens), (theirs.heads, theirs.tokens)
    if mine != other:
        return f"{ours.packing!r} packs pages as a whole: (heads, tokens) are {mine} and {other}"
    return ""


def _parted(ours: PageFormat, theirs: PageFormat) -> str:
    """Rows can be cut where the other side's planes end, if no part of theirs is cut in two."""
    fine, coarse = (theirs, ours) if theirs.packing == PLANES else (ours, theirs)
    fits = fine.parts == coarse.parts
    if fine.packing != coarse.packing:
        cuts = set(accumulate(coarse.parts))
        fits = sum(fine.parts) == sum(coarse.parts) and cuts <= set(accumulate(fine.parts))
    return "" if fits else f"parts are {ours.parts} here and {theirs.parts} there"


def common_parts(ours: PageFormat, theirs: PageFormat) -> tuple[int, ...]:
    """Return the parts into which both sides cut a row, if there is no :func:`obstacle`."""
    return theirs.parts if theirs.packing == PLANES else ours.parts


def parts(page: LayerPages, sizes: Sequence[int], packing: str = ROWS) -> tuple[LayerPages, ...]:
    """Return one view per part of a layer whose rows hold several, K and V for instance.

    ``sizes`` are what :func:`common_parts` says. With ``PLANES`` they are the page's planes.

    Raises:
        Misuse: the sizes do not add up to a row.
    """
    if min(sizes, default=0) < 1 or sum(sizes) != page.row_bytes:
        raise Misuse(f"rows of {page.row_bytes} bytes cut into {tuple(sizes)}")
    found, start = [], 0
    for size in sizes:
        part = replace(page, offset=page.offset + start, row_bytes=size)
        if packing == PLANES:  # the planes before this one hold all tokens
            part = replace(part, offset=page.offset + start * page.tokens, token_stride=size)
        found.append(part)
        start += size
    return tuple(found)
