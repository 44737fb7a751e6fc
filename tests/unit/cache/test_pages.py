"""Pages cut for hand-off, against a brute-force walk over every row of two unlike caches."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.pages import LayerPages, Order, layer_pages, unit_segments
from kvconnect.errors import Incompatible, Misuse

LAYERS, HEADS, TOKENS, WIDTH, ITEMSIZE = 2, 4, 8, 3, 2
ROW = WIDTH * ITEMSIZE

# A row's content names its place in the model, so rows that are mixed up are seen.
ROWS = {
    (layer, head, token): bytes([layer, head, token, 7, layer ^ 0x55, token ^ 0xAA])
    for layer in range(LAYERS)
    for head in range(HEADS)
    for token in range(TOKENS)
}


class Cache:
    """One rank's KV cache, addressed through shapes and strides alone.

    It has the model's heads ``heads[0]`` to ``heads[1] - 1`` and keeps ``TOKENS`` tokens in blocks
    that ``table`` names in order. ``axes`` are L, B, H and N in memory order, outermost first.
    """

    def __init__(
        self, axes: str, block_tokens: int, page_tokens: int, heads: tuple[int, int], seed: int
    ) -> None:
        self.heads, self.block_tokens = heads, block_tokens
        self.num_blocks = TOKENS // block_tokens + 2
        self.table = random.Random(seed).sample(range(self.num_blocks), TOKENS // block_tokens)
        self.page_tokens = page_tokens
        per_block = block_tokens // page_tokens
        sizes = {
            "L": LAYERS,
            "B": self.num_blocks * per_block,
            "H": heads[1] - heads[0],
            "N": page_tokens,
        }
        self.strides, step = {}, WIDTH
        for axis in reversed(axes):
            self.strides[axis] = step
            step = step * sizes[axis] + seed % 2 * WIDTH  # with and without padding
        self.shape = (sizes["B"], sizes["H"], page_tokens, WIDTH)
        self.area = bytearray(b"\xee" * (step * ITEMSIZE))

    def place(self, layer: int, head: int, token: int) -> slice:
        block, inside = divmod(token, self.block_tokens)
        page, row = divmod(inside, self.page_tokens)
        page += self.table[block] * (self.block_tokens // self.page_tokens)
        steps = {"L": layer, "B": page, "H": head - self.heads[0], "N": row}
        start = ITEMSIZE * sum(self.strides[axis] * n for axis, n in steps.items())
        return slice(start, start + ROW)

    def view(self) -> tuple[Sequence[int], Sequence[int], int]:
        return self.shape, (*(self.strides[axis] for axis in "BHN"), 1), ITEMSIZE

    def pages(self) -> list[LayerPages]:
        return [
            layer_pages(
                f"layer.{layer}",
                layer * self.strides["L"] * ITEMSIZE,
                self.view(),
                self.num_blocks,
                self.block_tokens,
            )
            for layer in range(LAYERS)
        ]

    def runs(self, heads: tuple[int, int], wire_tokens: int, order: Order) -> list[slice]:
        """The bytes of all tokens of some of the model's heads, in wire order."""
        local = (heads[0] - self.heads[0], heads[1] - self.heads[0])
        segments, phases, block_bytes = unit_segments(self.pages(), local, wire_tokens, order)
        per_block = self.block_tokens // wire_tokens
        found = []
        for w in (block * per_block + k for block in self.table for k in range(per_block)):
            runs = wire_runs(segments, phases, w)
            assert sum(run.stop - run.start for run in runs) == block_bytes
            found += runs
        return found


def wire_runs(segments: array[int], phases: int, w: int) -> list[slice]:
    page, phase = divmod(w, phases)
    count = len(segments) // phases
    triples = [segments[i : i + 3] for i in range(phase * count, (phase + 1) * count, 3)]
    return [slice(o + page * s, o + page * s + n) for o, s, n in triples]


def gather(cache: Cache, runs: list[slice]) -> bytes:
    return b"".join(cache.area[run] for run in runs)


def scatter(cache: Cache, runs: list[slice], stream: bytes) -> None:
    at = 0
    for run in runs:
        size = run.stop - run.start
        cache.area[run] = stream[at : at + size]
        at += size
    assert at == len(stream)


def fill(cache: Cache) -> None:
    for (layer, head, token), row in ROWS.items():
        if cache.heads[0] <= head < cache.heads[1]:
            cache.area[cache.place(layer, head, token)] = row


def holds(cache: Cache, heads: tuple[int, int]) -> bool:
    return all(
        cache.area[cache.place(layer, head, token)] == row
        for (layer, head, token), row in ROWS.items()
        if heads[0] <= head < heads[1]
    )


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    axes = "".join(draw(st.sampled_from(list(permutations("LBHN")))))
    block_tokens = draw(st.sampled_from([1, 2, 4, 8]))
    page_tokens = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= block_tokens]))
    tp = draw(st.sampled_from([1, 2, 4]))
    rank, size = draw(st.integers(0, tp - 1)), HEADS // tp
    return Cache(
        axes, block_tokens, page_tokens, (rank * size, (rank + 1) * size), draw(st.integers(0, 99))
    )


@given(source=caches(), target=caches(), order=st.sampled_from(["HNC", "NHC"]))
def test_any_cache_can_be_read_into_any_other(source: Cache, target: Cache, order: Order) -> None:
    heads = (max(source.heads[0], target.heads[0]), min(source.heads[1], target.heads[1]))
    if heads[0] >= heads[1]:  # these two would not talk: take the rank that needs the heads
        heads = source.heads
        target = Cache("LBHN", target.block_tokens, target.page_tokens, heads, 1)
    wire_tokens = min(source.page_tokens, target.page_tokens)
    fill(source)
    before = bytes(target.area)
    stream = gather(source, source.runs(heads, wire_tokens, order))
    runs = target.runs(heads, wire_tokens, order)
    scatter(target, runs, stream)
    assert holds(target, heads)
    # Nothing else was written.
    scatter(target, runs, b"\xee" * len(stream))
    assert target.area == before

    # Negative controls: the other order, the other heads.
    other: Order = "NHC" if order == "HNC" else "HNC"
    scatter(target, target.runs(heads, wire_tokens, other), stream)
    alike = wire_tokens == 1 or heads[1] - heads[0] == 1
    assert holds(target, heads) == alike
    if source.heads[1] - source.heads[0] > heads[1] - heads[0]:
        shift = -1 if heads[1] == source.heads[1] else 1
        wrong = (heads[0] + shift, heads[1] + shift)
        scatter(target, runs, gather(source, source.runs(wrong, wire_tokens, order)))
        assert not holds(target, heads)


def test_wire_order_is_layers_then_order() -> None:
    cache = Cache("LBNH", 2, 2, (0, HEADS), seed=2)
    fill(cache)
    for order, rows in {
        "HNC": [(layer, h, t) for layer in (0, 1) for h in (1, 2) for t in (0, 1)],
        "NHC": [(layer, h, t) for layer in (0, 1) for t in (0, 1) for h in (1, 2)],
    }.items():
        segments, phases, size = unit_segments(cache.pages(), (1, 3), 2, order)  # type: ignore[arg-type]
        assert (phases, size) == (1, len(rows) * ROW)
        stream = gather(cache, wire_runs(segments, phases, cache.table[0]))
        assert stream == b"".join(ROWS[row] for row in rows)


@pytest.mark.parametrize(
    ("axes", "order", "heads", "wire_tokens", "runs"),
    [
        ("LBHN", "HNC", (0, 4), 8, 2),  # one per layer
        ("BLHN", "HNC", (0, 4), 8, 1),  # a block's layers side by side
        ("BLHN", "HNC", (1, 3), 8, 2),
        ("LBNH", "NHC", (0, 4), 8, 2),
        ("LBNH", "NHC", (0, 4), 4, 2),  # cut between tokens
        ("LBHN", "HNC", (0, 4), 4, 8),  # ... one per head
        ("LBNH", "NHC", (1, 3), 8, 16),  # one per token
        ("LBNH", "HNC", (0, 4), 8, 64),  # one per row
        ("LHBN", "HNC", (0, 4), 8, 8),
    ],
)
def test_runs_are_as_few_as_the_layout_allows(
    axes: str, order: Order, heads: tuple[int, int], wire_tokens: int, runs: int
) -> None:
    cache = Cache(axes, 8, 8, (0, HEADS), seed=2)
    segments, phases, _ = unit_segments(cache.pages(), heads, wire_tokens, order)
    assert phases == 8 // wire_tokens
    assert len(segments) == 3 * runs * phases


def test_a_view_without_heads_is_one_head() -> None:
    """MLA: [B, N, C], two pages of the kernel per block; uint8 views are opaque rows alike."""
    page = layer_pages("mla", 100, ((8, 16, 576), (9216, 576, 1), 1), num_blocks=4, block_tokens=32)
    assert page == LayerPages("mla", 100, 9216, 9216, 576, 1, 16, 576)
    segments, phases, size = unit_segments([page], (0, 1), 8, "HNC")
    assert (phases, size) == (2, 8 * 576)
    assert segments == array("q", [100, 9216, 4608, 100 + 4608, 9216, 4608])


def test_dims_of_size_one_may_have_any_stride() -> None:
    page = layer_pages("one", 0, ((4, 1, 16, 8), (128, 3, 8, 1), 2), 4, 16)
    assert (page.head_stride, page.token_stride) == (256, 16)
    page = layer_pages("one", 0, ((4, 2, 1, 8), (16, 8, 999, 1), 2), 4, 1)
    assert (page.head_stride, page.token_stride) == (16, 16)


@pytest.mark.parametrize(
    ("shape", "strides", "block_tokens", "why"),
    [
        ((4, 2, 16, 8), (256, 128, 8, 2), 16, "C is not contiguous"),
        ((4, 2, 16, 8), (256, 128, 4, 1), 16, "overlap"),
        ((4, 2, 16, 8), (256, 0, 8, 1), 16, "overlap"),
        ((4, 2, 16, 8), (128, 128, 8, 1), 16, "overlap"),
        ((4, 2, 16, 8), (256, 128, -8, 1), 16, "overlap"),
        ((4, 2, 16, 8), (256, 128, 8, 1), 32, "not those of the blocks"),
        ((6, 2, 16, 8), (256, 128, 8, 1), 16, "not those of the blocks"),
        ((4, 0, 16, 8), (256, 128, 8, 1), 16, "neither"),
        ((4, 128), (128, 1), 16, "neither"),
        ((2, 4, 2, 16, 8), (1024, 256, 128, 8, 1), 16, "neither"),
        ((4, 2, 16, 8), (128, 8, 1), 16, "neither"),
    ],
)
def test_views_without_rows_are_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], block_tokens: int, why: str
) -> None:
    with pytest.raises(Incompatible, match=why) as caught:
        layer_pages("model.0", 0, (shape, strides, 2), 4, block_tokens)
    assert "layer model.0: " in str(caught.value)
    assert f"shape={shape}, strides={strides}" in str(caught.value)


PAGE = LayerPages("a", 0, 256, 128, 8, 2, 16, 8)


@pytest.mark.parametrize(
    "request_",
    [
        ([], (0, 2), 16, "HNC"),
        ([PAGE], (0, 2), 0, "HNC"),
        ([PAGE], (0, 2), 3, "HNC"),
        ([PAGE], (0, 2), 32, "HNC"),
        ([PAGE], (0, 3), 16, "HNC"),
        ([PAGE], (-1, 1), 16, "HNC"),
        ([PAGE], (1, 1), 16, "HNC"),
    ],
)
def test_a_unit_that_cannot_be_meant_is_a_bug_of_the_caller(request_: Any) -> None:
    with pytest.raises(Misuse):
        unit_segments(*request_)
    unit_segments([PAGE], (0, 2), 16, "HNC")  # negative control
