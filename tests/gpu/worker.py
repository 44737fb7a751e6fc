"""Copies of one worker on a CUDA device, for tests."""

from __future__ import annotations

import time
from array import array
from functools import partial

import torch

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy import open_driver
from kvconnect.copy.calibration import CopyThreshold
from kvconnect.copy.cuda import CudaCopier
from kvconnect.copy.staged import Staging
from kvconnect.offload.copy_executor import CopyExecutor, FinishedCopy
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.messages import GroupBlocks, LoadBlocks, StoreBlocks
from kvconnect.offload.streams import Fence, make_streams
from kvconnect.types import JobId

DEVICE = torch.device("cuda")
KERNEL, DMA = CopyThreshold(1 << 40, 1 << 40, fewest_rows=1), CopyThreshold(0, 0)
STAGED = CopyThreshold(0, 0, staged_store=1 << 40, staged_load=1 << 40)
PATIENCE_S = 60.0


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def layers(count: int, blocks: int, page: int, gap: int, start: int) -> Geometry:
    """Blocks of ``count`` layers, with ``gap`` bytes between their pages, from ``start`` on."""
    stride = page + gap
    segments = tuple(ByteRun(start + i * blocks * stride, stride, page) for i in range(count))
    return Geometry((GroupGeometry(segments, blocks),))


class Worker:
    """A KV cache of two layers, a page-locked arena and the executor between them."""

    def __init__(self, choice: CopyThreshold, blocks: int = 64, page: int = 256 << 10) -> None:
        self.geometry = layers(2, blocks, page, 0, 0)
        self.area = noise(self.geometry.area_bytes, 6).to(DEVICE)
        self.store = HostArena(blocks, self.geometry.slot_bytes, "full")
        assert self.store.pin()
        self.driver = open_driver(DEVICE)
        arena = self.store.tensor()
        staging = partial(Staging, self.driver, segment_bytes=16 << 20)
        self.copier = CudaCopier(self.area, arena, self.geometry, self.driver, choice, staging)
        self.executor = CopyExecutor(self.copier, self.store, self.geometry, make_streams(DEVICE))
        torch.cuda.synchronize()

    def submit(
        self,
        number: int,
        kind: type[StoreBlocks] | type[LoadBlocks],
        blocks: range,
        fence: Fence | None = None,
        sync: bool = False,
    ) -> None:
        """Copy blocks to or from the slots of the same numbers, behind the current stream unless
        there is a ``fence``."""
        part = GroupBlocks(0, array("q", blocks), array("q", blocks))
        job = (
            LoadBlocks(JobId(number), "r", (part,), PATIENCE_S, sync)
            if kind is LoadBlocks
            else StoreBlocks(JobId(number), (part,), PATIENCE_S)
        )
        self.executor.submit(job, self.executor.fence() if fence is None else fence)

    def finished(self, count: int) -> list[FinishedCopy]:
        """Wait for the next ``count`` jobs to end."""
        found: list[FinishedCopy] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} jobs ended"
            found += self.executor.poll()
            time.sleep(0)
        return found

    def ended(self, count: int) -> list[JobId]:
        """Wait for the next ``count`` jobs, none of which may fail."""
        found = self.finished(count)
        assert all(not done.report.failures and done.seconds > 0 for done in found)
        return [done.report.job for done in found]

    def close(self) -> None:
        self.executor.close()
        self.store.close()
