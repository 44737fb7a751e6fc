"""What a rank knows of its weights, from the calls that change them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvconnect.engines.sglang import weights
from kvconnect.engines.sglang.storage_backends import stored_format
from kvconnect.protocol.identity import Identity, Weights
from tests.engines.models import model_dir
from tests.sglang.storage_bench import RANKS, serving
from tests.sglang.weight_updates import Runner, Serving


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


def test_each_step_of_an_update_by_parts_names_pages_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiCache's threads store pages of the former weights until the cache is flushed, and no later
    step may find these. Ranks are told equally often whether SGLang has flushed on them or not."""
    process, told = Serving(monkeypatch), list[bytes]()
    weights.follow()
    weights.listen(lambda: told.append(weights.generation()))
    names = [weights.generation()]
    torch.nn.init.constant_(process.runner.model.weight, 2.0)
    for step in (
        process.begin,
        lambda: process.part("2", flush=False),
        lambda: process.part("2"),
        process.flush,
        process.close,
        process.flush,
    ):
        step()
        names.append(weights.generation())
    assert names[0] == b"" and told == names[1:] and len(set(names)) == len(names)


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


def test_an_update_of_the_draft_model_alone_names_pages_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their pages are stored with the model's own."""
    process = Serving(monkeypatch)
    spec = SimpleNamespace(
        speculative_draft_model_path="draft",
        speculative_draft_model_revision=None,
        speculative_draft_load_format=None,
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
    names = []
    for selector, version in (("draft", "2"), ("draft", "2"), ("draft", "3"), ("target", "2")):
        process.start()
        draft = Runner()
        draft.is_draft_worker = True
        process.load(draft)
        weights.follow()
        assert weights.generation() == b""
        request = SimpleNamespace(selector=selector)
        process.updater.begin_weight_update(SimpleNamespace(_session=None), request)
        updated = draft if selector == "draft" else process.runner
        torch.nn.init.constant_(updated.model.weight, 2.0)
        process.part(version, flush=False)
        process.updater.end_weight_update(None, SimpleNamespace())
        process.flush()
        names.append(weights.generation())
    assert all(names) and names[0] == names[1] and len(set(names)) == 3


@pytest.mark.parametrize(
    ("settings", "of_files"),
    [
        ({}, True),
        ({"load_format": "safetensors"}, True),
        ({"load_format": "remote"}, False),
        ({"load_format": "sharded_state"}, False),
        ({"weight_cache_mode": "client"}, False),
    ],
)
@pytest.mark.parametrize("version", ["", "7"])
def test_weights_go_by_the_model_s_files_only_if_they_were_read_from_them(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], of_files: bool, version: str
) -> None:
    """Another server may have updated those that it sends, and the files at the path are old."""
    declared = {"weight_version": version} if version else {}
    names = []
    with serving(str(model_dir("llama")), **settings, **declared):
        process = Serving(monkeypatch)
        for number in (1.0, 1.0, 2.0):
            process.start()
            for parameter in process.runner.model.parameters():
                torch.nn.init.constant_(parameter, number)
            found = weights.identity().weights
            assert (bool(found.files), found.version) == (of_files, version)
            names.append((weights.generation(), found.parameters))
        stored = stored_format(RANKS)["weights"]
    assert (stored == found.files) == of_files
    first, again, other = names
    assert all(parameters for _, parameters in names) and first == again != other
    pages = [page for page, _ in names]
    assert [bool(page) for page in pages] == [not of_files] * 3
    assert len(set(pages)) == (1 if of_files or version else 2)


def test_pages_of_weights_of_which_nothing_is_known_are_found_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_server_args", lambda: SimpleNamespace(enable_eplb=True)
    )
    names = []
    with serving(str(model_dir("llama")), load_format="remote"):
        process = Serving(monkeypatch)
        for _ in range(2):
            process.start()
            assert weights.identity().weights == Weights()
            names.append(weights.generation())
    assert all(names) and names[0] != names[1]
