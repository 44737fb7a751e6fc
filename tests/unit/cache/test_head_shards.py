"""Units of heads, against slices of one whole tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvconnect.cache.head_shards import page_units, unit_heads, units
from kvconnect.cache.layout import ByteRun, GroupGeometry
from kvconnect.cache.record_format import parts
from kvconnect.errors import Incompatible, Misuse
from tests.unit.cache.sharded_caches import (
    LAYOUTS,
    MODELS,
    Layout,
    Model,
    Rank,
    can_share,
    expected,
    ranks,
    read,
)

MODEL = Model(layers=2, heads=8, tokens=4, width=3)
PLAIN = Layout("LBHN", joined=True)


@given(MODELS, LAYOUTS, st.sampled_from([1, 2, 4, 8]))
def test_units_are_slices_of_the_whole(model: Model, layout: Layout, tp: int) -> None:
    assume(can_share(model, tp))
    whole = model.block(1)
    step = unit_heads(model.heads, max(1, model.heads // tp))
    for rank in ranks(model, layout, tp):
        slot = rank.slot(whole)
        found = rank.units()
        numbers = range(rank.heads[0] // step, rank.heads[1] // step)
        assert [unit.number for unit in found] == list(numbers)
        for unit in found:
            heads = range(unit.number * step, unit.number * step + step)
            assert read(slot, unit) == expected(whole, heads)
            joints = zip(unit.runs, unit.runs[1:], strict=False)
            assert all(sum(run) != following[0] for run, following in joints), "not merged"
        runs = [run for unit in found for run in unit.runs]
        touched = [n for offset, length in runs for n in range(offset, offset + length)]
        assert sorted(touched) == list(range(len(slot)))


def test_the_comparison_sees_another_order() -> None:
    """Negative control: other heads, layers in another order, and tokens before heads."""
    whole = MODEL.block(1)
    rank = Rank(MODEL, Layout("LBNH", joined=True), (0, 8))
    slot, found = rank.slot(whole), rank.units()
    assert read(slot, found[0]) == expected(whole, [0])
    assert read(slot, found[1]) != expected(whole, [0])
    turned = units(rank.group(), rank.rows()[::-1], (0, 8), 8)
    assert read(slot, turned[0]) != expected(whole, [0])
    assert slot != expected(whole, range(8))


@given(MODELS, LAYOUTS)
def test_whole_rows_go_token_by_token(model: Model, layout: Layout) -> None:
    """K and V of a token stay together where nobody cut the rows."""
    rank = Rank(model, replace(layout, joined=True), (0, model.heads))
    whole = model.block(2)
    found = units(rank.group(), rank.rows(cut_rows=False), rank.heads, model.heads)
    rows = whole.permute(0, 2, 3, 1, 4)  # [layers, heads, tokens, K or V, width]
    step = unit_heads(model.heads, model.heads)
    for unit in found:
        heads = rows[:, unit.number * step : unit.number * step + step]
        assert read(rank.slot(whole), unit) == bytes(heads.contiguous().flatten().numpy())


@pytest.mark.parametrize(
    ("total", "own", "wanted"),
    [
        (1, 1, 1),  # MLA
        (2, 1, 1),
        (8, 8, 1),
        (8, 1, 1),
        (16, 2, 2),
        (40, 40, 5),
        (12, 3, 1),
        (20, 5, 1),  # an eighth is not whole, and 2 could not be shared by 4 ranks
        (16, 1, 1),  # 16 ranks
    ],
)
def test_heads_of_a_unit(total: int, own: int, wanted: int) -> None:
    assert unit_heads(total, own) == wanted


def test_a_rank_with_one_unit_needs_no_copy_in_the_plain_layout() -> None:
    (unit,) = Rank(MODEL, Layout("LBHN", joined=False), (5, 6)).units()
    assert (unit.number, unit.runs) == (5, ((0, unit.nbytes),))
    (unit,) = Rank(replace(MODEL, heads=1), Layout("LBHN", joined=False), (0, 1)).units()
    assert (unit.number, len(unit.runs)) == (0, 1)


def test_ranks_with_the_same_head_have_the_same_units() -> None:
    found = [rank.units() for rank in ranks(replace(MODEL, heads=2), PLAIN, 4)]
    assert found[0] == found[1] != found[2] == found[3]
    assert [unit.number for each in found for unit in each] == [0, 0, 1, 1]


# Rows in parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(0, 8), (2, 4)])
def test_rows_in_parts_are_the_rows_of_others(heads: tuple[int, int]) -> None:
    """K and V in two tensors, K in planes, and both in one row: the same bytes for all."""
    whole = MODEL.block(3)
    row = Rank(MODEL, PLAIN, heads)
    wanted = units(row.group(), row.rows(cut_rows=False), heads, 8)
    content = [read(row.slot(whole), unit) for unit in wanted]

    apart = Rank(MODEL, Layout("LBNH", joined=False), heads)
    k, v = apart.layers()[::2], apart.layers()[1::2]
    found = units(apart.group(), list(zip(k, v, strict=True)), heads, 8)
    assert [read(apart.slot(whole), unit) for unit in found] == content
    swapped = units(apart.group(), list(zip(v, k, strict=True)), heads, 8)
    assert [read(apart.slot(whole), unit) for unit in swapped] != content

    planes = (1,) * MODEL.width + (MODEL.width,)
    layers = [parts(layer, planes, in_planes=True) for layer in row.layers(cut_rows=False)]
    turned = units(row.group(), layers, heads, 8)
    own = whole[:, :, heads[0] : heads[1]]
    slot = b"".join(  # head by head: K transposed, then V
        bytes(layer[0, head].T.flatten()) + bytes(layer[1, head].flatten())
        for layer in own
        for head in range(heads[1] - heads[0])
    )
    assert [read(slot, unit) for unit in turned] == content
    assert [read(slot, unit) for unit in wanted] != content


# Pages of a block ------------------------------------------------------------------------------


@given(MODELS, LAYOUTS, st.sampled_from([1, 2, 4]))
def test_pages_are_blocks_of_fewer_tokens(model: Model, layout: Layout, tp: int) -> None:
    """Whatever the layout; without pages, the block is unchanged."""
    assume(can_share(model, tp))
    whole = model.block(4)
    for rank in ranks(model, layout, tp):
        slot, block, layers = rank.slot(whole), rank.units(), rank.layers()
        lengths = [layer.row_bytes * model.tokens for layer in layers]
        assert page_units(block, lengths, 1) == (block,)
        found = page_units(block, lengths, 2)
        step = unit_heads(model.heads, rank.heads[1] - rank.heads[0])
        for page, tokens in zip(found, whole.chunk(2, dim=3), strict=True):
            for unit in page:
                heads = range(unit.number * step, unit.number * step + step)
                assert read(slot, unit) == expected(tokens, heads)
        touched = [n for page in found for unit in page for at, size in unit.runs
                   for n in range(at, at + size)]  # fmt: skip
        assert sorted(touched) == list(range(len(slot)))


def test_the_comparison_sees_another_page() -> None:
    """Negative control."""
    whole, rank = MODEL.block(5), Rank(MODEL, PLAIN, (0, 8))
    first, second = page_units(rank.units(), [4 * 3] * 4, 2)
    tokens = whole.chunk(2, dim=3)
    assert read(rank.slot(whole), first[3]) == expected(tokens[0], [3])
    assert read(rank.slot(whole), second[3]) != expected(tokens[0], [3])


def test_pages_that_cannot_be_cut() -> None:
    block = Rank(MODEL, PLAIN, (0, 8)).units()
    for lengths, pages in (([4 * 3] * 4, 5), ([4 * 3] * 5, 2)):
        with pytest.raises(Misuse):
            page_units(block, lengths, pages)


# Pages that are opaque inside a head ------------------------------------------------------------


def test_opaque_heads_are_taken_as_a_whole() -> None:
    rank = Rank(MODEL, replace(PLAIN, pages_per_block=2), (4, 8))
    group, layers = rank.group(), rank.rows(cut_rows=False)
    found = units(group, layers, (4, 8), 8, tokens_apart=False)
    page = layers[0][0].tokens * layers[0][0].row_bytes
    assert [unit.number for unit in found] == [4, 5, 6, 7]
    assert {length % page for unit in found for _, length in unit.runs} == {0}


def test_opaque_heads_in_pieces_are_refused() -> None:
    rank = Rank(MODEL, Layout("LBNH", joined=True), (4, 8))
    group, layers = rank.group(), rank.rows(cut_rows=False)
    with pytest.raises(Incompatible, match=r"view\.0.*opaque.*rows of 6 bytes every 24"):
        units(group, layers, (4, 8), 8, tokens_apart=False)
    assert units(group, layers, (4, 8), 8)


# What cannot be cut -----------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(0, 0), (3, 2), (-1, 2), (7, 9)])
def test_heads_that_the_model_lacks(heads: tuple[int, int]) -> None:
    rank = Rank(MODEL, PLAIN, (0, 2))
    with pytest.raises(Misuse, match=f"heads {heads[0]} to {heads[1]} of 8"):
        units(rank.group(), rank.rows(), heads, 8)


def test_no_layers() -> None:
    with pytest.raises(Misuse, match="in 0 layers"):
        units(Rank(MODEL, PLAIN, (0, 2)).group(), [], (0, 2), 8)


@pytest.mark.parametrize("heads", [(0, 8), (1, 4), (3, 6)])
def test_heads_that_are_not_whole_units(heads: tuple[int, int]) -> None:
    rank = Rank(replace(MODEL, heads=24), PLAIN, heads)  # units of 3, three ranks
    if heads == (3, 6):
        assert len(rank.units()) == 1
        return
    with pytest.raises(Incompatible, match="are not units of 3"):
        rank.units()


def test_a_layer_with_other_heads() -> None:
    rank = Rank(MODEL, PLAIN, (0, 4))
    with pytest.raises(Incompatible, match=r"view\.0 has 4 heads, the rank has 2"):
        units(rank.group(), rank.rows(), (0, 2), 8)


def test_bytes_of_no_layer() -> None:
    rank = Rank(MODEL, PLAIN, (0, 4))
    for layers in (rank.rows()[:-1], rank.rows()[1:]):
        with pytest.raises(Incompatible, match="belongs to no layer's heads"):
            units(rank.group(), layers, (0, 4), 8)


def test_layers_over_one_another() -> None:
    rank = Rank(MODEL, PLAIN, (0, 4))
    with pytest.raises(Incompatible, match="over one another"):
        units(rank.group(), [*rank.rows(), rank.rows()[0]], (0, 4), 8)


@pytest.mark.parametrize(("number", "move"), [(0, -6), (1, 10**6), (1, 2)])
def test_rows_outside_of_the_block(number: int, move: int) -> None:
    rank = Rank(MODEL, PLAIN, (0, 4))
    layers = rank.layers(cut_rows=False)
    offset = layers[number].offset + move
    layers[number] = replace(layers[number], name="stray", offset=offset)
    with pytest.raises(Incompatible, match=r"stray: byte -?\d+ of the area is not of block 0"):
        units(rank.group(), [(layer,) for layer in layers], (0, 4), 8)


def test_pages_and_blocks_that_do_not_fit() -> None:
    rank = Rank(MODEL, PLAIN, (0, 4))
    layers = rank.rows()
    crooked = GroupGeometry(
        tuple(ByteRun(s.offset, s.stride + 1, s.length) for s in rank.group().segments), 2
    )
    with pytest.raises(Incompatible, match=r"view\.0: pages every 96 bytes, blocks every 97"):
        units(crooked, layers, (0, 4), 8)
