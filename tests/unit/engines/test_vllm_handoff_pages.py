"""Hand-offs of every cache that vLLM's own code makes: rows between layouts, or whole blocks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvconnect.cache.pages import LayerPages, unit_segments
from kvconnect.disaggregation.sessions import HandoffSession, HandoffSessions, PathPreference
from kvconnect.engines.vllm import handoff_pages, translate
from kvconnect.errors import Incompatible, Refused
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.messages import HandoffHello
from kvconnect.protocol.negotiation import negotiate
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.testing.inproc import InprocTransport
from kvconnect.transport.base import PeerId
from kvconnect.types import Rank
from tests.unit.engines import vllm_caches
from tests.unit.engines.vllm_caches import MODELS, Cache, area_of, block_of, full, make, mixed

WHOLE = {
    "deepseek_v4": True,
    "mimo": False,
    "hidden states": True,
    "llama with EAGLE of more heads": True,
}
"""Models with groups whose blocks are moved whole, and whether vLLM groups them so by itself; else
it does without its manager for hybrids."""

HANDED_OFF = [model for model in MODELS if not WHOLE.get(model)]


def wire(
    cache: Cache, layers: list[LayerPages], block: int
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """One wire block of layers, and where its runs are."""
    heads = (0, layers[0].heads)
    segments, phases, size = unit_segments(layers, heads, layers[0].tokens, "HNC")
    assert phases == 1
    runs = [
        (segments[i] + block * segments[i + 1], segments[i + 2]) for i in range(0, len(segments), 3)
    ]
    area = area_of(cache)
    moved = torch.cat([area[start : start + length] for start, length in runs])
    assert moved.numel() == size
    return moved, runs


@pytest.mark.parametrize("model", HANDED_OFF)
def test_pages_reach_a_cache_of_another_layout(model: str) -> None:
    """Prefill keeps tokens outside heads, decode the other way round; all layers at once, then one
    by one."""
    source, reader = (make(MODELS[model], layout) for layout in ("BLNHC", "BLHNC"))
    sent, received = (handoff_pages.handoff_pages(c.config, c.views) for c in (source, reader))
    for theirs, ours in zip(sent, received, strict=True):
        assert [page.name for page in theirs] == [page.name for page in ours]
        units = [list(range(len(ours))), *([number] for number in range(len(ours)))]
        for unit in units:
            moved, _ = wire(source, [theirs[n] for n in unit], 1)
            _, runs = wire(reader, [ours[n] for n in unit], 2)
            area, start = area_of(reader), 0
            for offset, length in runs:
                area[offset : offset + length] = moved[start : start + length]
                start += length
            for page in (ours[n] for n in unit):
                there, here = source.views[page.name], reader.views[page.name]
                assert torch.equal(block_of(here, 2), block_of(there, 1))
                assert not torch.equal(block_of(here, 2), block_of(there, 3))  # control: swapped


def test_rows_may_differ_within_a_group() -> None:
    cache = make(MODELS["deepseek_v32"])
    (pages,) = handoff_pages.handoff_pages(cache.config, cache.views)
    assert handoff_pages.row_bytes(pages) == [1152, 132] * 3
    assert handoff_pages.row_bytes(pages[::2]) == 1152


def hello_of(cache: Cache, layout: str = "BLHNC", tp: int = 1) -> HandoffHello:
    """What a worker with this cache greets others with."""
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=layout),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
    )
    pages = handoff_pages.handoff_pages(cache.config, cache.views)
    return HandoffHello(
        software="s",
        engine_id="e",
        epoch=1,
        rank=Rank(0, tp, 0, 1),
        identity=Identity(weights=Weights(files="same")),
        format=handoff_pages.whole_format(config, cache.config, cache.views),
        groups=handoff_pages.group_hellos(config, cache.config, cache.views, pages),
    )


@pytest.mark.parametrize("model", WHOLE)
def test_blocks_of_layers_without_common_rows_are_moved_whole(model: str) -> None:
    source, reader = (make(MODELS[model], hybrid=WHOLE[model]) for _ in range(2))
    sent, received = (handoff_pages.handoff_pages(c.config, c.views) for c in (source, reader))
    whole = handoff_pages.whole_groups(source.config, source.views)
    assert any(whole)
    for is_whole, theirs, ours in zip(whole, sent, received, strict=True):
        assert {(p.heads, p.tokens) for p in ours} == {(1, 1)} or not is_whole
        for there, here in zip(theirs, ours, strict=True):
            moved, _ = wire(source, [there], 1)
            area, start = area_of(reader), 0
            for offset, length in wire(reader, [here], 2)[1]:
                area[offset : offset + length] = moved[start : start + length]
                start += length
            old, new = source.views[there.name], reader.views[here.name]
            assert torch.equal(block_of(new, 2), block_of(old, 1))
            assert not torch.equal(block_of(new, 2), block_of(old, 3))  # control: swapped


def test_a_session_moves_each_layer_of_a_whole_block_as_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(translate, "can_split_pages", lambda *_: True)
    cache = make(MODELS["mimo"], hybrid=False)
    (pages,) = handoff_pages.handoff_pages(cache.config, cache.views)
    hello, stats = hello_of(cache), OffloadingConnectorStats()
    sessions = HandoffSessions(hello, (pages,), InprocTransport(), stats, PathPreference())
    session = HandoffSession(PeerId(1), inbound=True, since=0.0)
    sessions._resolve_units(session, negotiate(hello, hello))
    assert {view.ratio for view in session.views.values()} == {1}
    together, *apart = session.units
    assert together.block_bytes == sum(unit.block_bytes for unit in apart)
    for unit, page in zip(apart, pages, strict=True):
        view = cache.views[page.name]
        size = block_of(view, 0).numel()
        assert (list(unit.segments), unit.block_bytes) == (
            [page.offset, view.stride(0) * view.element_size(), size],
            size,
        )
    # Control: in the cache that vLLM makes by itself, heads are apart, and a block is not one run.
    groups = handoff_pages.handoff_pages(*(other := make(MODELS["mimo"])))
    assert not any(handoff_pages.whole_groups(*other))
    assert {(page.heads, page.tokens) for group in groups for page in group} == {(4, 64), (8, 64)}


def test_whole_blocks_go_to_an_equal_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "can_split_pages", lambda *_: True)
    specs = MODELS["mimo"]
    cache = make(specs, hybrid=False)
    same = hello_of(cache)
    assert same.format == {
        "block_size": "64",
        "kv_cache_layout": "BLHNC",
        "tensor_parallel_size": 1,
    }
    assert len(negotiate(same, hello_of(make(specs, hybrid=False))).groups) == 1
    others = {
        "kv_cache_layout is 'BLHNC' .* 'BLNHC'": hello_of(
            make(specs, "BLNHC", hybrid=False), "BLNHC"
        ),
        "tensor_parallel_size is 1 .* 2": hello_of(cache, tp=2),
        "block_size is '64' .* '32'": hello_of(
            make({n: dataclasses.replace(s, block_size=32) for n, s in specs.items()}, hybrid=False)
        ),
        r"layer model\.layers\.0: row_bytes": hello_of(
            make(mixed(vllm_caches.window(heads=8, head=64), full(heads=4)), hybrid=False)
        ),
    }
    for text, other in others.items():
        with pytest.raises(Refused, match=text) as refused:
            negotiate(same, other)
        assert "\n" not in str(refused.value)


def test_a_whole_block_in_several_pieces_is_refused() -> None:
    cache = make(MODELS["mimo"], hybrid=False)
    name = "model.layers.0"
    apart = cache.views[name][..., :-1]  # as if something stood between its rows
    with pytest.raises(Incompatible, match=rf"layer {name}: a block lies in 512 pieces"):
        handoff_pages.handoff_pages(cache.config, cache.views | {name: apart})
