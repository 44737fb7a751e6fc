"""A linker that breaks loads on purpose, as the file named by KVCONNECT_FAULTY_LINKER says.

``shift``: pages of other prompts are loaded. (Those of the same prompt in another order would not
do: attention does not see their order.) ``damage RANK``: on that rank, a bit of each stored page
flips before it is read. No file, or an empty one: nothing is wrong.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.runtime_context import get_parallel

from kvconnect.cache.layout import Geometry
from kvconnect.copy import Copier, make_copier
from kvconnect.engines.sglang.linker import KVConnectLinker
from kvconnect.engines.sglang.linker_host_tier import PoolTier

LONGEST = 32  # pages of the longest prompt


class FaultyLinker(KVConnectLinker):
    def __init__(self, *args: Any, **more: Any) -> None:
        PoolTier.make_copier = staticmethod(_Shifting)
        super().__init__(*args, **more)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        queued = super().load(rid, transfers)
        if _fault() == f"damage {get_parallel().tp_rank}":
            for tier in self.tiers.values():
                memory = tier.tier.store
                for slot in range(memory.num_slots):
                    memory.view(slot, 1)[0] ^= 1
        return queued


class _Shifting(Copier):
    def __init__(self, area: torch.Tensor, arena: torch.Tensor, geometry: Geometry) -> None:
        self._inner = make_copier(area, arena, geometry)
        self._slots = arena.nbytes // geometry.slot_bytes
        self._shift = len(geometry.groups) * LONGEST

    def store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._inner.store(group, block_ids, slots)

    def load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        if _fault() == "shift":
            slots = array("q", ((slot + self._shift) % self._slots for slot in slots))
        self._inner.load(group, block_ids, slots)


def _fault() -> str:
    path = Path(os.environ["KVCONNECT_FAULTY_LINKER"])
    return path.read_text() if path.exists() else ""
