"""The halves of a connector that has nothing to do, since nothing may be used again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kvconnect.engines.vllm.messages import WorkerHello
from kvconnect.engines.vllm.scheduler import SchedulerHalf
from kvconnect.engines.vllm.worker import WorkerHalf
from kvconnect.types import TransferId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class IdleScheduler(SchedulerHalf):
    """Knows of no request, so it plans nothing."""

    def greet(self, hellos: Mapping[tuple[int, int], WorkerHello], alone: bool = True) -> None:
        """There is no tier to learn of."""
        self.handoff.greet(hellos, alone)

    def add_request(self, request: Request) -> TransferId | None:  # noqa: ARG002
        """Nobody may ask for it, and what it asks for is computed here."""
        return None

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:  # noqa: ARG002
        """Nothing is there."""
        return 0, False


class IdleWorker(WorkerHalf):
    """Allocates nothing and listens nowhere."""

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """There may be none."""
