"""Ranks that have parts of the same pages: all use the storage backend or none does, and they name
the pages that all of them have alike. The ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from kvconnect.engines.sglang import hooks, host_pages, rank_agreement, storage, weights
from kvconnect.engines.sglang.host_pages import HostPages
from kvconnect.errors import ConfigError, Incompatible, Misuse
from tests.servers import free_port
from tests.sglang.linker_bench import PAGE, names, slots_of
from tests.sglang.storage_bench import PAGE_BYTES, RANKS, SELF, host_pool, serving
from tests.sglang.tiered_storage import REMOTE, on_disk

SIZE = 2
WAIT_S = 20.0
T = TypeVar("T")


class Group:
    """A process group of SGLang's, whose ranks are threads."""

    def __init__(self, ranks: range) -> None:
        self.ranks, self.world_size, self.cpu_group = ranks, len(ranks), self
        self._barrier = threading.Barrier(len(ranks))
        self._given: list[Any] = [None] * len(ranks)

    def gather(self, lists: list[Any], own: Any, rank: int) -> None:
        self._given[self.ranks.index(rank)] = own
        self._barrier.wait(WAIT_S)
        lists[:] = self._given
        self._barrier.wait(WAIT_S)


class Ranks:
    """Groups of two ranks that share prompts, each a thread, and what their process groups do.
    ``number``: the caller's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, groups: int = 1) -> None:
        self._own = threading.local()
        self._world = Group(range(groups * SIZE))
        pairs = [Group(range(first, first + SIZE)) for first in self._world.ranks[::SIZE]]

        def parallel() -> SimpleNamespace:
            return SimpleNamespace(
                attn_cp_size=1,
                attn_tp_size=SIZE,
                pp_size=1,
                attn_tp_group=pairs[self.number // SIZE],
                world_group=self._world,
            )

        def gather(lists: list[Any], own: Any, group: Group) -> None:
            group.gather(lists, own, self.number)

        monkeypatch.setattr(rank_agreement, "get_parallel", parallel)
        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    @property
    def number(self) -> int:
        found: int = self._own.number
        return found

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Return what each rank returns; their threads end."""

        def rank(number: int) -> T:
            self._own.number = number
            return work(number)

        with ThreadPoolExecutor(self._world.world_size) as threads:
            return [*threads.map(rank, self._world.ranks)]


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(weights, "_state", weights._RankWeights())
    monkeypatch.setattr(storage, "publish_regularly", lambda _: threading.Event())
    with serving():
        yield


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


class Controller(HybridCacheController):
    """SGLang's, as far as it attaches and detaches a storage backend. Its threads do nothing."""

    storage_backend: Any

    def __init__(self, pool: Any, rank: int) -> None:
        self.rank = replace(RANKS, tp_rank=rank, tp_size=SIZE)
        self.storage_host_pool = pool
        self.mem_pool_host = SimpleNamespace(logical_size=PAGE, entries=[])
        self.host_memory_mode, self.page_size, self.pp_group = "cache", PAGE, None
        self.enable_storage, self.storage_backend = False, None
        self.storage_stop_event, self.pp_prefetch_state_lock = threading.Event(), threading.Lock()
        self.pp_prefetch_command_group = None
        self.prefetch_hits_sync_groups = self.prefetch_completion_sync_groups = []
        self.pp_prefetch_states, self.pp_prefetch_decisions = {}, {}

    def _generate_storage_config(self, _: Any, extra: Any) -> Any:
        return replace(self.rank, extra_config=extra)

    def _create_sync_groups(self) -> list[Any]:
        return []

    def _start_storage_threads(self) -> None: ...

    def _stop_storage_threads(self) -> None: ...

    def attach(self, hooked: bool, **settings: Any) -> Exception | None:
        """Attach a storage backend as SGLang does at run time; return why that failed."""
        extra = {"host_bytes": SIZE * 8 * PAGE_BYTES, **SELF, **settings}
        pools = [SimpleNamespace(host_pool=self.storage_host_pool, name=PoolName.KV)]
        attach: Any = HybridCacheController.attach_storage_backend
        try:
            if hooked:
                hooks.around_attach(
                    attach, self, "dynamic", storage_backend_extra_config=extra, host_pools=pools
                )
            else:
                attach(self, "dynamic", storage_backend_extra_config=extra, host_pools=pools)
        except (ConfigError, Incompatible, OSError) as error:
            return error
        return None


def stores(controller: Controller) -> list[bool]:
    found: list[bool] = controller.storage_backend.batch_set_v1(names(1), slots_of([1]))
    return found


@pytest.mark.parametrize("hooked", [True, False])
def test_a_storage_that_one_rank_cannot_use_is_attached_to_none(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hooked: bool
) -> None:
    """The disk is opened once SGLang's pools are known, where SGLang undoes nothing by itself."""
    (tmp_path / "file").touch()
    places = on_disk(tmp_path / "1"), on_disk(tmp_path / "file" / "2")
    controllers = [Controller(host_pool(monkeypatch), rank) for rank in range(SIZE)]
    other, own = ranks.run(lambda rank: controllers[rank].attach(hooked, **places[rank]))
    assert own is not None and str(tmp_path / "file") in str(own)
    assert isinstance(other, Incompatible) and str(other) == f"{own} (on another rank)"
    assert [each.enable_storage for each in controllers] == [not hooked] * SIZE
    if not hooked:  # the control
        with pytest.raises(Misuse):
            stores(controllers[1])
        return
    assert [each.storage_backend for each in controllers] == [None] * SIZE
    assert ranks.run(lambda rank: controllers[rank].attach(hooked)) == [None] * SIZE
    assert [stores(each) for each in controllers] == [[True]] * SIZE
    running = [each.storage_backend for each in controllers]
    with pytest.raises(RuntimeError, match="already attached"):
        controllers[0].attach(hooked)
    assert [each.storage_backend for each in controllers] == running, "it stays as it is"
    for each in controllers:
        each.detach_storage_backend()


def test_a_storage_that_one_rank_cannot_use_is_attached_to_no_group_of_attention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With ``--enable-dp-attention``. SGLang makes groups on all ranks together when it attaches.
    Ranks that have storage already would not come at the next attempt."""
    ranks, together = Ranks(monkeypatch, groups=2), threading.Barrier(2 * SIZE)

    def create_groups(_: Controller) -> list[Any]:
        together.wait(WAIT_S)
        return []

    monkeypatch.setattr(Controller, "_create_sync_groups", create_groups)
    (tmp_path / "file").touch()
    places = [on_disk(tmp_path / str(rank)) for rank in range(2 * SIZE - 1)]
    places.append(on_disk(tmp_path / "file" / "3"))
    controllers = [Controller(host_pool(monkeypatch), rank % SIZE) for rank in range(2 * SIZE)]
    *others, own = ranks.run(lambda rank: controllers[rank].attach(True, **places[rank]))
    assert own is not None and str(tmp_path / "file") in str(own)
    assert [str(other) for other in others] == [f"{own} (on another rank)"] * len(others)
    assert [each.storage_backend for each in controllers] == [None] * len(controllers)
    again = ranks.run(lambda rank: controllers[rank].attach(True))
    assert again == [None] * len(controllers)
    assert [stores(each) for each in controllers] == [[True]] * len(controllers)
    for each in controllers:
        each.detach_storage_backend()


@pytest.mark.parametrize(("stages", "lists"), [(1, ["own"]), (2, ["own", "another"])])
def test_a_rank_that_attends_alone_waits_for_other_stages_only(
    monkeypatch: pytest.MonkeyPatch, stages: int, lists: list[str]
) -> None:
    """SGLang makes no groups for one rank. Other data-parallel ranks may not attach: busy ones."""
    sizes = SimpleNamespace(attn_cp_size=1, attn_tp_size=1, pp_size=stages)
    sizes.world_group = SimpleNamespace(world_size=2, cpu_group="world")

    def gather(given: list[str], own: str, group: str) -> None:
        assert group == "world"
        given[:] = [own, "another"]

    monkeypatch.setattr(rank_agreement, "get_parallel", lambda: sizes)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert rank_agreement.of_all_attaching("own") == lists


def test_a_storage_that_was_detached_hears_of_no_update(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks would wait for each other, at each update, for every storage that they have had."""
    (tmp_path / "file").touch()
    controllers = [Controller(host_pool(monkeypatch), rank) for rank in range(SIZE)]
    for each in controllers:
        each.rank = replace(each.rank, is_mla_model=True)
    listeners = weights._state.listeners

    def attach(*more: Any) -> list[Exception | None]:
        peers = [{"cache_peers": {"listen": f"127.0.0.1:{free_port()}"}} for _ in range(SIZE)]
        return ranks.run(
            lambda rank: controllers[rank].attach(True, **REMOTE, **peers[rank], **more[rank])
        )

    for _ in range(2):
        assert attach({}, {}) == [None] * SIZE
        assert len(listeners) == 2 * SIZE  # for its pages, and for its peers
        for each in controllers:
            each.detach_storage_backend()
        assert listeners == []
    assert all(attach({}, on_disk(tmp_path / "file" / "1")))
    assert listeners == []


def test_settings_that_one_rank_cannot_use_are_refused_before_anything_is_attached(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would wait in it for the rank that has left."""
    controllers = [Controller(host_pool(monkeypatch), rank) for rank in range(SIZE)]
    settings: list[dict[str, Any]] = [{}, {"host_byte": 1}]
    other, own = ranks.run(lambda rank: controllers[rank].attach(False, **settings[rank]))
    assert isinstance(own, ConfigError) and "did you mean 'host_bytes'" in str(own)
    assert isinstance(other, Incompatible) and str(other) == f"{own} (on another rank)"
    assert not any(each.enable_storage for each in controllers)


@pytest.mark.parametrize("latent", [True, False])
def test_pages_that_all_ranks_have_are_named_alike(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, latent: bool
) -> None:
    """Each rank's parameters are others, and HiCache has one rank write for all. Without latent
    attention, each has pages of its own (control)."""
    told: list[Callable[[], None]] = [lambda: None] * SIZE
    generations: list[bytes] = [b""] * SIZE
    monkeypatch.setattr(weights, "generation", lambda: generations[ranks.number])
    monkeypatch.setattr(weights, "listen", lambda heard: told.__setitem__(ranks.number, heard))
    pool, store = host_pool(monkeypatch), SimpleNamespace(clear=lambda: None)
    monkeypatch.setattr(host_pages, "has_heads", lambda _: not latent)
    pages = [
        HostPages(
            store, {PoolName.KV: pool}, replace(RANKS, tp_rank=rank, tp_size=2, is_mla_model=latent)
        )
        for rank in range(SIZE)
    ]

    def named(rank: int) -> bytes:
        return pages[rank]._names(PoolName.KV, names(1))[0]

    def updated(*parts: bytes) -> None:
        generations[:] = parts
        ranks.run(lambda rank: told[rank]())

    seen = []
    ranks.run(lambda rank: pages[rank].agree())
    for change in (
        lambda: updated(b"", b""),
        lambda: updated(b"parameters 0", b"parameters 1"),
        lambda: updated(b"version", b"version"),
        lambda: updated(b"", b"other parameters"),
        lambda: ranks.run(lambda rank: pages[rank].forget()),
        lambda: ranks.run(lambda rank: pages[rank].forget()),
    ):
        change()
        found = ranks.run(named)
        assert (found[0] == found[1]) == latent
        seen.append(found[1])
    assert len(set(seen)) == len(seen)
