"""Loads inside a step: which blocks vLLM takes for filled although such a load failed.

vLLM names blocks when it allocates them, so those of a load inside a step have names before they
are filled. If it fails, vLLM has its request compute them, and leaves the names: once that request
has ended or waits, others would find whatever the blocks hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvconnect.engines.vllm.messages import StepReports
from kvconnect.offload.copy_jobs import CopyJob
from kvconnect.offload.messages import LoadBlocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class InsideLoads:
    """The blocks of the last step with such a load. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self._tables: list[Sequence[int]] = []  # of each loading request, in the only group

    def step(self, output: SchedulerOutput, loads: Iterable[LoadBlocks]) -> None:
        """Take the blocks of the requests for which a load runs inside a step. No other request of
        the step has a block that is loaded, see :func:`is_shared`."""
        state, requests = output.kv_connector_block_state, [it.req_id for it in loads if it.sync]
        if state is not None and requests:
            self._tables = [tuple(state.resolve_block_ids(req_id)[0]) for req_id in requests]

    def unfilled(self, job: CopyJob) -> set[int]:
        """Return the blocks that have not what their names say: those that such a load did not
        fill, and those behind them, which were computed from them."""
        found: set[int] = set()
        failed = {each.block_id for each in job.failures.values()} if job.sync else found
        for table in self._tables:
            first = next((n for n, block_id in enumerate(table) if block_id in failed), len(table))
            found.update(table[first:])
        return found


def is_shared(request: Request, number: int, others: Iterable[Request]) -> bool:
    """Return whether others that were not admitted yet need the same block as a request, the one
    with this number. They would take it for filled in the step that loads it, and vLLM would not
    have them compute it."""
    mine = request.block_hashes[number]
    return any(
        other is not request
        and not other.num_computed_tokens
        and len(other.block_hashes) > number
        and other.block_hashes[number] == mine
        for other in others
    )


def foreign_failures(reports: StepReports, failed: Collection[int]) -> set[int]:
    """Return the failed device blocks that no load or receive of this connector reports."""
    jobs = chain(reports.reports, reports.arrivals)
    return set(failed).difference(f.block_id for report in jobs for f in report.failures)
