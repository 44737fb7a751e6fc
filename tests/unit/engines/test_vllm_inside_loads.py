"""Loads inside a step: whose blocks nobody may find after a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvconnect.engines.vllm.inside_loads import InsideLoads, is_shared
from kvconnect.offload.copy_jobs import CopyJob
from kvconnect.offload.ledger import Owner
from kvconnect.offload.messages import FailedBlock, LoadBlocks
from kvconnect.types import FailureCause, JobId

TABLES = {"loads": [7, 8, 9, 10], "before": [7, 20], "other": [30, 31]}


def load(*, sync: bool) -> LoadBlocks:
    return LoadBlocks(JobId(1), "loads", (), 10.0, sync)


def step(found: InsideLoads, *loads: LoadBlocks) -> list[str]:
    """Begin a step, and return the requests whose blocks were asked for."""
    asked: list[str] = []

    def blocks_of(req_id: str) -> tuple[list[int]]:
        asked.append(req_id)
        return (TABLES[req_id],)

    state = SimpleNamespace(resolve_block_ids=blocks_of)
    output: Any = SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens=TABLES)
    found.step(output, loads)
    return asked


def failed(*block_ids: int, sync: bool = True) -> CopyJob:
    failures = {
        (0, block_id, 1): FailedBlock(0, block_id, 1, FailureCause.COPY) for block_id in block_ids
    }
    return CopyJob(Owner.LOAD, (), 0.0, "loads", sync=sync, failures=failures)


def test_what_follows_a_block_that_was_not_filled_was_computed_from_it() -> None:
    found = InsideLoads()
    assert step(found, load(sync=False), load(sync=True)) == ["loads"], "no other has its blocks"
    assert found.unfilled(failed(8, 10)) == {8, 9, 10}
    assert found.unfilled(failed()) == set()
    assert found.unfilled(failed(8, sync=False)) == set(), "vLLM names those when they are filled"


def test_a_step_without_such_a_load_is_none_of_its_business() -> None:
    found = InsideLoads()
    step(found, load(sync=False))
    assert found.unfilled(failed(8)) == set()


def test_a_block_is_shared_if_others_wait_for_it() -> None:
    request, same, short, other = (
        SimpleNamespace(block_hashes=hashes, num_computed_tokens=0)
        for hashes in ([b"a", b"b", b"c"], [b"a", b"b", b"x"], [b"a"], [b"a", b"z", b"c"])
    )
    found: list[Any] = [request, same, short, other]
    assert is_shared(found[0], 1, found)
    assert not is_shared(found[0], 2, found[:3])
    assert not is_shared(found[0], 1, [found[0], found[2], found[3]])
    same.num_computed_tokens = 16
    assert not is_shared(found[0], 1, found), "it has blocks of its own"
