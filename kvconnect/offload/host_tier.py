"""A worker's share of the host tier: its memory, its copy thread, and this step's stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvconnect import memory
from kvconnect.cache.layout import Geometry
from kvconnect.config import DigestMode, check_fits
from kvconnect.copy import Copier
from kvconnect.errors import ConfigError
from kvconnect.offload.copy_executor import CopyExecutor, FinishedCopy
from kvconnect.offload.host_arena import HostArena, device_node
from kvconnect.offload.messages import LoadBlocks, StoreBlocks
from kvconnect.offload.streams import make_streams

MakeCopier = Callable[[torch.Tensor, torch.Tensor, Geometry], Copier]


class HostTier:
    """Owned by the worker's main thread; copies run on the executor's own thread.

    ``share_bytes`` is this worker's part of the tier, ``area`` the whole KV cache as uint8
    ``[bytes]``; ``store_rate`` bounds the bytes stored per second. Raises :class:`ConfigError` if
    the share is too small for one block or more than is free.
    """

    def __init__(
        self,
        share_bytes: int,
        digest: DigestMode,
        geometry: Geometry,
        area: torch.Tensor,
        make_copier: MakeCopier,
        store_rate: int = 0,
    ) -> None:
        num_slots = share_bytes // geometry.slot_bytes
        if num_slots < 1:
            raise ConfigError(
                "host_bytes",
                share_bytes,
                f"this worker's share is less than one block of {geometry.slot_bytes} bytes",
            )
        check_fits(
            num_slots * geometry.slot_bytes,
            memory_bytes=memory.available_bytes(),
            what="available now for this worker's share",
        )
        node = device_node(area.device)
        self.store = HostArena(num_slots, geometry.slot_bytes, digest, node)
        if area.device.type == "cuda":
            self.store.pin()
        copier = make_copier(area, self.store.tensor(), geometry)
        streams = make_streams(area.device)
        self.executor = CopyExecutor(copier, self.store, geometry, streams, store_rate=store_rate)
        self._pending: list[StoreBlocks] = []

    def begin(self, loads: Sequence[LoadBlocks], stores: Sequence[StoreBlocks]) -> None:
        """Start the step's loads, ahead of the forward; keep its stores for after it."""
        self.submit_stores()  # a pipeline stage may end a step without asking for that
        self._pending = list(stores)
        if loads:
            fence = self.executor.fence()  # after any zeroing of the blocks to be loaded
            for load in loads:
                self.executor.submit(load, fence)

    def submit_stores(self) -> None:
        """Queue the step's stores behind the forward that has been launched."""
        if self._pending:
            fence = self.executor.fence()
            for store in self._pending:
                self.executor.submit(store, fence)
            self._pending = []

    def poll(self) -> list[FinishedCopy]:
        """Return jobs that ended since the last call; each exactly once."""
        return self.executor.poll()

    def close(self) -> None:
        """Stop copying and give the memory back. Idempotent."""
        self.executor.close()
        self.store.close()
