"""What the connector tells of its work in vLLM's scheduler, to whoever observes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from kvconnect.engines.vllm.messages import StepInstructions, StepReports
from kvconnect.types import Tier, TransferId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SchedulerObserver(Protocol):
    """Observes the scheduler. Called on the scheduler's thread; must not raise."""

    def request_added(self, request: Request, transfer: TransferId | None) -> None:
        """A request arrived; other engines may ask for ``transfer``."""

    def looked_up(self, req_id: str, seconds: float, waits: bool) -> None:
        """A lookup took ``seconds``; it is repeated if the request ``waits``."""

    def admitted(
        self, req_id: str, loaded_tokens: int, tiers: Mapping[Tier, int], handoff: bool
    ) -> None:
        """A request has device blocks. ``loaded_tokens`` are loaded from ``tiers``, or received
        from another engine (``handoff``)."""

    def store_planned(self, req_id: str, blocks: int) -> None:
        """The next step stores new blocks of a request."""

    def step_built(self, step: StepInstructions, scheduled_tokens: Mapping[str, int]) -> None:
        """The instructions of a step go to the workers."""

    def reports_taken(self, reports: StepReports) -> None:
        """The workers' reports of a step have been handled."""

    def request_finished(self, req_id: str) -> None:
        """A request is over, and its receipt can still be asked for. Its jobs may be open."""
