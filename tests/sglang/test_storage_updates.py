"""Stored pages and updates of weights: pages of former weights are not found under any setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconnect.engines.sglang import weights
from kvconnect.types import Tier
from tests.sglang.linker_bench import slots_of
from tests.sglang.storage_bench import Make, host_pool, serving, storages
from tests.sglang.tiered_storage import KEYS, fill, on_disk, settle, where
from tests.sglang.weight_updates import Serving


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(weights, "_state", weights._RankWeights())
    with serving():
        yield


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with storages(monkeypatch) as make_storage:
        yield make_storage


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return the folder of other weights."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


@pytest.mark.parametrize("disk", [True, False])
def test_new_weights_have_pages_of_their_own(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path, disk: bool
) -> None:
    process = Serving(monkeypatch)
    storage = make(host_pool(monkeypatch), **(on_disk(tmp_path) if disk else {}))
    fill(storage, 2)
    process.flush()
    assert where(storage, KEYS[:2]) == [Tier.HOST] * 2  # the control: the weights are the same
    process.begin()
    assert where(storage, KEYS[:2]) == [None] * 2
    process.end("2")
    process.flush(done=False)  # as while requests run, whose pages are of the former weights
    fill(storage, 1)
    process.flush()
    assert where(storage, KEYS[:2]) == [None] * 2
    storage.batch_set_v1(["new"], slots_of([3]))
    settle(storage)
    assert where(storage, ["new"]) == [Tier.HOST]


def test_pages_that_are_stored_during_an_update_by_parts_are_not_found_after_it(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    """HiCache stores what was computed before, and its last part's flush comes before the end."""
    process = Serving(monkeypatch)
    storage = make(host_pool(monkeypatch))
    process.begin()
    fill(storage, 1)
    assert where(storage, KEYS[:1]) == [Tier.HOST]  # the control: it is stored
    for step in (lambda: process.part("2"), process.flush, process.close):
        step()
        assert where(storage, KEYS[:1]) == [None]
        fill(storage, 1)
    process.flush()
    assert where(storage, KEYS[:1]) == [None]


def test_a_process_that_was_updated_alike_finds_pages_on_disk(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path
) -> None:
    process = Serving(monkeypatch)
    storage = make(host_pool(monkeypatch), **on_disk(tmp_path))
    fill(storage, 2)
    process.begin()
    process.end("2")
    process.flush()
    storage.batch_set_v1(["new"], slots_of([3]))
    settle(storage)
    storage.close()

    def found() -> list[Tier | None]:
        store = make(host_pool(monkeypatch), **on_disk(tmp_path))
        there = where(store, [*KEYS[:2], "new"])
        store.close()
        return there

    process.start()
    assert found() == [Tier.DISK, Tier.DISK, None]
    process.begin()
    process.end("2")
    assert found() == [None] * 3
    process.flush()
    assert found() == [None, None, Tier.DISK], "it was updated alike"


@pytest.mark.parametrize("by_parts", [True, False])
def test_storage_that_is_attached_after_an_update_finds_no_former_pages(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path, other: Path, by_parts: bool
) -> None:
    process = Serving(monkeypatch)
    first = make(host_pool(monkeypatch), **on_disk(tmp_path / "disk"))
    fill(first, 2)
    first.close()
    process.start()
    control = make(host_pool(monkeypatch), **on_disk(tmp_path / "disk"))
    assert where(control, KEYS[:2]) == [Tier.DISK] * 2
    control.close()

    process.start()
    if by_parts:
        process.begin()
        process.end(None)
        process.flush()
    else:
        process.update_from_disk(other)
    storage = make(host_pool(monkeypatch), **on_disk(tmp_path / "disk"))
    assert where(storage, KEYS[:2]) == [None] * 2
    fill(storage, 1)
    process.flush()
    assert where(storage, KEYS[:2]) == [Tier.HOST, None]


@pytest.mark.parametrize("idle", [True, False])
def test_an_update_that_flushes_names_pages_as_in_all_servers_updated_alike(
    monkeypatch: pytest.MonkeyPatch, other: Path, idle: bool
) -> None:
    """While requests run, SGLang refuses the flush: names are this process's own (control)."""
    process, names = Serving(monkeypatch), []
    for _ in range(2):
        process.start()
        weights.follow()
        process.update_from_disk(other, idle=idle)
        names.append(weights.generation())
    assert all(names) and (names[0] == names[1]) == idle
    process.flush()
    settled = weights.generation()
    assert settled and (settled == names[1]) == idle


@pytest.mark.parametrize("by_parts", [True, False])
def test_names_are_shared_once_what_a_decode_server_offloaded_is_stored(
    monkeypatch: pytest.MonkeyPatch, other: Path, by_parts: bool
) -> None:
    """SGLang's flush does not wait for it, and it is of the former weights."""
    process = Serving(monkeypatch)
    weights.follow()
    backups = process.offloads.decode_offload_manager.ongoing_backup
    backups[1] = "a request"
    if by_parts:
        process.begin()
        process.end("2")
        process.flush()
    else:
        process.update_from_disk(other)
    names = {weights.generation()}
    process.flush()
    names.add(weights.generation())
    backups.clear()
    process.flush()
    shared = weights.generation()
    process.flush()
    assert len(names) == 2 and shared not in names and weights.generation() == shared


def test_an_update_that_is_not_to_flush_leaves_former_pages(
    monkeypatch: pytest.MonkeyPatch, other: Path
) -> None:
    process = Serving(monkeypatch)
    weights.follow()
    process.update_from_disk(other, flush=False)
    named = weights.generation()
    process.flush()
    assert weights.generation() != named
