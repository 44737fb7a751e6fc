"""What a rank knows of its weights, from the calls that change them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import torch

from kvconnect.engines.sglang import weights
from kvconnect.protocol.identity import Identity, Weights
from tests.sglang.storage_bench import serving
from tests.sglang.weight_updates import Serving


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    with serving():
        yield


@pytest.mark.parametrize("version", ["2", None])
def test_what_a_rank_knows_of_its_weights(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    process, told = Serving(monkeypatch), list[Identity]()
    weights.listen(lambda: told.append(weights.identity()))
    start = weights.identity().weights
    assert start.parameters and not start.version
    process.begin()
    assert told.pop().weights == Weights()
    process.flush()  # parts are there
    assert weights.identity().weights == Weights()
    process.end(version)
    updated = told.pop().weights
    assert updated.version == (version or "") and updated.parameters != start.parameters
    process.scheduler.handle_update_weight_version(None, SimpleNamespace(new_version="3"))
    assert told.pop().weights == msgspec.structs.replace(updated, version="3")
    torch.nn.init.constant_(process.runner.model.weight, 3.0)  # nobody tells
    process.flush()
    assert told.pop().weights.version == ""


def test_weights_are_not_read_while_their_memory_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Serving(monkeypatch)
    before = weights.identity()
    monkeypatch.setattr(process.runner, "model", None)  # reading it would raise
    weights._release(None, SimpleNamespace(tags=["weights"]))
    process.flush()
    assert weights.identity() == before
    weights._resume(None, None, SimpleNamespace(tags=["kv_cache"]))
    process.flush()
    monkeypatch.setattr(process.runner, "model", torch.nn.Linear(4, 4))
    weights._resume(None, None, SimpleNamespace(tags=None))
    assert weights.identity() != before  # they came back as others


@pytest.mark.parametrize("eplb", [False, True])
def test_a_flush_names_pages_anew_where_experts_move_and_no_version_is_declared(
    monkeypatch: pytest.MonkeyPatch, eplb: bool
) -> None:
    """Without experts that move, the parameters are compared: names stay (control)."""
    process = Serving(monkeypatch)
    args = SimpleNamespace(enable_eplb=eplb)
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: args)
    monkeypatch.setattr(weights, "_start_weights", lambda: Weights(files="a"))
    start = weights.identity()
    assert weights.generation() == b""
    names = {weights.generation()}
    for _ in range(2):
        process.flush()
        assert weights.generation() == weights.generation(), "pages are found until the next flush"
        names.add(weights.generation())
    assert len(names) == (3 if eplb else 1)
    assert (weights.identity() == start) != eplb
    process.scheduler.handle_update_weight_version(None, SimpleNamespace(new_version="3"))
    declared = weights.generation()
    process.flush()
    assert weights.generation() == declared and (declared in names) != eplb
    assert weights.identity().weights.version == "3"
