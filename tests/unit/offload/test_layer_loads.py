"""Loads inside a step: each layer waits for its own bytes, and only for those."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.errors import TransferFailed
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.messages import GroupBlocks, LoadBlocks
from kvconnect.types import JobId

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from kvconnect.copy.base import Copier, Runs
from kvconnect.copy.reference import ReferenceCopier
from kvconnect.offload import layer_loads as layers_module
from kvconnect.offload.copy_executor import CopyExecutor, FinishedCopy
from kvconnect.offload.layer_loads import pieces
from kvconnect.offload.streams import Fence, HostStreams

LAYERS, BLOCKS, RUN = 3, 4, 64
SEGMENTS = tuple(ByteRun(layer * BLOCKS * RUN, RUN, RUN) for layer in range(LAYERS))
GEOMETRY = Geometry((GroupGeometry(SEGMENTS, BLOCKS),))
PLACES = {f"layer{layer}": (0, layer + 1) for layer in range(LAYERS)}
WAIT_S = 20.0  # a bound for a test that would hang, not a time that is measured


class Stepwise(Copier):
    """Loads each piece when ``gate`` lets it; ``broken`` is the first run that raises."""

    def __init__(self, area: torch.Tensor, arena: torch.Tensor) -> None:
        self.inner = ReferenceCopier(area, arena, GEOMETRY)
        self.area, self.arena = area, arena
        self.gate = threading.Semaphore(0)
        self.broken = LAYERS

    def store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.inner.store(group, block_ids, slots)

    def load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        raise AssertionError("a load inside a step comes layer by layer")

    def enqueue_runs(
        self, group: int, block_ids: Sequence[int], slots: Sequence[int], runs: Runs
    ) -> None:
        assert self.gate.acquire(timeout=WAIT_S)
        for run in range(*runs):
            if run >= self.broken:
                raise TransferFailed("injected")
            for block, slot in zip(block_ids, slots, strict=True):
                held = self.arena[slot * GEOMETRY.slot_bytes + run * RUN :][:RUN]
                self.area[run * BLOCKS * RUN + block * RUN :][:RUN] = held


class MarkedStreams(HostStreams):
    """Notes which fences the engine's thread follows; they are numbers."""

    def __init__(self) -> None:
        self.fences = 0
        self.followed: list[Fence] = []

    def fence(self) -> Fence:
        self.fences += 1
        return self.fences

    def follow(self, fence: Fence) -> None:
        self.followed.append(fence)


class Rig:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        size = (LAYERS * BLOCKS * RUN,)
        self.area = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        self.store = HostArena(BLOCKS, GEOMETRY.slot_bytes, "off")
        self.copier = Stepwise(self.area, self.store.tensor())
        self.streams = MarkedStreams()
        self.executor = CopyExecutor(self.copier, self.store, GEOMETRY, self.streams)
        self.sync = self.executor.sync
        self.sync.layers = PLACES
        self.copier.store(0, range(BLOCKS), range(BLOCKS))
        self.wanted = self.area.clone()
        self.area.zero_()

    def load(self, number: int = 1, slots: Sequence[int] = range(BLOCKS)) -> None:
        part = GroupBlocks(0, array("q", range(len(slots))), array("q", slots))
        empty = GroupBlocks(0, array("q"), array("q"))
        load = LoadBlocks(JobId(number), "r", (empty, part), 5.0, True)
        self.executor.submit(load, self.executor.fence())

    def step(self, hooks: bool = True) -> None:
        """The hooks of a forward, as an engine calls them."""
        self.sync.before_forward(hooks)
        for name in PLACES if hooks else ():
            self.sync.before_layer(name)

    def there(self) -> list[bool]:
        """Whether each layer has its bytes."""
        halves = zip(self.area.chunk(LAYERS), self.wanted.chunk(LAYERS), strict=True)
        return [torch.equal(found, wanted) for found, wanted in halves]

    def ended(self) -> list[FinishedCopy]:
        self.sync.finish()
        return self.executor.poll()

    def close(self) -> None:
        self.copier.gate.release(100)
        self.executor.close()
        self.store.close()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(layers_module, "PIECE_BYTES", 1)  # a piece for every layer
    rig = Rig()
    yield rig
    rig.close()


def blocks(work: Callable[[], None]) -> threading.Thread | None:
    """Run ``work`` on a thread; return it if it is still at it after a while."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.1)
    return thread if thread.is_alive() else None


def test_runs_are_cut_into_pieces_of_some_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "PIECE_BYTES", 2 * RUN)
    (group,) = GEOMETRY.groups
    assert list(pieces(group, 1)) == [(0, 2), (2, 3)]
    assert list(pieces(group, 2)) == [(0, 1), (1, 2), (2, 3)]
    monkeypatch.setattr(layers_module, "PIECE_BYTES", 1 << 30)
    assert list(pieces(group, 2)) == [(0, LAYERS)]


def test_a_layer_waits_for_its_own_bytes_and_no_others(rig: Rig) -> None:
    rig.step()  # a forward without loads tells which layers have a hook
    rig.load()
    assert blocks(lambda: rig.sync.before_forward(hooks=True)) is None
    for layer, name in enumerate(PLACES):
        waiting = blocks(lambda name=name: rig.sync.before_layer(name))
        assert waiting is not None  # negative control: nothing of it is there
        rig.copier.gate.release()
        waiting.join(WAIT_S)
        assert rig.there() == [other <= layer for other in range(LAYERS)]
    (done,) = rig.ended()
    assert not done.report.failures and done.nbytes == LAYERS * BLOCKS * RUN
    assert torch.equal(rig.area, rig.wanted)


def test_the_device_follows_the_fence_of_each_layer(rig: Rig) -> None:
    """Of the first piece that has its bytes; while the load is on its way."""
    rig.step()
    rig.load()
    held = rig.streams.fences  # taken for the load itself
    rig.copier.gate.release(2)
    for name in ("layer0", "layer1", "layer0"):  # two halves of a batch ask for each layer
        rig.sync.before_layer(name)
    assert rig.streams.followed == [held + 1, held + 2, held + 1]
    rig.copier.gate.release()
    rig.ended()
    rig.streams.followed.clear()
    rig.step()  # the next step follows nothing of it
    assert rig.streams.followed == []


@pytest.mark.parametrize("seen", [[], ["layer0", "layer2"]], ids=["none", "not all"])
def test_layers_without_a_hook_are_waited_for_ahead_of_the_forward(
    rig: Rig, seen: list[str]
) -> None:
    for name in seen:
        rig.sync.before_layer(name)
    rig.load()
    waiting = blocks(lambda: rig.sync.before_forward(hooks=True))
    assert waiting is not None
    needed = 2 if seen else LAYERS
    rig.copier.gate.release(needed)
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert rig.there()[:needed] == [True] * needed


def test_a_forward_without_hooks_waits_for_everything(rig: Rig) -> None:
    rig.step()
    rig.load()
    rig.copier.gate.release(LAYERS - 1)
    waiting = blocks(lambda: rig.sync.before_forward(hooks=False))
    assert waiting is not None
    rig.copier.gate.release()
    waiting.join(WAIT_S)
    assert rig.there() == [True] * LAYERS


def test_without_places_everything_is_waited_for(rig: Rig) -> None:
    rig.sync.layers = {}
    rig.load()
    rig.sync.before_layer("layer0")
    assert blocks(lambda: rig.sync.before_forward(hooks=True)) is not None
    rig.copier.gate.release(LAYERS)


def test_other_groups_and_empty_loads_hold_up_nothing(rig: Rig) -> None:
    rig.sync.layers = {**PLACES, "elsewhere": (1, 1)}
    rig.load(slots=())
    rig.sync.before_layer("elsewhere")
    rig.step()
    (done,) = rig.ended()
    assert not done.report.failures


def test_a_load_that_breaks_midway_releases_the_step_and_fails(rig: Rig) -> None:
    rig.step()
    rig.copier.broken = 1
    rig.copier.gate.release(LAYERS)
    rig.load()
    rig.step()
    (done,) = rig.ended()
    assert [failure.cause.value for failure in done.report.failures] == ["copy"] * BLOCKS
    rig.copier.broken = LAYERS
    rig.copier.gate.release(LAYERS)
    rig.load(2)
    rig.step()
    (done,) = rig.ended()
    assert not done.report.failures and torch.equal(rig.area, rig.wanted)


def test_a_missing_slot_keeps_the_blocks_before_it(rig: Rig) -> None:
    rig.copier.gate.release(LAYERS)
    rig.load(slots=[0, 1, -1, 3])
    rig.step(hooks=False)
    (done,) = rig.ended()
    failures = [(f.block_id, f.cause.value) for f in done.report.failures]
    assert failures == [(2, "missing"), (3, "skipped")]
    view, wanted = (area.view(LAYERS, BLOCKS, RUN) for area in (rig.area, rig.wanted))
    assert torch.equal(view[:, :2], wanted[:, :2]) and not view[:, 2:].any()


def test_what_a_step_was_held_up_for_is_counted_once(rig: Rig) -> None:
    rig.step()
    assert rig.sync.finish() == 0.0
    rig.load()
    rig.copier.gate.release(LAYERS)
    rig.step()
    assert rig.sync.finish() > 0.0
    assert rig.sync.finish() == 0.0


def test_a_stuck_copy_thread_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "_STUCK_S", 0.05)
    rig.load()
    for wait in (lambda: rig.sync.before_layer("layer1"), rig.sync.finish):
        with pytest.raises(TransferFailed, match="synchronous load 1 did not end"):
            wait()
    rig.copier.gate.release(LAYERS)
