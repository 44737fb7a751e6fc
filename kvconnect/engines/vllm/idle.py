"""Parts of a connector that stores and loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kvconnect.engines.vllm.hints import drop_invalid_params
from kvconnect.engines.vllm.messages import WorkerHello
from kvconnect.engines.vllm.scheduler import ConnectorScheduler
from kvconnect.engines.vllm.worker import ConnectorWorker
from kvconnect.types import TransferId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class IdleScheduler(ConnectorScheduler):
    """Ignores all requests, so it plans nothing."""

    def greet(self, hellos: Mapping[tuple[int, int], WorkerHello], alone: bool = True) -> None:
        """Take the workers' hellos; there is no host tier."""
        self.handoff.greet(hellos, alone)

    def add_request(self, request: Request) -> TransferId | None:
        """Ignore the request, also a hand-off that it asks for."""
        drop_invalid_params(request, self.plan.stats)
        return None

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Find nothing."""
        return 0, False


class IdleWorker(ConnectorWorker):
    """Allocates nothing and listens nowhere."""

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Ignore the caches; a model may have none."""
