"""Plain tensors laid out as vLLM and SGLang lay out their KV caches."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Literal

import torch

from kvconnect import _native
from kvconnect.cache.pages import LayerPages, Order, layer_pages, unit_segments
from kvconnect.cache.record_format import parts

LAYERS, HEADS, WIDTH, TOKENS = 2, 4, 32, 128
ITEM = 4
"""Bytes of a float32."""


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
