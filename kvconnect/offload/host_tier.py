"""A worker's share of the host tier: memory, copy thread, and the stores of the current step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvconnect import memory
from kvconnect.cache.layout import Geometry
from kvconnect.copy import Copier
from kvconnect.errors import ConfigError
from kvconnect.offload.copy_executor import CopyExecutor, FinishedCopy
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.messages import JobReport, LoadBlocks, StoreBlocks
from kvconnect.offload.numa import device_node
from kvconnect.offload.shared_memory import SharedMemory
from kvconnect.offload.streams import make_streams
from kvconnect.settings import DigestMode
from kvconnect.settings.host_memory import check_fits
from kvconnect.types import TransferType

MakeCopier = Callable[[torch.Tensor, torch.Tensor, Geometry], Copier]


class HostTier:
    """Host memory and copies of one worker. All methods are for the worker's main thread.

    ``share_bytes`` is this worker's part of the tier, ``area`` the whole KV cache, uint8
    ``[bytes]``. ``store_rate`` limits the bytes stored per second; 0 is no limit. ``shared``: the
    memory of workers with the same KV, which have ``share_bytes`` each; the first stores for all.

    Raises:
        ConfigError: the share is smaller than one block or larger than the free memory.
    """

    def __init__(
        self,
        share_bytes: int,
        digest: DigestMode,
        geometry: Geometry,
        area: torch.Tensor,
        make_copier: MakeCopier,
        store_rate: int = 0,
        shared: SharedMemory | None = None,
    ) -> None:
        workers = shared.places if shared else 1
        num_slots = share_bytes * workers // geometry.slot_bytes
        if num_slots < 1:
            raise ConfigError(
                "host_bytes",
                share_bytes,
                f"this worker's share is less than one block of {geometry.slot_bytes} bytes",
            )
        check_fits(
            num_slots * geometry.slot_bytes // workers,
            memory_bytes=memory.available_bytes(),
            what="available now for this worker's share",
        )
        node = device_node(area.device)
        self.stores = shared is None or not shared.place
        self.store = HostArena(num_slots, geometry.slot_bytes, digest, node, shared)
        if area.device.type == "cuda":
            self.store.pin()
        copier = make_copier(area, self.store.tensor(), geometry)
        streams = make_streams(area.device)
        self.executor = CopyExecutor(copier, self.store, geometry, streams, store_rate=store_rate)
        self._pending: list[StoreBlocks] = []
        self._left: list[FinishedCopy] = []  # stores that another worker makes

    def begin(self, loads: Sequence[LoadBlocks], stores: Sequence[StoreBlocks]) -> None:
        """Start the step's loads before the forward; keep its stores until after the forward."""
        self.submit_stores()  # a pipeline stage may have ended the last step without this call
        self._pending = list(stores)
        if loads:
            fence = self.executor.fence()  # loads start after the engine zeroed their blocks
            for load in loads:
                self.executor.submit(load, fence)

    def submit_stores(self) -> None:
        """Queue the step's stores behind the launched forward."""
        if not self._pending:
            return
        if self.stores:
            fence = self.executor.fence()
            for store in self._pending:
                self.executor.submit(store, fence)
        else:
            kind = TransferType.GPU_TO_CPU
            reports = ((job, JobReport(job.job)) for job in self._pending)
            self._left += [FinishedCopy(job, report, kind, 0, 0.0) for job, report in reports]
        self._pending = []

    def poll(self) -> list[FinishedCopy]:
        """Return the copies that ended since the last call, each exactly once."""
        left, self._left = self._left, []
        return left + self.executor.poll()

    def close(self) -> None:
        """Stop copies and release the memory. Idempotent."""
        self.executor.close()
        self.store.close()
