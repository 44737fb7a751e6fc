"""Heads, tokens and rows inside a page, so that two different caches can exchange blocks.

``layout`` moves whole blocks and need not know their content. A hand-off may go to a cache with
other strides, another block size or other heads per rank, so it cuts blocks into *wire blocks*:
a number of tokens of a range of heads, in an order that both sides agreed on. A *row* is what one
layer keeps of one token for one head: K and V together, opaque bytes::

    page of 4 tokens, 2 heads, order NHC      |t0h0|t0h1|t1h0|t1h1|t2h0|t2h1|t3h0|t3h1|
    wire block of 2 tokens, head 1, phase 1                                 ^^^^      ^^^^

A *page* is a block of the attention kernel, a whole number of which make a block of the engine.
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
"""Which of heads (H) and tokens (N) is outermost in a wire block; C is a row."""

View = tuple[Sequence[int], Sequence[int], int]
"""Shape, strides (elements) and element size, as torch gives them."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Where one layer keeps its pages: page ``p``, head ``h``, token ``t`` is the row
    ``[offset + p * page_stride + h * head_stride + t * token_stride, + row_bytes)``.

    ``offset`` counts from the start of the backing area, ``heads`` are this rank's, ``tokens``
    those of one page.
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

    The view is [B, H, N, C], or [B, N, C] where all heads share one row (MLA). H, N and B may lie
    in memory in any order, C must be contiguous. B is ``num_blocks`` times the pages per block,
    N the ``block_tokens`` divided by them.

    Raises:
        Incompatible: a view of another kind. The message names the layer, shape and strides.
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
    # A dim of size 1 may have any stride; these are what a dense page would have.
    token_stride = strides[2] * itemsize if tokens > 1 else row_bytes
    head_stride = strides[1] * itemsize if heads > 1 else tokens * token_stride
    page_stride = strides[0] * itemsize
    return LayerPages(
        name, offset, page_stride, head_stride, token_stride, heads, tokens, row_bytes
    )


def _unusable(
    shape: Sequence[int], strides: Sequence[int], num_blocks: int, block_tokens: int
) -> str:
    """Return why a view [B, H, N, C] has no rows, "" if it has."""
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
    """Return (segments, phases, block_bytes): where the wire blocks of some layers lie.

    Wire block ``w`` is part ``w % phases`` of page ``w // phases``. ``segments`` holds ``phases``
    times as many triples (offset, stride per page, length); those of one phase are its byte runs
    in wire order: layer by layer as given, then in ``order``. Runs that touch are one.
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
        # Only whole pages of two layers lie side by side.
        for run in _merged(runs) if phases == 1 else runs:
            segments.extend(run)
    block_bytes = (end - first) * wire_tokens * sum(layer.row_bytes for layer in layers)
    return segments, phases, block_bytes


_Run = tuple[int, int, int]
"""Offset, stride per page, length."""


def _runs(
    layer: LayerPages, heads: tuple[int, int], part: tuple[int, int], order: Order
) -> Iterator[_Run]:
    """Yield the byte runs of part number ``part[0]``, of ``part[1]`` tokens, in wire order."""
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
    """Join runs that go on where the one before ends."""
    merged: list[_Run] = []
    for offset, stride, length in runs:
        last = merged[-1] if merged else None
        if last and last[0] + last[2] == offset and last[1] == stride:
            merged[-1] = (last[0], stride, last[2] + length)
        else:
            merged.append((offset, stride, length))
    return merged
