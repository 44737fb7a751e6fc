"""The linker on an emulated device with SGLang's two streams: the scheduler's, and the model's,
whose forwards are launched while pages they need are loaded and pages of others are stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from linecache import getline
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache import unified_cache_linker
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import publish

import kvconnect
from kvconnect.cache.layout import Geometry
from kvconnect.copy.calibration import CopyThreshold
from kvconnect.copy.cuda import CudaCopier
from kvconnect.engines.sglang import layerwise_loads, linker_host_tier
from kvconnect.engines.sglang import linker as linker_module
from kvconnect.engines.sglang.layerwise_loads import LayerCounter
from kvconnect.engines.sglang.linker import KVConnectLinker
from kvconnect.engines.sglang.linker_host_tier import PoolTier
from kvconnect.offload import copy_executor, host_tier, layer_loads
from tests.emulated.device import EmulatedDriver, EmulatedEvent, Emulator, OnDevice, Site
from tests.emulated.mutants import lines_of, sites_of, unnoticed, waits_in
from tests.emulated.world import World
from tests.sglang.linker_bench import (
    LAYERS,
    PAGE,
    buffers_of,
    names,
    params_for,
    swa_pool,
    transfers,
)

PACKAGE = Path(kvconnect.__file__).parent
STEPS, ROOM = 6, 5  # pages of either pool that are used
RUNS = 100
MUTANT_RUNS = 600  # taking out the fence of loads shows in one run of a hundred
COMPONENTS = (ComponentType.FULL, ComponentType.SWA)
TIMING = "events.start.record()"
LOAD_END = "events.end.record()"
"""The forward waits for a fence of its own, and no slot is used again in this model. What the end
of a load protects is in ``tests/emulated/offload.py``."""


@pytest.fixture(scope="module", autouse=True)
def published() -> Iterator[None]:
    reset_context()
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test")
    yield
    reset_context()


@dataclass(frozen=True)
class Pages:
    """Where one prompt's page is, of either pool, and what is in it."""

    full: int
    window: int
    number: int


class Scheduler:
    """The model of SGLang. All of it runs on the scheduler's thread."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator, self.random = emulator, emulator.world.random
        kvcache = swa_pool()
        buffers = buffers_of(kvcache)
        full, window = buffers[PoolName.KV], buffers[PoolName.SWA]
        self.layers = [[full[0], full[2]], list(window), [full[1], full[3]]]  # K and V of each
        self.forward = emulator.stream()
        self.linker = KVConnectLinker(
            None,
            params_for(kvcache, COMPONENTS),
            components=set(COMPONENTS),
            extra_config={"host_bytes": "2MiB", "digest": "off"},
            forward_stream=self.forward,  # type: ignore[arg-type]
        )
        self.whole_graph = self.random.random() < 0.5  # SGLang waits once, for the last layer
        self.ahead = self.random.choice((1, 2, 4))
        self.free = [list(range(1, ROOM + 1)), list(range(1, ROOM + 1))]
        self.numbers = count(1)
        self.stored: dict[str, int] = {}
        self.offloads: deque[tuple[str, Pages]] = deque()
        self.launched: deque[EmulatedEvent] = deque()
        self.wrong: list[str] = []

    def run(self) -> None:
        for step in range(STEPS):
            self._collect()
            if all(self.free) and self.random.random() < 0.8:
                self._compute()
            self._collect()
            if all(self.free) and self.stored:
                self._load(f"request {step}")
            while len(self.launched) > self.ahead:
                self.launched.popleft().synchronize()
        self._collect()
        while self.offloads:
            self.emulator.world.block(self._has_ended)
            self._collect()
        while self.launched:
            self.launched.popleft().synchronize()
        self.linker.close()
        assert not self.wrong, self.wrong

    def _has_ended(self) -> bool:
        return any(pool.tier.executor._done for pool in self.linker.tiers.values())

    def _take(self, number: int) -> Pages:
        full, window = (pages.pop(self.random.randrange(len(pages))) for pages in self.free)
        return Pages(full, window, number)

    def _give_back(self, pages: Pages) -> None:
        self.free[0].append(pages.full)
        self.free[1].append(pages.window)

    def _collect(self) -> None:
        """Take in offloads that ended, in order: their pages may be used again."""
        for _ in range(self.linker.num_completed_offloads()):
            key, pages = self.offloads.popleft()
            assert self.linker.pop_completed_offload()
            self.stored[key] = pages.number
            self._give_back(pages)

    def _compute(self) -> None:
        """Launch a forward that writes a page, and offload it at once."""
        pages = self._take(next(self.numbers))
        key = names(1, start=pages.number)[0]
        self._launch(lambda layer: self._write(layer, pages))
        assert self.linker.offload(transfers([key], [pages.full], [pages.window]))
        self.offloads.append((key, pages))

    def _load(self, rid: str) -> None:
        """Launch a forward that reads a page which is loaded for it."""
        key = self.random.choice(sorted(self.stored))
        pages = self._take(self.stored[key])
        assert self.linker.load(rid, transfers([key], [pages.full], [pages.window]))
        index = self.linker.start_layer_wise_loading()
        counter = self.linker.layer_done_counter
        counter.set_consumer(index)
        if self.whole_graph:
            counter.wait_until(LAYERS - 1)
        self._launch(lambda layer: self._check(layer, pages), counter)
        assert self.linker.finish_layer_wise_loading(index)
        self._give_back(pages)  # its forward may be on its way still

    def _launch(self, work: Callable[[int], None], counter: LayerCounter | None = None) -> None:
        self.forward.wait_stream(self.emulator.current_stream())
        with self.emulator.on(self.forward):
            for layer in range(LAYERS):
                if counter is not None and not self.whole_graph:
                    counter.wait_until(layer)
                self.emulator.launch(partial(work, layer))
        self.launched.append(self.emulator.event())
        self.launched[-1].record(self.forward)

    def _views(self, layer: int, pages: Pages) -> list[torch.Tensor]:
        page = pages.window if layer == 1 else pages.full
        return [buffer[page * PAGE : (page + 1) * PAGE] for buffer in self.layers[layer]]

    def _write(self, layer: int, pages: Pages) -> None:
        for half, view in enumerate(self._views(layer, pages)):
            view.fill_(pages.number * 10 + layer * 2 + half)

    def _check(self, layer: int, pages: Pages) -> None:
        for half, view in enumerate(self._views(layer, pages)):
            if not view.eq(pages.number * 10 + layer * 2 + half).all():
                self.wrong.append(f"layer {layer} of page {pages} is something else")


def play(random: Random, disabled: frozenset[Site] = frozenset()) -> Emulator:
    """Run the model once; raise if something is wrong."""
    world = World(random)
    original = linker_module.map_pool

    def on_device(entry: Any) -> Any:
        pool = original(entry)
        return replace(pool, area=OnDevice(pool.area))

    def copier(area: OnDevice, arena: torch.Tensor, geometry: Geometry) -> CudaCopier:
        return CudaCopier(
            area.tensor, arena, geometry, EmulatedDriver(emulator), CopyThreshold(0, 0)
        )

    with pytest.MonkeyPatch.context() as monkeypatch:
        emulator = Emulator(world, disabled)
        emulator.install(monkeypatch)
        monkeypatch.setattr(linker_module, "own_stream", emulator.stream)
        monkeypatch.setattr(linker_module, "map_pool", on_device)
        monkeypatch.setattr(PoolTier, "make_copier", staticmethod(copier))
        monkeypatch.setattr(host_tier, "device_node", lambda device: None)
        monkeypatch.setattr(host_tier.HostArena, "pin", lambda self: True)
        runtime = SimpleNamespace(Event=emulator.event)
        monkeypatch.setattr(unified_cache_linker, "device_module", runtime)
        monkeypatch.setattr(unified_cache_linker, "Future", world.future)
        for module in (copy_executor, layer_loads, layerwise_loads, linker_host_tier):
            monkeypatch.setattr(module, "threading", world.threading)
            monkeypatch.setattr(module, "time", world.time)
        world.run(lambda: Scheduler(emulator).run())
    return emulator


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_pages_are_loaded_and_stored_right_in_every_order(seed: int) -> None:
    play(Random(seed))


def test_every_wait_is_needed() -> None:
    sites = [site for site in sites_of(play, 40) if "CudaCopier.__init__" not in site[1]]
    passed = lines_of(sites)
    assert not set(waits_in("engines/sglang/linker.py")) - passed
    sites = [site for site in sites if not is_exempt(site)]
    assert unnoticed(play, sites, MUTANT_RUNS) == []


def is_exempt(site: Site) -> bool:
    ((file, line),) = lines_of([site])
    text = getline(str(PACKAGE / file), line).strip()
    return text == TIMING or (text == LOAD_END and "ChunkCopier._load" in "".join(site))


def goes_wrong(runs: int = RUNS) -> bool:
    for seed in range(runs):
        try:
            play(Random(seed))
        except AssertionError:
            return True
    return False


def one_layer_only(self: LayerCounter, threshold: int) -> None:
    """As if pools loaded in step with one another."""
    if self.consumer_index in self.batches:
        for fence in self.batches[self.consumer_index].fences(threshold):
            self._streams.follow(fence)


def nothing(self: LayerCounter, threshold: int) -> None: ...


@pytest.mark.parametrize("wait", [one_layer_only, nothing])
def test_a_forward_waits_for_every_layer_up_to_its_own(
    wait: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a graph of the whole prefill, SGLang asks once, for the last layer."""
    monkeypatch.setattr(LayerCounter, "wait_until", wait)
    assert goes_wrong()
