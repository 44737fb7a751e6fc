"""Blocks that one engine wrote and another one reads, on plain tensors in both engines' layouts."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch

from kvconnect import _native
from kvconnect.cache.pages import LayerPages, Order, layer_pages, unit_segments
from kvconnect.cache.record_format import RecordFormat, page_names, parts
from kvconnect.errors import Misuse

LAYERS, HEADS, WIDTH, TOKENS = 2, 4, 32, 128
ITEM = 4
"""Bytes of a float32."""


# --- names ------------------------------------------------------------------------------------


def test_names_are_the_same_however_the_tokens_come() -> None:
    tokens = random.Random(1).sample(range(1 << 17), 100)
    names = page_names(tokens, 16)
    assert len(names) == len(set(names)) == 6
    assert page_names(tokens[:48], 16) + page_names(tokens[48:], 16, names[2]) == names
    assert page_names(tokens[:15], 16) == []
    assert set(page_names(tokens, 32)).isdisjoint(names), "other pages have other names"


def test_names_follow_from_the_documented_recipe() -> None:
    """SGLang computes them, and other programs may."""
    words = [b"".join(n.to_bytes(4, "little") for n in range(i, i + 16)) for i in (0, 16)]
    first = sha256(words[0]).digest()
    assert page_names(range(32), 16) == [first, sha256(first + words[1]).digest()]


def test_a_token_changes_all_names_from_its_own_on() -> None:
    tokens = list(range(64))
    names = page_names(tokens, 16)
    late = page_names([*tokens[:-1], 99], 16)
    early = page_names([1, *tokens[1:]], 16)
    assert late[:3] == names[:3] and late[3] != names[3]
    assert not set(early) & set(names)


def test_what_is_no_token_is_a_bug_of_the_caller() -> None:
    for tokens in ([-1] * 16, [1 << 32] * 16, ["a"] * 16):
        with pytest.raises(Misuse, match="token ids"):
            page_names(tokens, 16)  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="pages of 0 tokens"):
        page_names(range(16), 0)
    assert page_names([(1 << 32) - 1] * 16, 16)


def test_every_field_of_a_format_is_in_its_name() -> None:
    known = RecordFormat("m", "bfloat16", (0, 1), 16, 8, 1, (128, 128))
    others: list[dict[str, Any]] = [
        *({"model": "n"}, {"dtype": "float16"}, {"layers": (0,)}, {"tokens": 32}),
        *({"heads": 4}, {"unit": 2}, {"row": (128, 64)}),
    ]
    assert {name for other in others for name in other} == {f.name for f in fields(RecordFormat)}
    names = {replace(known, **other).fingerprint for other in others}
    assert len(names | {known.fingerprint}) == len(others) + 1
    assert replace(known).fingerprint == known.fingerprint


# --- bytes ------------------------------------------------------------------------------------


class Side:
    """A worker's cache with its pages; ``table`` says which hold the sequence, in order."""

    def __init__(self, page_tokens: int, heads: tuple[int, int], seed: int) -> None:
        self.page_tokens, self.heads = page_tokens, heads
        self.count = TOKENS // page_tokens + 3
        self.table = random.Random(seed).sample(range(1, self.count), TOKENS // page_tokens)
        self.area = torch.empty(0)
        self.pages: list[LayerPages] = []
        self.views: list[torch.Tensor] = []
        """Of every part of every layer: [pages, heads, tokens, width]."""

    def hold(self, views: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Register views [B, H, N, C], each a layer; a row has parts of these sizes."""
        for view in views:
            offset = view.data_ptr() - self.area.data_ptr()
            place = (view.shape, view.stride(), ITEM)
            page = layer_pages("layer", offset, place, self.count, self.page_tokens)
            self.pages += parts(page, rows)
            self.views += view.split([size // ITEM for size in rows], dim=-1)

    def put(self, model: torch.Tensor) -> None:
        for i, view in enumerate(self.views):
            for n, page in enumerate(self.table):
                tokens = slice(n * self.page_tokens, (n + 1) * self.page_tokens)
                view[page] = model[i, slice(*self.heads), tokens, : view.shape[-1]]

    def holds(self, model: torch.Tensor) -> bool:
        return all(
            torch.equal(
                view[page],
                model[i, slice(*self.heads), n * self.page_tokens :, : view.shape[-1]][
                    :, : self.page_tokens
                ],
            )
            for i, view in enumerate(self.views)
            for n, page in enumerate(self.table)
        )

    def untouched(self) -> bool:
        """Whether pages that hold nothing of the sequence are as they were made."""
        spare = [page for page in range(self.count) if page not in self.table]
        return all(bool((view[spare] == -1).all()) for view in self.views)

    def move(
        self,
        loop: Literal["gather", "scatter"],
        arena: torch.Tensor,
        heads: tuple[int, int],
        tokens: int,
        order: Order = "HNC",
    ) -> None:
        """Move the sequence between the cache and wire blocks that lie in ``arena`` in order."""
        local = (heads[0] - self.heads[0], heads[1] - self.heads[0])
        segments, phases, size = unit_segments(self.pages, local, tokens, order)
        assert size * (TOKENS // tokens) == arena.nbytes
        per_phase = len(segments) // phases
        for phase in range(phases):
            getattr(_native, loop)(
                (self.area.data_ptr(), self.area.nbytes),
                (arena.data_ptr(), arena.nbytes),
                size,
                segments[phase * per_phase : (phase + 1) * per_phase],
                array("q", self.table),
                array("q", range(phase, TOKENS // tokens, phases)),
            )


def vllm(axes: str, page_tokens: int, heads: tuple[int, int] = (0, HEADS)) -> Side:
    """vLLM's cache: one allocation [L, B, H, N, C] with K and V of a token in one row; ``axes``
    are its layout's first four, outermost first."""
    side = Side(page_tokens, heads, seed=3)
    sizes = {"L": LAYERS, "B": side.count, "H": heads[1] - heads[0], "N": page_tokens}
    side.area = torch.full((*(sizes[axis] for axis in axes), 2 * WIDTH), -1.0)
    side.hold(list(side.area.permute(*(axes.index(a) for a in "LBHN"), 4)), [WIDTH * ITEM] * 2)
    return side


def sglang(page_tokens: int, heads: tuple[int, int] = (0, HEADS), hnd: bool = False) -> Side:
    """SGLang's cache: per layer, K and V are halves of one allocation [2, slots, H, C], slots
    of a page side by side; or [2, pages, H, N, C] in its HND layout."""
    side = Side(page_tokens, heads, seed=4)
    count = heads[1] - heads[0]
    inner = (count, page_tokens) if hnd else (page_tokens, count)
    side.area = torch.full((LAYERS, 2, side.count, *inner, WIDTH), -1.0)
    pages = side.area.view(LAYERS * 2, side.count, *inner, WIDTH)
    side.hold(list(pages if hnd else pages.transpose(2, 3)), [WIDTH * ITEM])
    return side


def sequence(heads: int = HEADS, width: int = WIDTH) -> torch.Tensor:
    """What the model computed: [layer and part, head, token, value]."""
    shape = (LAYERS * 2, heads, TOKENS, width)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def arena_for(heads: int, row: int = 2 * WIDTH) -> torch.Tensor:
    return torch.zeros(LAYERS * heads * TOKENS * row)


def vllm_cpu(page_tokens: int) -> Side:
    """vLLM's CPU cache: a page has, head by head, K as [C, N] and then V as [N, C]."""
    side = Side(page_tokens, (0, HEADS), seed=3)
    side.area = torch.full((LAYERS, side.count, HEADS, page_tokens, 2 * WIDTH), -1.0)
    for layer in side.area:
        place = (layer.shape, layer.stride(), ITEM)
        offset = layer.data_ptr() - side.area.data_ptr()
        page = layer_pages("layer", offset, place, side.count, page_tokens)
        side.pages += parts(page, PLANE_PARTS, in_planes=True)
        k, v = layer.reshape(side.count, HEADS, -1).split(page_tokens * WIDTH, dim=-1)
        side.views.append(k.unflatten(-1, (WIDTH, page_tokens)).transpose(2, 3))
        side.views.append(v.unflatten(-1, (page_tokens, WIDTH)))
    return side


def cut_for_planes(side: Side) -> None:
    """Cut K and V of an SGLang cache where the planes of vLLM's CPU cache end."""
    cuts = (PLANE_PARTS[:-1], PLANE_PARTS[-1:])
    side.pages = [p for i, page in enumerate(side.pages) for p in parts(page, cuts[i % 2])]


PLANE_PARTS = (ITEM,) * WIDTH + (WIDTH * ITEM,)

VLLM_LAYOUTS = ("LBHN", "LBNH", "LHBN", "BLHN", "BLNH", "BHLN")


@pytest.mark.parametrize("axes", VLLM_LAYOUTS)
@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("hnd", [False, True])
def test_a_block_of_vllm_is_the_right_page_of_sglang_and_back(
    axes: str, block_tokens: int, page_tokens: int, hnd: bool
) -> None:
    model = sequence()
    tokens = min(block_tokens, page_tokens)
    theirs, ours = vllm(axes, block_tokens), sglang(page_tokens, hnd=hnd)
    theirs.put(model)
    arena = arena_for(HEADS)
    theirs.move("gather", arena, (0, HEADS), tokens)
    ours.move("scatter", arena, (0, HEADS), tokens)
    assert ours.holds(model) and ours.untouched()

    again, back = arena_for(HEADS), vllm(axes, block_tokens)
    ours.move("gather", again, (0, HEADS), tokens)
    back.move("scatter", again, (0, HEADS), tokens)
    assert back.holds(model) and back.untouched() and torch.equal(back.area, theirs.area)

    # Controls: heads and tokens in the other order, K and V swapped.
    ours.move("scatter", arena, (0, HEADS), tokens, order="NHC")
    assert not ours.holds(model)
    ours.move("scatter", arena, (0, HEADS), tokens)
    assert ours.holds(model)
    ours.pages = [page for k, v in list(pairwise(ours.pages))[::2] for page in (v, k)]
    ours.move("scatter", arena, (0, HEADS), tokens)
    assert not ours.holds(model)


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("heads", [(0, HEADS), (1, 3)])
def test_planes_of_vllms_cpu_kernels_become_rows_and_back(
    page_tokens: int, heads: tuple[int, int]
) -> None:
    model, tokens = sequence(), min(32, page_tokens)
    theirs, ours = vllm_cpu(32), sglang(page_tokens, heads)
    whole = ours.pages
    cut_for_planes(ours)
    theirs.put(model)
    arena = arena_for(heads[1] - heads[0])
    theirs.move("gather", arena, heads, tokens)
    ours.move("scatter", arena, heads, tokens)
    assert ours.holds(model) and ours.untouched()

    back = vllm_cpu(32)
    back.put(model * 0)
    ours.move("gather", arena.zero_(), heads, tokens)
    back.move("scatter", arena, heads, tokens)
    assert back.untouched()
    assert back.holds(model) == (heads == (0, HEADS))
    back.put(model)
    theirs.move("scatter", arena, heads, tokens)
    assert theirs.holds(model)
    # Control: without the cut, K's values land in the wrong tokens.
    ours.pages = whole
    ours.move("scatter", arena, heads, tokens)
    assert not ours.holds(model)


def test_canonical_bytes_are_the_same_whoever_wrote_them() -> None:
    """So a digest, or a copy in a shared store, is the same, too."""
    model = sequence()
    found = []
    for side in (vllm("LBHN", 32), vllm("BLNH", 16), sglang(64), sglang(16, hnd=True)):
        side.put(model)
        arena = arena_for(HEADS)
        side.move("gather", arena, (0, HEADS), 16)
        found.append(arena)
    assert all(torch.equal(arena, found[0]) for arena in found)
    # The first wire block: layer 0's K of head 0, tokens in order.
    first = found[0].view(TOKENS // 16, LAYERS * 2, HEADS, 16, WIDTH)
    assert torch.equal(first[0], model[:, :, :16])
    assert not torch.equal(first[1], model[:, :, :16])


def test_ranks_with_fewer_heads_take_theirs() -> None:
    model = sequence()
    whole = vllm("LBNH", 32)
    whole.put(model)
    for heads in ((0, 2), (2, 4)):
        rank, arena = sglang(16, heads), arena_for(2)
        whole.move("gather", arena, heads, 16)
        rank.move("scatter", arena, heads, 16)
        assert rank.holds(model)
        # Control: the other rank's heads.
        whole.move("gather", arena, (2 - heads[0], 4 - heads[0]), 16)
        rank.move("scatter", arena, heads, 16)
        assert not rank.holds(model)


@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_mla_keeps_one_row_for_all_heads(block_tokens: int, page_tokens: int) -> None:
    model = sequence(heads=1, width=WIDTH)[::2]
    theirs, ours = Side(block_tokens, (0, 1), seed=3), Side(page_tokens, (0, 1), seed=4)
    for side in (theirs, ours):
        side.area = torch.full((LAYERS, side.count, 1, side.page_tokens, WIDTH), -1.0)
        side.hold(list(side.area), [WIDTH * ITEM])
    theirs.put(model)
    arena, tokens = arena_for(1, WIDTH), min(block_tokens, page_tokens)
    theirs.move("gather", arena, (0, 1), tokens)
    ours.move("scatter", arena, (0, 1), tokens)
    assert ours.holds(model) and ours.untouched()
    # Control: another page in one place of the table.
    ours.table[0], ours.table[1] = ours.table[1], ours.table[0]
    assert not ours.holds(model)


def test_parts_make_up_a_row() -> None:
    page = LayerPages("a", 100, 1024, 512, 32, 2, 16, 32)
    k, v = parts(page, (24, 8))
    assert (k.offset, k.row_bytes, v.offset, v.row_bytes) == (100, 24, 124, 8)
    assert replace(v, offset=100, row_bytes=32) == page
    for sizes in ((16, 8), (32, 0), (), (40, -8)):
        with pytest.raises(Misuse, match="rows of 32 bytes"):
            parts(page, sizes)
