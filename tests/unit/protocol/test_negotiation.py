"""Agreement: every page a reader needs comes from exactly one source, and mismatches are named."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvconnect.errors import Misuse, Refused
from kvconnect.protocol.hello import REFUSAL_FIELDS
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.messages import GroupHello, HandoffHello, decode, encode
from kvconnect.protocol.negotiation import Agreement, negotiate
from kvconnect.protocol.topology import head_range, served_heads, sources_for
from kvconnect.types import Rank

LAYERS = [f"layers.{n}" for n in range(4)]
SIZES = (1, 2, 4, 8)
ONLY = Rank(0, 1, 0, 1)


def group(rank: Rank = ONLY, kv_heads: int = 8, **values: Any) -> GroupHello:
    first, end = head_range(rank.tp_rank, rank.tp, kv_heads)
    defaults: dict[str, Any] = {
        "block_tokens": 16,
        "page_tokens": 16,
        "layers": LAYERS[rank.pp_rank * 4 // rank.pp : (rank.pp_rank + 1) * 4 // rank.pp],
        "kv_heads": kv_heads,
        "heads": end - first,
        "row_bytes": 256,
        "order": "HNC",
        "splittable": True,
    }
    return GroupHello(**(defaults | values))


def hello(*groups: GroupHello, rank: Rank = ONLY, **values: Any) -> HandoffHello:
    defaults: dict[str, Any] = {
        "software": "s",
        "engine_id": "e",
        "epoch": 1,
        "identity": Identity(weights=Weights(files="same")),
        "format": {"model": "m", "dtype": "bfloat16"},
    }
    return HandoffHello(rank=rank, groups=list(groups) or [group(rank)], **(defaults | values))


def ranks(tp: int, pp: int) -> list[Rank]:
    return [Rank(t, tp, p, pp) for p, t in product(range(pp), range(tp))]


# Layers that differ -----------------------------------------------------------------------------

ROWS = [1152, 132, 1152, 132]


def test_rows_may_differ_by_layer() -> None:
    """Such as latent attention and its indexer's cache."""
    mixed = hello(group(row_bytes=1152, layer_row_bytes=ROWS))
    assert negotiate(mixed, mixed).groups[0].layers == tuple(LAYERS)
    assert decode(encode(mixed)) == mixed
    for other in (
        group(row_bytes=1152, layer_row_bytes=[1152, 132, 1152, 136]),
        group(row_bytes=1152),  # the widest row is the same, the others are not
        group(row_bytes=1152, layer_row_bytes=ROWS[:3]),
    ):
        for pair in ((mixed, hello(other)), (hello(other), mixed)):
            with pytest.raises(Refused) as refused:
                negotiate(*pair)
            assert refused.value.field == "row_bytes"


def test_rows_of_layers_that_only_one_stage_has_are_not_compared() -> None:
    first, second = Rank(0, 1, 0, 2), Rank(0, 1, 1, 2)
    whole = hello(group(row_bytes=1152, layer_row_bytes=[132, 132, 1152, 132]))
    narrow = hello(group(first, row_bytes=132), rank=first)
    wide = hello(group(second, row_bytes=1152, layer_row_bytes=[1152, 132]), rank=second)
    assert negotiate(whole, narrow).groups[0].layers == tuple(LAYERS[:2])
    assert negotiate(whole, wide).groups[0].layers == tuple(LAYERS[2:])
    # Control: the stage's own layers are compared.
    wrong = hello(group(first, row_bytes=1152), rank=first)
    with pytest.raises(Refused, match=r"layer layers\.0: row_bytes is 132 .* 1152"):
        negotiate(whole, wrong)


# Who serves whom --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_heads", "tp", "expected"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 4, [(0, 1)] * 4),
    ],
)
def test_heads_are_shared_evenly_or_replicated(
    kv_heads: int, tp: int, expected: list[tuple[int, int]]
) -> None:
    assert [head_range(rank, tp, kv_heads) for rank in range(tp)] == expected


def test_the_example_in_the_module_holds() -> None:
    assert sources_for(Rank(0, 2, 0, 1), 8, 1, [4]) == [(0, 0), (0, 2)]
    assert sources_for(Rank(1, 2, 0, 1), 8, 1, [4]) == [(0, 4), (0, 6)]


@pytest.mark.parametrize(("kv_heads", "tp"), [(3, 2), (2, 3), (8, 6)])
def test_heads_that_cannot_be_shared_are_refused(kv_heads: int, tp: int) -> None:
    for call in (
        lambda: head_range(0, tp, kv_heads),
        lambda: sources_for(Rank(0, 1, 0, 1), tp, 1, [kv_heads]),
        lambda: sources_for(Rank(0, tp, 0, 1), 1, 1, [kv_heads]),
    ):
        with pytest.raises(Refused) as caught:
            call()
        assert caught.value.field == "kv_heads"


def test_equal_sizes_pair_equal_ranks() -> None:
    for tp, kv_heads in product(SIZES, SIZES):
        for rank in ranks(tp, 1):
            assert sources_for(rank, tp, 1, [kv_heads]) == [(0, rank.tp_rank)]


def test_readers_spread_over_replicas() -> None:
    for tp, reader_tp in product(SIZES, SIZES):
        asked = Counter(s for r in ranks(reader_tp, 1) for s in sources_for(r, tp, 1, [1]))
        assert len(asked) == min(tp, reader_tp)
        assert len(set(asked.values())) == 1


def test_groups_of_other_head_counts_add_no_source_when_ranks_suffice() -> None:
    for tp, reader_tp in product(SIZES, SIZES):
        for reader in ranks(reader_tp, 1):
            assert sources_for(reader, tp, 1, [8, 1]) == sources_for(reader, tp, 1, [8])


def served(reader: Rank, tp: int, pp: int, kv_heads: list[int]) -> Counter[tuple[int, str, int]]:
    """How often each (group, layer, head) comes to a reader from the sources it asks."""
    count: Counter[tuple[int, str, int]] = Counter()
    greeting = hello(*(group(reader, heads) for heads in kv_heads), rank=reader)
    for pp_rank, tp_rank in sources_for(reader, tp, pp, kv_heads):
        rank = Rank(tp_rank, tp, pp_rank, pp)
        source = hello(*(group(rank, heads) for heads in kv_heads), rank=rank)
        agreement = negotiate(greeting, source)
        # What the other side sees is what was sent, and it must come to the same end.
        there, here = decode(encode(greeting)), decode(encode(source))
        assert isinstance(there, HandoffHello) and isinstance(here, HandoffHello)
        assert negotiate(there, here) == agreement
        for number, agreed in enumerate(agreement.groups):
            for layer, head in product(agreed.layers, range(*agreed.heads)):
                count[number, layer, head] += 1
    return count


@pytest.mark.parametrize("kv_heads", [[8], [4], [2], [1], [8, 1], [2, 8]])
@pytest.mark.parametrize("pp", [1, 2])
def test_each_head_of_each_layer_comes_from_exactly_one_source(
    kv_heads: list[int], pp: int
) -> None:
    for reader_tp, tp, reader_pp in product(SIZES, SIZES, (1, 2)):
        for reader in ranks(reader_tp, reader_pp):
            needed = {
                (number, layer, head)
                for number, heads in enumerate(kv_heads)
                for layer in group(reader, heads).layers
                for head in range(*head_range(reader.tp_rank, reader_tp, heads))
            }
            assert served(reader, tp, pp, kv_heads) == Counter(needed)


def test_a_head_served_twice_or_never_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: sources that go by the heads they hold serve replicas twice."""

    def held(reader: Rank, source: Rank, kv_heads: int) -> tuple[int, int]:
        first, end = head_range(reader.tp_rank, reader.tp, kv_heads)
        low, high = head_range(source.tp_rank, source.tp, kv_heads)
        return max(first, low), min(end, high)

    monkeypatch.setattr("kvconnect.protocol.negotiation.served_heads", held)
    counts = served(Rank(0, 1, 0, 1), 4, 1, [8, 1])
    assert set(counts.values()) == {1, 4}


def test_a_source_that_does_not_serve_the_reader_refuses_it() -> None:
    reader, source = Rank(0, 2, 0, 1), Rank(1, 2, 0, 1)
    assert served_heads(reader, source, 8) == (0, 0)
    with pytest.raises(Refused, match="another worker") as caught:
        negotiate(hello(rank=reader), hello(rank=source))
    assert caught.value.field == "heads"


# Sizes and orders -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reader", "source", "wire", "ratios"),
    [
        ((16, 16), (16, 16), 16, (1, 1)),
        ((16, 16), (64, 64), 16, (1, 4)),
        ((64, 64), (16, 16), 16, (4, 1)),
        ((64, 16), (64, 16), 16, (4, 4)),
        ((64, 64), (64, 16), 16, (4, 4)),
        ((128, 32), (32, 16), 16, (8, 2)),
    ],
)
def test_a_wire_block_is_the_smaller_page(
    reader: tuple[int, int], source: tuple[int, int], wire: int, ratios: tuple[int, int]
) -> None:
    ours, theirs = (
        hello(group(block_tokens=block, page_tokens=page)) for block, page in (reader, source)
    )
    agreed = negotiate(ours, theirs).groups[0]
    assert (agreed.wire_tokens, agreed.reader_ratio, agreed.source_ratio) == (wire, *ratios)


@given(st.sampled_from([8, 16, 32, 48, 64]), st.sampled_from([8, 16, 32, 48, 64]))
def test_wire_blocks_make_up_blocks_of_both_sides(ours: int, theirs: int) -> None:
    greetings = [hello(group(block_tokens=n, page_tokens=n)) for n in (ours, theirs)]
    if max(ours, theirs) % min(ours, theirs):
        with pytest.raises(Refused, match="48"):
            negotiate(*greetings)
        return
    agreed = negotiate(*greetings).groups[0]
    assert agreed.wire_tokens * agreed.reader_ratio == ours
    assert agreed.wire_tokens * agreed.source_ratio == theirs


@pytest.mark.parametrize(
    ("ours", "theirs", "order"),
    [("HNC", "HNC", "HNC"), ("NHC", "HNC", "HNC"), ("HNC", "NHC", "HNC"), ("NHC", "NHC", "NHC")],
)
def test_heads_come_first_unless_both_sides_have_tokens_first(
    ours: str, theirs: str, order: str
) -> None:
    agreed = negotiate(hello(group(order=ours)), hello(group(order=theirs)))
    assert agreed.groups[0].order == order


TP2 = Rank(0, 2, 0, 1)


@pytest.mark.parametrize(
    ("reader", "source"),
    [
        (hello(group(splittable=False)), hello(group(block_tokens=8, page_tokens=8))),
        (hello(group(block_tokens=8, page_tokens=8)), hello(group(splittable=False))),
        (hello(group(splittable=False, order="NHC")), hello()),
        (hello(group(splittable=False, order="NHC")), hello(group(TP2, order="NHC"), rank=TP2)),
    ],
)
def test_a_page_that_must_stay_whole_is_not_cut(reader: HandoffHello, source: HandoffHello) -> None:
    with pytest.raises(Refused, match="packs a page") as caught:
        negotiate(reader, source)
    assert caught.value.field == "splittable"
    for side in (reader, source):  # negative control: it is for the packing alone
        side.groups = [replace(side.groups[0], splittable=True)]
    negotiate(reader, source)


def test_a_page_that_must_stay_whole_may_be_cut_between_heads() -> None:
    agreement = negotiate(
        hello(group(splittable=False)), hello(group(TP2, splittable=False), rank=TP2)
    )
    assert agreement.groups[0].heads == (0, 4)


# Layers and units -------------------------------------------------------------------------------


def test_units_number_all_layers_and_each_of_every_group() -> None:
    ours = hello(group(layers=["a", "b"]), group(layers=[]), group(layers=["c"]))
    theirs = hello(group(layers=["x", "b", "a"]), group(layers=["y"]), group(layers=["c"]))
    agreement = negotiate(ours, theirs)
    assert [g.layers for g in agreement.groups] == [("b", "a"), (), ("c",)]  # the source's order
    assert agreement.units == ((0, None), (0, 0), (0, 1), (2, None), (2, 0))
    for number, (group_number, layer) in enumerate(agreement.units):
        assert agreement.unit(group_number, layer) == number
    for nothing in ((1, None), (0, 2), (3, None)):
        with pytest.raises(Misuse):
            agreement.unit(*nothing)


def test_a_layer_the_source_lacks_is_refused() -> None:
    with pytest.raises(Refused, match="draft") as caught:
        negotiate(hello(group(layers=[*LAYERS, "draft"])), hello())
    assert caught.value.field == "layers"
    negotiate(hello(), hello(group(layers=[*LAYERS, "draft"])))  # more than needed is fine


def test_a_stage_without_a_common_layer_is_refused_unless_both_have_stages() -> None:
    first, second = Rank(0, 1, 0, 2), Rank(0, 1, 1, 2)
    assert negotiate(hello(rank=first), hello(rank=second)).units == ()
    other = hello(group(layers=["other"]), rank=second)
    with pytest.raises(Refused, match="other") as caught:
        negotiate(hello(), other)
    assert caught.value.field == "layers"


# What must be equal, and what need not ----------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "reader", "source", "values"),
    [
        ("protocol", hello(), hello(protocol=(5, 6)), ["4 to 4", "5 to 6"]),
        ("protocol", hello(), hello(protocol=(1, 1)), ["4 to 4", "1 to 1"]),
        ("model", hello(format={"model": "a"}), hello(format={"model": "b"}), ["'a'", "'b'"]),
        ("dtype", hello(), hello(format={"model": "m"}), ["'bfloat16'", "None"]),
        ("format", hello(format={"new": 1}), hello(format={"new": 2}), ["new", "1", "2"]),
        ("groups", hello(), hello(group(), group()), ["1", "2"]),
        ("window", hello(group(window=128)), hello(), ["128", "None"]),
        ("chunk", hello(), hello(group(chunk=64)), ["None", "64"]),
        ("kv_heads", hello(), hello(group(kv_heads=4)), ["8", "4"]),
        ("heads", hello(group(heads=4)), hello(), ["4", "8"]),
        ("row_bytes", hello(), hello(group(row_bytes=128)), ["256", "128"]),
        ("block_tokens", hello(), hello(group(block_tokens=24, page_tokens=24)), ["16", "24"]),
        (
            "page_tokens",
            hello(group(block_tokens=96, page_tokens=48)),
            hello(group(block_tokens=32, page_tokens=32)),
            ["48", "32"],
        ),
    ],
)
def test_a_mismatch_names_field_and_both_values(
    field: str, reader: HandoffHello, source: HandoffHello, values: list[str]
) -> None:
    for ours, theirs in ((reader, source), (source, reader)):
        with pytest.raises(Refused) as caught:
            negotiate(ours, theirs)
        assert caught.value.field == field and field in REFUSAL_FIELDS
        assert [value for value in values if value not in str(caught.value)] == []


def test_versions_and_features_may_differ() -> None:
    ours = hello(software="vllm-0.32", features=["a", "b"], protocol=(1, 2), engine_id="d")
    theirs = hello(software="vllm-0.33", features=["b", "c"], protocol=(1, 4), epoch=9)
    agreement = negotiate(ours, theirs)
    assert isinstance(agreement, Agreement)
    assert (agreement.protocol, agreement.features) == (2, frozenset({"b"}))


# Weights ----------------------------------------------------------------------------------------


def of(tp: int = 1, mixes: bool = False, draft: str = "", **weights: str) -> HandoffHello:
    identity = Identity(weights=Weights(**weights), draft=Weights(files=draft), mixes_weights=mixes)
    return hello(identity=identity, rank=Rank(0, tp, 0, 1))


@pytest.mark.parametrize(
    ("reader", "source", "values"),
    [
        (of(files="a", version="1"), of(files="b", version="1"), ("'files a'", "'files b'")),
        (of(files="a", version="1"), of(version="2"), ("'version 1'", "'version 2'")),
        (of(parameters="p"), of(files="b", parameters="q"), ("'parameters p'", "'parameters q'")),
        (of(tp=2, parameters="p"), of(parameters="p"), ("'parameters p'", "'parameters p'")),
        (of(files="a"), of(version="2"), ("'files a'", "'version 2'")),
        (of(), of(), ("'unknown'", "'unknown'")),
        (
            of(files="a", draft="d"),
            of(files="a", draft="e"),
            ("'draft files d'", "'draft files e'"),
        ),
        (of(files="a", mixes=True), of(files="b"), ("'files a'", "'files b'")),
    ],
)
def test_other_weights_are_refused_with_both_values(
    reader: HandoffHello, source: HandoffHello, values: tuple[str, str]
) -> None:
    with pytest.raises(Refused) as caught:
        negotiate(reader, source)
    assert caught.value.field == "weights"
    expected = f"weights is {values[0]} on the decode side, {values[1]} on the prefill side: "
    assert str(caught.value).startswith(expected)
    for side in (reader, source):  # negative control: both engines mix weights on purpose
        side.identity = replace(side.identity, mixes_weights=True)
    assert all(value in negotiate(reader, source).mixed_weights for value in values)


@pytest.mark.parametrize(
    ("reader", "source"),
    [
        (of(files="a", version="1", parameters="p"), of(files="a", version="2", parameters="q")),
        (of(files="a", version="1"), of(version="1", parameters="p")),
        (of(files="a", parameters="p"), of(parameters="p")),
        (of(tp=2, version="1", parameters="p"), of(version="1", parameters="q")),
        (of(files="a", draft="d"), of(files="a")),
    ],
)
def test_the_same_weights_meet_by_what_both_sides_know(
    reader: HandoffHello, source: HandoffHello
) -> None:
    assert negotiate(reader, source).mixed_weights == ""
    assert decode(encode(reader)) == reader


def test_an_older_hello_is_refused_for_its_protocol_and_not_its_lack_of_weights() -> None:
    fields = msgspec.msgpack.decode(encode(hello(protocol=(1, 1))))
    del fields["identity"]
    older = decode(msgspec.msgpack.encode(fields))
    assert isinstance(older, HandoffHello)
    for sides in ((older, hello()), (hello(), older)):
        with pytest.raises(Refused, match="upgrade the older KVConnect") as caught:
            negotiate(*sides)
        assert caught.value.field == "protocol"
