"""The memory of KV pages is taken away only when no copy of the linker can touch it any more."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager as Updater,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import publish

from kvconnect.engines.sglang import linker as linker_module
from kvconnect.engines.sglang import memory_release
from kvconnect.engines.sglang.linker import KVConnectLinker
from kvconnect.errors import ConfigError
from tests.sglang.linker_bench import Bench, mha_pool, names, params_for, transfers

SLOWLY = {"store_rate": "256KiB"}
KEYS, PAGES = names(8), range(1, 9)
FULL = (ComponentType.FULL,)


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    # Hooks are for processes that have it. Imported here: the plugin that another test loads would
    # hook this whole process.
    importlib.import_module("sglang.srt.managers.scheduler")
    reset_context()
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test")
    yield
    reset_context()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Saver:
    """SGLang's release: the memory is gone first, and then the cache is flushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hooked: bool) -> None:
        self.gone = False
        self.flush: Callable[[], None] = lambda: None
        monkeypatch.setattr(Updater, "release_memory_occupation", self._release)
        monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
        monkeypatch.setattr(HookRegistry, "_patched", set())
        monkeypatch.setattr(memory_release, "_watching", False)
        if hooked:
            memory_release.watch()
            HookRegistry.apply_hooks()
        self._updater: Any = Updater

    def _release(self, _updater: Any, request: Any) -> None:
        if not request.tags or "kv_cache" in request.tags:
            self.gone = True
            self.flush()

    def release(self, tags: list[str] | None) -> None:
        self._updater.release_memory_occupation(None, SimpleNamespace(tags=tags))


def touched_when_gone(bench: Bench, saver: Saver) -> list[bool]:
    """Return a list that gets, for each copy, whether its memory is gone."""
    found: list[bool] = []
    for spy in bench.spies:
        inner = spy.inner.store

        def store(*args: Any, inner: Callable[..., None] = inner) -> None:
            found.append(saver.gone)
            inner(*args)

        spy.inner.store = store  # type: ignore[method-assign]
        spy.gate = threading.Semaphore(0)
    return found


def open_when_awaited(bench: Bench) -> None:
    """Hold copies back until somebody waits for them."""
    drain = bench.tier.drain

    def opened() -> None:
        for spy in bench.spies:
            assert spy.gate is not None
            spy.gate.release(1000)
        drain()

    bench.tier.drain = opened  # type: ignore[method-assign]


@pytest.mark.parametrize("settings", [{}, SLOWLY], ids=["fast", "slow"])
@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights", "kv_cache"]], ids=str)
@pytest.mark.parametrize("hooked", [True, False])
def test_no_copy_touches_pages_whose_memory_is_gone(
    monkeypatch: pytest.MonkeyPatch,
    opened: ExitStack,
    hooked: bool,
    tags: list[str] | None,
    settings: dict[str, Any],
) -> None:
    """Without the hook, copies that were queued run while the cache is flushed (control)."""
    saver = Saver(monkeypatch, hooked)
    bench = Bench(mha_pool(), settings=settings)
    opened.callback(bench.close)
    found = touched_when_gone(bench, saver)
    open_when_awaited(bench)
    saver.flush = bench.linker.reset
    for key, page in zip(KEYS, PAGES, strict=True):
        assert bench.linker.offload(transfers([key], [page]))
    saver.release(tags)
    assert len(found) >= len(KEYS) and any(found) == (not hooked)
    assert bench.found(KEYS) == []


def test_other_memory_goes_without_waiting_for_copies(
    monkeypatch: pytest.MonkeyPatch, opened: ExitStack
) -> None:
    saver = Saver(monkeypatch, hooked=True)
    bench = Bench(mha_pool())
    opened.callback(bench.close)
    touched_when_gone(bench, saver)  # nothing is let through
    assert bench.linker.offload(transfers(KEYS, PAGES))
    saver.release(["weights"])
    assert not saver.gone and bench.linker.num_completed_offloads() == 0


def test_a_closed_linker_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(monkeypatch, hooked=True)
    bench = Bench(mha_pool())
    bench.close()
    monkeypatch.setattr(bench.linker, "tiers", None)  # using it would raise
    saver.release(None)
    assert saver.gone


class ReachedMemory(Exception):
    """The linker is about to allocate its memory."""


@pytest.mark.parametrize("hooked", [True, False])
def test_a_memory_saver_whose_releases_go_unnoticed_is_refused(
    monkeypatch: pytest.MonkeyPatch, hooked: bool
) -> None:
    """Before memory is allocated. With the hook, it is not refused (control)."""

    def allocate(*_: Any) -> None:
        raise ReachedMemory("it is allocated")

    Saver(monkeypatch, hooked)
    monkeypatch.setattr(linker_module, "_make_tiers", allocate)
    args = SimpleNamespace(enable_memory_saver=True)
    params = params_for(mha_pool(), FULL)
    refused = ReachedMemory if hooked else ConfigError
    words = "it is allocated" if hooked else "--enable-memory-saver=True is not usable"
    with pytest.raises(refused, match=words):
        KVConnectLinker(args, params, components=set(FULL), extra_config={"host_bytes": "1MiB"})
