"""KV caches of ranks that share a model's heads, filled through strides from one whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from hypothesis import strategies as st

from kvconnect.cache.head_shards import HeadUnit, Rows, units
from kvconnect.cache.layout import ByteRun, GroupGeometry, view_segments
from kvconnect.cache.pages import LayerPages, layer_pages
from kvconnect.cache.record_format import parts

BLOCKS = 3


@dataclass(frozen=True)
class Model:
    """``tokens`` are those of a block, ``width`` the bytes of K (and of V) per token and head."""

    layers: int
    heads: int
    tokens: int
    width: int

    def block(self, seed: int) -> torch.Tensor:
        """A block of all heads: uint8 [layers, K or V, heads, tokens, width]."""
        random = torch.Generator().manual_seed(seed)
        shape = (self.layers, 2, self.heads, self.tokens, self.width)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)


@dataclass(frozen=True)
class Layout:
    """How an engine keeps pages. ``axes`` are layers, blocks, heads and tokens in memory order,
    outermost first; K and V are ``joined`` in rows, or apart as if they were layers."""

    axes: str
    joined: bool
    pages_per_block: int = 1
    padding: int = 0


@dataclass(frozen=True)
class Rank:
    """One rank's cache: heads ``heads[0]`` to ``heads[1] - 1`` of the model."""

    model: Model
    layout: Layout
    heads: tuple[int, int]

    def group(self) -> GroupGeometry:
        segments: list[ByteRun] = []
        for number in range(self._views):
            view = (self._offset(number), self._shape, (*self._strides, 1))
            segments += view_segments(*view, itemsize=1, num_blocks=BLOCKS)
        return GroupGeometry(tuple(segments), BLOCKS)

    def layers(self, cut_rows: bool = True) -> list[LayerPages]:
        """K and V of layer after layer; with ``cut_rows`` off, whole rows of a joined cache."""
        view = (self._shape, (*self._strides, 1), 1)
        found = [
            layer_pages(f"view.{n}", self._offset(n), view, BLOCKS, self.model.tokens)
            for n in range(self._views)
        ]
        if self.layout.joined and cut_rows:
            width = self.model.width
            return [part for layer in found for part in parts(layer, (width, width))]
        return found

    def rows(self, cut_rows: bool = True) -> list[Rows]:
        return [(layer,) for layer in self.layers(cut_rows)]

    def units(self) -> tuple[HeadUnit, ...]:
        return units(self.group(), self.rows(), self.heads, self.model.heads)

    def slot(self, whole: torch.Tensor, block: int = BLOCKS - 1) -> bytes:
        """What a slot holds of a block, by way of the cache."""
        group = self.group()
        area = torch.full((group.area_bytes,), 0xEE, dtype=torch.uint8)
        pages = self.layout.pages_per_block
        own = whole[:, :, self.heads[0] : self.heads[1]]
        for number in range(self._views):
            view = torch.as_strided(area, self._shape, (*self._strides, 1), self._offset(number))
            layer, part = (number, None) if self.layout.joined else divmod(number, 2)
            content = torch.cat([*own[layer]], -1) if part is None else own[layer, part]
            for page, tokens in enumerate(content.chunk(pages, dim=1)):
                view[block * pages + page] = tokens
        runs = [(s.offset + block * s.stride, s.length) for s in group.segments]
        return b"".join(bytes(area[start : start + n].numpy()) for start, n in runs)

    @property
    def _views(self) -> int:
        return self.model.layers * (1 if self.layout.joined else 2)

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        pages = self.layout.pages_per_block
        row = self.model.width * (2 if self.layout.joined else 1)
        return BLOCKS * pages, self.heads[1] - self.heads[0], self.model.tokens // pages, row

    @property
    def _steps(self) -> dict[str, int]:
        sizes = dict(zip("BHN", self._shape, strict=False)) | {"L": self._views}
        steps, step = {}, self._shape[3]
        for axis in reversed(self.layout.axes):
            steps[axis] = step
            step = step * sizes[axis] + self.layout.padding
        return steps

    @property
    def _strides(self) -> tuple[int, int, int]:
        steps = self._steps
        return steps["B"], steps["H"], steps["N"]

    def _offset(self, number: int) -> int:
        return 5 + number * self._steps["L"]


def ranks(model: Model, layout: Layout, tp: int) -> list[Rank]:
    """The caches of all ranks; with more ranks than heads, some have the same head."""
    own = max(1, model.heads // tp)
    return [
        Rank(model, layout, (start, start + own))
        for start in (rank * model.heads // tp for rank in range(tp))
    ]


def can_share(model: Model, tp: int) -> bool:
    """Whether so many ranks can have the model's heads."""
    return model.heads % tp == 0 or tp % model.heads == 0


def read(slot: bytes | memoryview, unit: HeadUnit) -> bytes:
    """What a slot has of a unit, run by run."""
    return b"".join(bytes(slot[offset : offset + length]) for offset, length in unit.runs)


def expected(whole: torch.Tensor, heads: Sequence[int]) -> bytes:
    """The canonical bytes of some heads."""
    return bytes(whole[:, :, heads[0] : heads[-1] + 1].contiguous().flatten().numpy())


MODELS = st.builds(
    Model,
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4, 8, 12, 16]),
    tokens=st.sampled_from([2, 4, 8]),
    width=st.sampled_from([1, 3, 4]),
)
LAYOUTS = st.builds(
    Layout,
    axes=st.sampled_from(["".join(axes) for axes in permutations("LBHN")]),
    joined=st.booleans(),
    pages_per_block=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 7]),
)
