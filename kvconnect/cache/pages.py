"""Heads, tokens and rows inside a page, for the exchange of blocks between different caches.

A hand-off may go to a cache with other strides, another block size or other heads per rank. So it
cuts blocks into *wire blocks*: some tokens of a range of heads, in an order both sides agreed on.
A *row* is one layer's opaque bytes (K and V) of one token for one head::

    page of 4 tokens, 2 heads, order NHC      |t0h0|t0h1|t1h0|t1h1|t2h0|t2h1|t3h0|t3h1|
    wire block of 2 tokens, head 1, phase 1                                 ^^^^      ^^^^

A *page* is a block of the attention kernel. A block of the engine is a whole number of pages.
Arithmetic only. All sizes and offsets are bytes unless a name says otherwise.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from kvconnect.errors import Incompatible, Misuse

Order = Literal["HNC", "NHC"]
"""Whether heads (H) or tokens (N) are the outer dim of a wire block; C is a row."""

View = tuple[Sequence[int], Sequence[int], int]
"""Shape, strides (elements) and element size, as torch gives them."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Pages of one layer. The row of page ``p``, head ``h``, token ``t`` is
    ``[offset + p * page_stride + h * head_stride + t * token_stride, + row_bytes)``.

    ``offset`` counts from the start of the backing area. ``heads`` is the number of this rank's
    heads, ``tokens`` the number of tokens per page.
    """

    name: str
    offset: int
    page_stride: int
    head_stride: int
    token_stride: int
    heads: int
    tokens: int
    row_bytes: int


def layer_pages(
    name: str, offset: int, view: View, num_blocks: int, block_tokens: int
) -> LayerPages:
    """Return the pages of one layer's KV view, which starts at ``offset`` in the backing area.

    The view is [B, H, N, C], or [B, N, C] where all heads share one row (MLA). B, H and N may be in
    any order in memory; C must be contiguous. B is ``num_blocks`` times the pages per block, N is
    ``block_tokens`` divided by the pages per block.

    Raises:
        Incompatible: the view does not match. The message has the layer, shape and strides.
    """
    shape, strides, itemsize = view
    if len(shape) == 3 == len(strides):
        shape, strides = (shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:])
    why = _unusable(shape, strides, num_blocks, block_tokens)
    if why:
        raise Incompatible(
            f"layer {name}: pages cannot be told apart, {why} (shape={tuple(view[0])}, "
            f"strides={tuple(view[1])}, num_blocks={num_blocks}, block_tokens={block_tokens})"
        )
    _, heads, tokens, width = shape
    row_bytes = width * itemsize
    # torch gives a dim of size 1 any stride; use the stride of a dense page.
    token_stride = strides[2] * itemsize if tokens > 1 else row_bytes
    head_stride = strides[1] * itemsize if heads > 1 else tokens * token_stride
    page_stride = strides[0] * itemsize
    return LayerPages(
        name, offset, page_stride, head_stride, token_stride, heads, tokens, row_bytes
    )


def _unusable(
    shape: Sequence[int], strides: Sequence[int], num_blocks: int, block_tokens: int
) -> str:
    """Return why a view [B, H, N, C] cannot be used; "" if it can."""
    if len(shape) != 4 or len(strides) != 4 or min(shape) < 1:
        return "it is neither [B, H, N, C] nor [B, N, C]"
    if num_blocks < 1 or shape[0] % num_blocks or shape[0] // num_blocks * shape[2] != block_tokens:
        return "B and N are not those of the blocks"
    if shape[3] > 1 and strides[3] != 1:
        return "C is not contiguous"
    span = shape[3]
    for stride, size in sorted(zip(strides[:3], shape[:3], strict=True)):
        if size > 1:
            if stride < span:
                return "its dims overlap"
            span += (size - 1) * stride
    return ""


def unit_segments(
    layers: Sequence[LayerPages], heads: tuple[int, int], wire_tokens: int, order: Order
) -> tuple[array[int], int, int]:
    """Return (segments, phases, block_bytes) of the wire blocks of some layers.

    Wire block ``w`` is part ``w % phases`` of page ``w // phases``. ``segments`` holds triples
    (offset, stride per page, length), the same number for each phase. The triples of a phase are
    its byte runs in wire order: by layer as given, then in ``order``. Adjacent runs are merged.
    ``heads`` is the range [first, end) of this rank's heads.

    Raises:
        Misuse: no layers, heads that do not exist, or pages that ``wire_tokens`` does not divide.
    """
    tokens = {layer.tokens for layer in layers}
    first, end = heads
    if len(tokens) != 1 or wire_tokens < 1 or min(tokens) % wire_tokens:
        raise Misuse(f"wire blocks of {wire_tokens} tokens in pages of {sorted(tokens)}")
    if not 0 <= first < end <= min(layer.heads for layer in layers):
        raise Misuse(f"heads {first} to {end} of {[layer.heads for layer in layers]}")
    phases = min(tokens) // wire_tokens
    segments = array("q")
    for phase in range(phases):
        runs = [run for layer in layers for run in _runs(layer, heads, (phase, wire_tokens), order)]
        # Runs of two layers can be adjacent only if they are whole pages.
        for run in _merged(runs) if phases == 1 else runs:
            segments.extend(run)
    block_bytes = (end - first) * wire_tokens * sum(layer.row_bytes for layer in layers)
    return segments, phases, block_bytes


_Run = tuple[int, int, int]
"""Offset, stride per page, length."""


def _runs(
    layer: LayerPages, heads: tuple[int, int], part: tuple[int, int], order: Order
) -> Iterator[_Run]:
    """Yield byte runs in wire order; ``part`` is the part's number in the page and its tokens."""
    number, tokens = part
    start = layer.offset + heads[0] * layer.head_stride + number * tokens * layer.token_stride
    dims = [(layer.head_stride, heads[1] - heads[0]), (layer.token_stride, tokens)]
    if order == "NHC":
        dims.reverse()
    length = layer.row_bytes
    while dims and (dims[-1][1] == 1 or dims[-1][0] == length):
        length *= dims.pop()[1]
    for step in product(*([i * stride for i in range(size)] for stride, size in dims)):
        yield start + sum(step), layer.page_stride, length


def _merged(runs: Iterable[_Run]) -> list[_Run]:
    """Merge adjacent runs with equal strides."""
    merged: list[_Run] = []
    for offset, stride, length in runs:
        last = merged[-1] if merged else None
        if last and last[0] + last[2] == offset and last[1] == stride:
            merged[-1] = (last[0], stride, last[2] + length)
        else:
            merged.append((offset, stride, length))
    return merged
