"""Blocks that one engine wrote and another one reads, on plain tensors in both engines' layouts."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvconnect.cache.pages import LayerPages
from kvconnect.cache.record_format import RecordFormat, page_names, parts
from kvconnect.errors import Misuse
from tests.unit.cache.engine_layouts import (
    HEADS,
    ITEM,
    LAYERS,
    TOKENS,
    VLLM_LAYOUTS,
    WIDTH,
    Side,
    arena_for,
    cut_for_planes,
    sequence,
    sglang,
    vllm,
    vllm_cpu,
)

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
