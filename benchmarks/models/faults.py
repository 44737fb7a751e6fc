"""A connector that loads another prompt's pages, to show that a comparison would notice."""

from __future__ import annotations

from typing import Any

from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.engines.vllm.messages import StepInstructions

planted = False
"""Whether loads are broken from now on; set in the engine's process."""


class LoadsAnothersPages(KVConnect):
    """While :data:`planted`, a load gets the bytes that the load before it should have had.

    After another prompt, pages and states are swapped. After the beginning of the same prompt, its
    full pages are right, and its state is too old.
    """

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        assert isinstance(connector_metadata, StepInstructions)
        if planted:
            for load in connector_metadata.offload.loads:
                for part in load.parts:
                    self._replace(part.group, part.slots)
        super().bind_connector_metadata(connector_metadata)

    def _replace(self, group: int, slots: Any) -> None:
        before: dict[int, list[bytes]] = self.__dict__.setdefault("_before", {})
        views = [self.worker.tier.store.view(slot) for slot in slots if slot >= 0]
        right = [bytes(view) for view in views]
        # The last ones: of a window, and of a state's boundaries, those that matter.
        for view, wrong in zip(reversed(views), reversed(before.get(group, [])), strict=False):
            view[:] = memoryview(wrong)
        before[group] = right
