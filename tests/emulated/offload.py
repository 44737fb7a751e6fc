"""An engine's worker with a host tier, on an emulated device: what it computes, loads and stores,
in steps that are launched ahead of the device, and what must be where when the device gets there.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

import pytest
import torch

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy.calibration import CopyThreshold
from kvconnect.copy.cuda import CudaCopier
from kvconnect.copy.staged import Staging
from kvconnect.offload import copy_executor, copy_schedule, host_tier, layer_loads
from kvconnect.offload.host_tier import HostTier
from kvconnect.offload.messages import GroupBlocks, LoadBlocks, StoreBlocks
from kvconnect.types import FailureCause, JobId
from tests.emulated.device import EmulatedDriver, EmulatedEvent, Emulator, OnDevice, Site
from tests.emulated.world import World

BLOCKS, LAYERS, RUN, SLOTS = 6, 3, 64, 3
STEPS = 7
PATIENCE_S = 1e9  # the world's time; no deadline plays a part here

CHOICES = {
    "kernel": CopyThreshold(1 << 30, 1 << 30, fewest_rows=1),
    "dma": CopyThreshold(0, 0),
    "staged": CopyThreshold(0, 0, staged_store=1 << 30, staged_load=1 << 30),
}
SEGMENT_BYTES = 2048

LARGE_RUN = 128  # blocks of these are hashed on the device


def content(number: int, layer: int, size: int) -> bytes:
    """Return a layer's part of the block whose content has a number; 0 is an empty block."""
    return bytes([number % 256, layer if number else 0, number // 256, 0]) * (size // 4)


@dataclass
class Shape:
    """What a run is like."""

    run: int
    way: str
    digest: str
    micro_batches: int
    hooks: bool
    ahead: int  # steps that are launched before the first is waited for
    breaks: float  # share of the copies that break off
    early: bool  # the worker is closed while copies are on their way

    @classmethod
    def drawn(cls, random: Random) -> Shape:
        return cls(
            run=random.choice((RUN, LARGE_RUN)),
            way=random.choice(("kernel", "dma", "dma", "staged")),
            digest=random.choice(("off", "full")),
            micro_batches=random.choice((1, 2)),
            hooks=random.random() < 0.8,
            ahead=random.choice((1, 2, 4)),
            breaks=random.choice((0.0, 0.0, 0.3)),
            early=random.random() < 0.2,
        )


@dataclass(eq=False)
class Request:
    """Some blocks and what they hold."""

    blocks: dict[int, int]  # block -> content number
    steps: int  # left
    loading: JobId | None = None
    sync: bool = False
    slots: list[int] = field(default_factory=list)  # that are read for it
    void: bool = False  # its load failed: what it computed with it is thrown away


class Worker:
    """The model. All of it runs on the engine's thread."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator, self.random = emulator, emulator.world.random
        self.shape = shape = Shape.drawn(self.random)
        size = shape.run
        runs = tuple(ByteRun(i * BLOCKS * size, size, size) for i in range(LAYERS))
        self.geometry = Geometry((GroupGeometry(runs, BLOCKS),))
        self.area = torch.zeros(BLOCKS * LAYERS * size, dtype=torch.uint8)
        self.tier = HostTier(
            SLOTS * self.geometry.slot_bytes,
            shape.digest,  # type: ignore[arg-type]
            self.geometry,
            OnDevice(self.area),  # type: ignore[arg-type]
            self._copier,
        )
        self.tier.executor.sync.layers = {f"layer{i}": (0, i + 1) for i in range(LAYERS)}
        self.numbers, self.jobs = count(1), count(1)
        self.free = list(range(BLOCKS))
        self.requests: list[Request] = []
        self.host: dict[int, int] = {}  # slot -> content number
        self.reading: Counter[int] = Counter()  # by slot
        self.storing: dict[JobId, tuple[int, int, int]] = {}  # block, slot, content number
        self.ended: set[int] = set()  # blocks of requests that are over while a store reads them
        self.launched: deque[EmulatedEvent] = deque()  # after each step
        self.wrong: list[tuple[Request, str]] = []

    def _copier(self, area: OnDevice, arena: torch.Tensor, geometry: Geometry) -> CudaCopier:
        driver = EmulatedDriver(self.emulator, self.shape.breaks)
        make_staging = partial(Staging, driver, segment_bytes=SEGMENT_BYTES)
        return CudaCopier(
            area.tensor, arena, geometry, driver, CHOICES[self.shape.way], make_staging
        )

    def run(self) -> None:
        """Some steps, and the last words of all jobs."""
        for _ in range(STEPS):
            self._step()
        while not self.shape.early and self._is_busy():
            self.emulator.world.block(lambda: bool(self.tier.executor._done))
            self._collect()
        copying = [s for s in self.emulator.streams if s is not self.emulator.default]
        for slot in self.host if not self._is_busy() else ():
            self._check(slot)
        self.tier.close()
        assert all(stream.query() for stream in copying), "a copy outlives the worker"
        self._wait_for_the_device(0)
        wrong = [what for request, what in self.wrong if not request.void]
        assert not wrong, wrong

    def _is_busy(self) -> bool:
        return bool(self.storing) or any(request.loading for request in self.requests)

    def _step(self) -> None:
        """What a worker does for one step of its engine, and what the scheduler does before."""
        self._collect()
        self._fetch()
        fresh, loads = self._admit()
        stores = self._plan_stores(fresh)
        sync, hooks = self.tier.executor.sync, self.shape.hooks
        self.tier.begin(loads, stores)
        running = [r for r in self.requests if r.loading is None or r.sync]
        sync.before_forward(hooks)
        for layer in range(LAYERS):
            for part in range(self.shape.micro_batches):
                if hooks:
                    sync.before_layer(f"layer{layer}")
                some = running[part :: self.shape.micro_batches]
                self.emulator.launch(partial(self._attend, layer, some, fresh))
        self.tier.submit_stores()
        sync.finish()
        self._collect()
        self._retire([request for request in running if not request.void])
        self.launched.append(self.emulator.event())
        self.launched[-1].record()
        self._wait_for_the_device(self.shape.ahead)

    def _collect(self) -> None:
        """Take in what ended."""
        for done in self.tier.poll():
            failures = done.report.failures
            assert self.shape.breaks or not failures, done.report
            assert all(failure.cause is not FailureCause.DIGEST for failure in failures), failures
            if done.job.job in self.storing:
                self._stored(done.job.job, good=not failures)
            else:
                self._loaded(done.job.job, good=not failures)

    def _stored(self, job: JobId, good: bool) -> None:
        block, slot, number = self.storing.pop(job)
        if good:
            self.host[slot] = number
            self._check(slot)
        if block in self.ended:
            self.ended.remove(block)
            self.free.append(block)

    def _check(self, slot: int) -> None:
        number = self.host[slot]
        found = bytes(self.tier.store.view(slot, LAYERS * self.shape.run))
        assert found == self._whole(number), f"slot {slot} does not hold {number}"

    def _whole(self, number: int) -> bytes:
        return b"".join(content(number, layer, self.shape.run) for layer in range(LAYERS))

    def _loaded(self, job: JobId, good: bool) -> None:
        """A load ended; a request whose load failed is aborted."""
        (request,) = (r for r in self.requests if r.loading == job)
        request.loading = None
        self.reading.subtract(request.slots)
        if not good:
            request.void = True
            self.requests.remove(request)
            self.free += request.blocks

    def _fetch(self) -> None:
        """A tier below writes a block into a slot that nobody uses, on a thread of its own."""
        slots = self._unused()
        if slots and self.random.random() < 0.3:
            slot = self.random.choice(slots)
            self.host[slot] = next(self.numbers)
            nbytes = LAYERS * self.shape.run
            self.tier.store.view(slot, nbytes)[:] = self._whole(self.host[slot])
            self.tier.store.seal(slot, nbytes)

    def _unused(self) -> list[int]:
        """Return slots that no job reads or writes."""
        taken = {slot for _, slot, _ in self.storing.values()} | set(+self.reading)
        return [slot for slot in range(SLOTS) if slot not in taken]

    def _admit(self) -> tuple[dict[int, int], list[LoadBlocks]]:
        """Admit a request that computes a block, one that loads some, or none."""
        fresh: dict[int, int] = {}
        loads: list[LoadBlocks] = []
        if self.free and self.random.random() < 0.8:
            fresh[self._take()] = next(self.numbers)
            self.requests.append(Request(dict(fresh), self.random.choice((1, 2))))
        slots = self.random.sample(sorted(self.host), min(2, len(self.host)))
        if slots and len(self.free) >= len(slots) and self.random.random() < 0.8:
            blocks = [self._take() for _ in slots]
            job, sync = JobId(next(self.jobs)), self.random.random() < 0.5
            part = GroupBlocks(0, array("q", blocks), array("q", slots))
            loads.append(LoadBlocks(job, "r", (part,), PATIENCE_S, sync))
            held = {b: self.host[s] for b, s in zip(blocks, slots, strict=True)}
            steps = self.random.choice((1, 2))
            self.requests.append(Request(held, steps, job, sync, slots))
            self.reading.update(slots)
        return fresh, loads

    def _take(self) -> int:
        """Take a free block, which the engine zeroes first."""
        block = self.free.pop(self.random.randrange(len(self.free)))

        def clear() -> None:
            for layer in range(LAYERS):
                self._view(block, layer).zero_()

        self.emulator.launch(clear)
        return block

    def _plan_stores(self, fresh: dict[int, int]) -> list[StoreBlocks]:
        """Store what this step computes, over what nobody reads."""
        stores = []
        for block, number in fresh.items():
            slots = self._unused()
            if not slots:
                break
            slot, job = self.random.choice(slots), JobId(next(self.jobs))
            self.host.pop(slot, None)
            self.storing[job] = block, slot, number
            part = GroupBlocks(0, array("q", [block]), array("q", [slot]))
            stores.append(StoreBlocks(job, (part,), PATIENCE_S))
        return stores

    def _attend(self, layer: int, requests: list[Request], fresh: dict[int, int]) -> None:
        """Write what is computed now, and read what is there."""
        for request in requests:
            for block, number in request.blocks.items():
                wanted, view = content(number, layer, self.shape.run), self._view(block, layer)
                if fresh.get(block) == number:
                    view.copy_(torch.frombuffer(bytearray(wanted), dtype=torch.uint8))
                elif view.numpy().tobytes() != wanted:
                    self.wrong.append((request, f"layer {layer} of block {block} is not {number}"))

    def _view(self, block: int, layer: int) -> torch.Tensor:
        size = self.shape.run
        return self.area[(layer * BLOCKS + block) * size :][:size]

    def _retire(self, running: list[Request]) -> None:
        """End requests as soon as their last step has been launched."""
        busy = {block for block, _, _ in self.storing.values()}
        for request in running:
            request.steps -= 1
            if request.steps:
                continue
            self.requests.remove(request)
            self.ended.update(busy & request.blocks.keys())
            self.free += request.blocks.keys() - busy

    def _wait_for_the_device(self, ahead: int) -> None:
        while len(self.launched) > ahead:
            self.launched.popleft().synchronize()


def play(random: Random, disabled: frozenset[Site] = frozenset()) -> Emulator:
    """Run the model once; raise if something is wrong."""
    world = World(random)
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulator = Emulator(world, disabled)
        emulator.install(monkeypatch)
        monkeypatch.setattr(host_tier, "device_node", lambda device: None)
        monkeypatch.setattr(host_tier.HostArena, "pin", lambda self: True)
        monkeypatch.setattr(layer_loads, "PIECE_BYTES", 1)  # a piece per layer
        monkeypatch.setattr(copy_schedule, "CHUNK_BYTES", 2 * LAYERS * RUN)
        for module in (copy_executor, layer_loads):
            monkeypatch.setattr(module, "threading", world.threading)
            monkeypatch.setattr(module, "time", world.time)
        world.run(lambda: Worker(emulator).run())
    return emulator
