"""Every KV pool class of SGLang: handed off and offloaded byte for byte, or refused in one line."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.mem_cache
import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.utils import get_dsa_tail_state_indices
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.runtime_context import reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import publish

from kvconnect.disaggregation.agent import start_agent
from kvconnect.engines.sglang import layerwise, translate
from kvconnect.engines.sglang.backend import KVConnectManager
from kvconnect.engines.sglang.decode_rooms import DecodeRooms, RoomRequest
from kvconnect.engines.sglang.device_pools import device_pools
from kvconnect.engines.sglang.linker import KVConnectLinker
from kvconnect.engines.sglang.rooms import PrefillRooms
from kvconnect.errors import Incompatible, Refused
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.negotiation import negotiate
from kvconnect.settings import Settings
from kvconnect.types import Endpoint, Rank, Span
from tests.sglang.linker_bench import (
    PAGE,
    STATE_TYPES,
    dsa_pool,
    mamba_pools,
    mha_pool,
    mla_pool,
    names,
    params_for,
)
from tests.sglang.pools import FULL_MAMBA, POOLS, Pools, memory_of, model_of, transfer_args

WAIT_S, ROOM = 20.0, 7
SAME = Identity(weights=Weights(files="same"))
SERVED = "served"
BY_SGLANG = "SGLang refuses it itself"
PART = "only a part of another pool"

KINDS: dict[str, tuple[str, str]] = {
    "BaseSWAKVPool": (PART, PART),
    "DeepSeekV4IndexerPool": (PART, PART),
    "DeepSeekV4SingleKVPool": (PART, PART),
    "DeepSeekV4TokenToKVPool": (SERVED, SERVED),
    "DeepSeekV4UniformFP8KVPool": (PART, PART),
    "DSATokenToKVPool": (SERVED, SERVED),
    "HiSparseC4DevicePool": (PART, PART),
    "HiSparseDSATokenToKVPool": ("--enable-hisparse", "not known"),
    "HiSparseMHAMainPool": (PART, PART),
    "HybridLinearKVPool": (SERVED, SERVED),
    "KVCache": (PART, PART),
    "LayerSplitDSATokenToKVPool": ("attention-context-parallel-size", "not known"),
    "MHATokenToKOnlyPool": (PART, PART),
    "MHATokenToKVPool": (SERVED, SERVED),
    "MHATokenToKVPoolFP4": (BY_SGLANG, "not known"),
    "MHATokenToKVPoolMXFP8": (SERVED, "not known"),
    "MLATokenToKVPool": (SERVED, SERVED),
    "MLATokenToKVPoolFP4": ("scales beside the pages", "not known"),
    "MiniMaxM3Nvfp4IndexKPool": (PART, PART),
    "MiniMaxM3Nvfp4KVPool": ("no GPU to make one", "not known"),
    "MiniMaxM3Nvfp4MainKVPool": (PART, PART),
    "MiniMaxSparseKVPool": (SERVED, "not known"),
    "NoOpMHATokenToKVPool": (BY_SGLANG, "not known"),
    "PageInterleaveDSATokenToKVPool": ("--enable-kv-cache-sharding", "not known"),
    "PageInterleaveMHATokenToKVPool": ("--enable-kv-cache-sharding", "not known"),
    "PageInterleaveMLATokenToKVPool": ("--enable-kv-cache-sharding", "not known"),
    "PageMajorMHATokenToKVPool": (BY_SGLANG, "not known"),
    "QSATokenToKVPool": (SERVED, "not known"),
    "SWAKVPool": (SERVED, SERVED),
    "UnifiedDraftKVPool": (BY_SGLANG, "not known"),
    "UnifiedDraftSWAKVPool": (BY_SGLANG, "not known"),
    "UnifiedHybridLinearKVPool": (BY_SGLANG, "not known"),
    "UnifiedMHATokenToKVPool": (BY_SGLANG, "not known"),
    "UnifiedMLATokenToKVPool": (BY_SGLANG, "not known"),
    "UnifiedSWAKVPool": (BY_SGLANG, "not known"),
}
"""By class: the hand-off and the linker. Else than served: the flag that is refused, words of the
line that refuses the pool, or who else does."""

ABSTRACT = {"BaseSWAKVPool", "KVCache"}

OFFLOADED = [name for name in POOLS if KINDS[name.partition(",")[0]][1] == SERVED]
HANDED_OFF = [name for name in POOLS if KINDS[name.partition(",")[0]][0] == SERVED]


@pytest.fixture(scope="module", autouse=True)
def published() -> Iterator[None]:
    reset_context()
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test")
    yield
    reset_context()


def classes() -> dict[str, type]:
    found = {}
    for module in pkgutil.walk_packages(sglang.srt.mem_cache.__path__, "sglang.srt.mem_cache."):
        if ".storage." in module.name:
            continue  # clients of stores, which are not all installed
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and issubclass(value, KVCache):
                found[value.__name__] = value
    return {n: c for n, c in found.items() if c.__module__.startswith("sglang.srt.mem_cache")}


def test_every_class_is_in_the_table() -> None:
    """A class that a new version brings is looked at before it is served."""
    assert set(classes()) == set(KINDS)
    assert {name for name, kind in classes().items() if inspect.isabstract(kind)} == ABSTRACT
    assert {name.partition(",")[0] for name in POOLS} <= set(KINDS)
    assert {kind.value for kind in StateType} == set(translate.STATES)


# --- the hand-off ----------------------------------------------------------------------------


class End:
    """One side: a pool whose bytes are random, or all zero, and its agent."""

    def __init__(
        self,
        pools: Pools,
        dtype: str,
        sends: bool,
        draft: Any = None,
        rank: Rank | None = None,
        kv_heads: int = 2,
    ) -> None:
        self.rank = rank or Rank(0, 1, 0, 1)
        self.pools, self.aux = pools, torch.zeros(8, 16, dtype=torch.uint8)
        self.args = transfer_args(pools, self.aux, dtype, draft)
        self.draft = draft
        self.cache = translate.describe(
            self.args, model_of(pools, self.args, self.rank, kv_heads), SAME
        )
        for number, (memory, _) in enumerate(self.buffers()):
            if sends:
                memory.random_(0, 256, generator=torch.Generator().manual_seed(number))
            else:
                memory.zero_()
        address = ("127.0.0.1", 0) if sends else None
        self.agent = start_agent(
            Settings(transport="tcp", digest="full"), self.cache, address, WAIT_S, True
        )
        self.ended: list[int | str] = []  # rooms, or why one failed

    def buffers(self) -> list[tuple[torch.Tensor, int]]:
        """Return the bytes of every buffer and the size of its items, by group as in ``moved``."""
        args = self.args
        lists = [(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)]
        lists += zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
        return [
            (memory_of(address, nbytes // item * item).view(-1, item), group)
            for group, one in enumerate(lists)
            for address, nbytes, item in zip(*one, strict=True)
            if item
        ]


def tail_of(pool: Any, row: int) -> list[int]:
    """Return what SGLang names of a request's tail, with three tokens in its open group."""
    hybrid = SimpleNamespace(use_dsa=True, full_kv_pool=pool)
    return get_dsa_tail_state_indices(hybrid, row, 4 * 64 + 3)


def indices(args: KVArgs, pool: Any, pages: list[int], row: int) -> list[list[int]]:
    """Return for each state component what SGLang's queues name: pages, or what is a request's."""
    by_page = {"swa", "dsa", "minimax_index_k", "minimax_dense_kv", "qsa_compressed"}
    by_page |= {"block_scale", "block_scale_swa"}
    found = []
    for kind in args.state_types:
        if kind.value == "dsa_tail":
            found.append(tail_of(pool, row))
        elif kind.value in by_page:
            found.append(pages)
        else:
            found.append([row])
    return found


def rest_of(end: End, pages: list[int], row: int) -> list[Span]:
    manager: Any = SimpleNamespace(kv_args=end.args)
    return KVConnectManager.rest(manager, row, indices(end.args, end.pools.kvcache, pages, row))


def hand_off(p: End, d: End, there: list[int], here: list[int]) -> None:
    """Move pages ``there`` of the request in row 3 into pages ``here``, in row 5."""
    hand_off_ranks([p], [d], there, here)


def hand_off_ranks(
    prefill: list[End], decode: list[End], there: list[int], here: list[int]
) -> None:
    """The same over all ranks of two engines."""
    tp = prefill[0].rank.tp
    sides: list[tuple[End, PrefillRooms | DecodeRooms]] = []
    workers = []
    for p in prefill:
        heads = [group.kv_heads for group in p.cache.hello.groups]
        ended = p.ended.append, partial(_failed, p)
        rooms = PrefillRooms(p.agent, p.rank, heads, lambda _: None, *ended)
        rooms.open(ROOM)
        sides.append((p, rooms))
        assert p.agent.address is not None
        workers.append(Endpoint(p.rank.tp_rank, 0, *p.agent.address))
    for d in decode:
        kinds = [(group.block_tokens, group.kv_heads) for group in d.cache.hello.groups]
        failed = partial(_failed, d)
        asks = DecodeRooms(d.agent, d.rank, kinds, WAIT_S, d.ended.append, failed)
        rest = tuple(rest_of(d, here, 5))
        asks.request(ROOM, RoomRequest(0, array("q", here), rest, tuple(workers), tp, 1))
        sides.append((d, asks))
    for p, rooms in sides:
        if isinstance(rooms, PrefillRooms):
            rooms.send(ROOM, 0, array("q", there), rest_of(p, there, 3), None)
            rooms.complete(ROOM)
    deadline = time.monotonic() + WAIT_S
    while not all(d.ended for d in decode) and time.monotonic() < deadline:
        for end, rooms in sides:
            end.agent.news.wait(0.003)
            finished, notices = end.agent.poll()
            if isinstance(rooms, PrefillRooms):
                rooms.take(notices)
            else:
                rooms.take(finished)
    assert [d.ended for d in decode] == [[ROOM]] * len(decode)


def _failed(end: End, room: int, why: str) -> None:
    end.ended.append(why)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(closing: ExitStack, name: str, dtype: str = "auto", draft: Any = None) -> tuple[End, End]:
    ends = tuple(
        End(POOLS[name](), dtype, sends, draft() if draft else None) for sends in (True, False)
    )
    for end in ends:
        closing.callback(end.agent.close)
    return ends


@pytest.mark.parametrize("name", HANDED_OFF)
def test_handed_off_byte_for_byte(closing: ExitStack, name: str) -> None:
    check(*pair(closing, name), [3, 1], [2, 4])


@pytest.mark.parametrize("draft", [mha_pool, mla_pool, dsa_pool])
def test_the_kv_of_a_draft_model_goes_along(closing: ExitStack, draft: Any) -> None:
    name = draft().__class__.__name__
    p, d = pair(closing, name, draft=draft)
    assert any(layer.startswith("draft") for layer in p.cache.hello.groups[0].layers)
    check(p, d, [3, 1], [2, 4])


def test_swapped_pages_would_be_seen(closing: ExitStack) -> None:
    """The control of the comparisons."""
    p, d = pair(closing, "MHATokenToKVPool")
    hand_off(p, d, [3, 1], [2, 4])
    (source, _), (target, _) = p.buffers()[0], d.buffers()[0]
    assert torch.equal(target[[2, 4]], source[[3, 1]])
    assert not torch.equal(target[[2, 4]], source[[1, 3]])


def check(p: End, d: End, there: list[int], here: list[int]) -> None:
    """Hand off; the pages and rows that were named have arrived, and nothing else has changed."""
    hand_off(p, d, there, here)
    kinds = ["kv", *(kind.value for kind in p.args.state_types)]
    moved_p = [there, *(translated(p, i, there, 3) for i in range(len(kinds) - 1))]
    moved_d = [here, *(translated(d, i, here, 5) for i in range(len(kinds) - 1))]
    for (source, group), (target, _) in zip(p.buffers(), d.buffers(), strict=True):
        assert torch.equal(target[moved_d[group]], source[moved_p[group]]), kinds[group]
        untouched = [n for n in range(len(target)) if n not in moved_d[group]]
        assert not target[untouched].any(), kinds[group]
        assert source[moved_p[group]].any()


def translated(end: End, number: int, pages: list[int], row: int) -> list[int]:
    named = indices(end.args, end.pools.kvcache, pages, row)[number]
    return [row] if end.args.state_types[number].value == "dsa_tail" else list(named)


def test_a_tail_named_item_by_item_would_land_in_other_requests_rows(closing: ExitStack) -> None:
    """The control: SGLang names a tail by its row, two runs of tokens and its length."""
    p, _ = pair(closing, "DSATokenToKVPool, shared index")
    assert "dsa_tail" in [kind.value for kind in p.args.state_types]
    named = tail_of(p.pools.kvcache, 3)
    assert len(named) == 6
    assert list(translate.items("dsa_tail", array("q", named))) == [3]
    assert list(translate.items("dsa", array("q", named))) == named


@pytest.mark.parametrize("name", ["HybridLinearKVPool", "HybridLinearKVPool, MLA"])
def test_layers_and_their_states_have_names_of_their_own(closing: ExitStack, name: str) -> None:
    p, _ = pair(closing, name)
    names = translate.layer_names(p.cache, p.args)
    assert names.kv == {1: ("1",), 3: ("3",)}
    assert names.states == {layer: (f"mamba.{layer}.0", f"mamba.{layer}.1") for layer in (0, 2)}
    group = p.cache.hello.groups[names.state_group]
    assert set(group.layers) == {part for parts in names.states.values() for part in parts}
    # Without ids, names count buffers: layer 2 would be named after a buffer of layer 0.
    p.args.state_layer_ids = [[]]
    assert not translate.layer_names(p.cache, p.args).states


@pytest.mark.parametrize("target", layerwise.ATTENTION)
def test_the_hooks_of_layers_find_what_they_look_for(target: str) -> None:
    module, kind, function = target.rsplit(".", 2)
    backend = getattr(importlib.import_module(module), kind)
    assert function in vars(backend)  # a hook on what is inherited would miss the calls
    assert list(inspect.signature(vars(backend)[function]).parameters)[4] == "layer"
    assert RadixLinearAttention.__name__ == layerwise._LINEAR


@pytest.mark.parametrize("dtype", ["nvfp4", "fp4_mx_block16"])
def test_pages_without_their_scales_are_not_handed_off(dtype: str) -> None:
    pools = POOLS["MLATokenToKVPoolFP4"]()
    args = transfer_args(pools, torch.zeros(8, 16), dtype)
    with pytest.raises(Incompatible, match=f"--kv-cache-dtype {dtype}.*scales beside") as refused:
        translate.describe(args, model_of(pools, args), SAME)
    assert "\n" not in str(refused.value)


def test_a_state_of_a_new_kind_is_refused() -> None:
    pools = POOLS["SWAKVPool"]()
    args = transfer_args(pools, torch.zeros(8, 16), "auto")
    args.state_types = [SimpleNamespace(value="memory_of_2027")]
    with pytest.raises(Incompatible, match=r"'memory_of_2027'.*not known"):
        translate.describe(args, model_of(pools, args), SAME)


# --- states over another number of ranks -----------------------------------------------------


def gdn(tp: int) -> Mamba2CacheParams:
    """Qwen3-Next's: queries, keys and values side by side, each divided by ranks."""
    shape = Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=64,
        n_groups=4,
        num_heads=8,
        head_dim=8,
        state_size=8,
        conv_kernel=4,
        conv_shard_groups=[32, 32, 64],
    )
    return Mamba2CacheParams(shape=shape, dtype=STATE_TYPES, layers=[0, 2])


def kda(tp: int) -> KimiLinearCacheParams:
    """Kimi-Linear's: the same in rows of one token each."""
    shape = KimiLinearStateShape.create(tp_world_size=tp, num_heads=4, head_dim=8)
    return KimiLinearCacheParams(shape=shape, dtype=STATE_TYPES, layers=[0, 2])


def mamba2(tp: int) -> Mamba2CacheParams:
    """Its parts are divided as well, but SGLang does not say where they are."""
    shape = Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=64,
        n_groups=4,
        num_heads=4,
        head_dim=16,
        state_size=8,
        conv_kernel=4,
    )
    return Mamba2CacheParams(shape=shape, dtype=STATE_TYPES, layers=[0, 2])


def part_of(whole: torch.Tensor, parts: list[int], axis: int, rank: int, tp: int) -> torch.Tensor:
    """Return a rank's share of a state that consists of ``parts`` along an axis."""
    cut = [part.chunk(tp, axis)[rank] for part in whole.split(parts, axis)]
    return torch.cat(cut, axis)


def states_of(pools: Pools) -> list[torch.Tensor]:
    cache = pools.requests.mamba_pool.mamba_cache
    return [*cache.conv, cache.temporal]


def ranks(closing: ExitStack, state: Callable[[int], Any], tp: int, sends: bool) -> list[End]:
    found = []
    for rank in range(tp):
        kvcache, requests = mamba_pools(state(tp), 4 // tp)
        pools = Pools(kvcache, FULL_MAMBA, requests)
        end = End(pools, "auto", sends, rank=Rank(rank, tp, 0, 1), kv_heads=4)
        closing.callback(end.agent.close)
        found.append(end)
    return found


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("state", [gdn, kda])
def test_a_state_goes_to_another_number_of_ranks(
    closing: ExitStack, state: Callable[[int], Any], sizes: tuple[int, int]
) -> None:
    prefill, decode = (
        ranks(closing, state, tp, sends) for tp, sends in zip(sizes, (True, False), strict=True)
    )
    shape = state(1).shape
    axes = [1 + getattr(shape, "conv_slice_axis", 0), 1]  # after the axis of layers
    parts = [list(shape.conv_shard_groups), [shape.temporal[0]]]
    # By layer, and the same in every slot.
    whole = [torch.rand(2, *shape.conv[0]), torch.rand(2, *shape.temporal)]
    for end in prefill:
        for tensor, one, part, axis in zip(states_of(end.pools), whole, parts, axes, strict=True):
            mine = part_of(one, part, axis, end.rank.tp_rank, end.rank.tp)
            tensor.copy_(mine.unsqueeze(1).expand_as(tensor))
    hand_off_ranks(prefill, decode, [3, 1], [2, 4])
    for end in decode:
        for tensor, one, part, axis in zip(states_of(end.pools), whole, parts, axes, strict=True):
            assert torch.equal(
                tensor[:, 5], part_of(one, part, axis, end.rank.tp_rank, end.rank.tp)
            )
            assert not tensor[:, [n for n in range(tensor.shape[1]) if n != 5]].any()
    # The control: parts that lie side by side make another state.
    cut = part_of(whole[0], parts[0], axes[0], 0, 2)
    assert not torch.equal(cut, whole[0].chunk(2, axes[0])[0])


def test_a_state_whose_parts_are_not_known_stays_with_its_ranks(closing: ExitStack) -> None:
    (p,), (d, _) = ranks(closing, mamba2, 1, True), ranks(closing, mamba2, 2, False)
    with pytest.raises(Refused, match="state_"):
        negotiate(d.cache.hello, p.cache.hello)
    assert p.cache.hello.format["state_tp"] == 1


# --- the linker ------------------------------------------------------------------------------


def linked(pools: Pools, draft: Any = None, packed: bool = False) -> KVConnectLinker:
    params = params_for(pools.kvcache, tuple(pools.components))
    params.page_size = pools.kvcache.page_size
    if pools.requests is not None:
        params.req_to_token_pool = pools.requests
    if packed:
        params.mtp_draft_device_pools = (draft,)
    elif draft is not None:
        params.sidecar_draft_device_pools = (draft,)
    extra = {"host_bytes": "64MiB", "digest": "full"}
    return KVConnectLinker(None, params, components=set(pools.components), extra_config=extra)


def rows_of(linker: KVConnectLinker, name: PoolName, page: int) -> list[torch.Tensor]:
    """Return the bytes of one page of a pool, by buffer."""
    entry = linker.pools[name]
    return [
        memory_of(base + page * size, size)
        for component in entry.buffer_meta
        for base, _, size in component
    ]


def transfers(pools: Pools, keys: list[str], pages: list[int]) -> list[PoolTransfer]:
    """Return what SGLang's tree hands over for two pages; a window or state at their end."""
    size = pools.kvcache.page_size
    tokens = torch.cat([torch.arange(size) + page * size for page in pages])
    found = [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=tokens)]
    ends = {"SWA": tokens[-size:], "MAMBA": torch.tensor(pages[-1:])}
    for component in pools.components:
        if component.name in ends:
            found.append(
                PoolTransfer(
                    name=PoolName[component.name],
                    keys=keys[-1:],
                    device_indices=ends[component.name],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            )
    return found


def check_offload(pools: Pools, draft: Any = None, packed: bool = False) -> None:
    linker = linked(pools, draft, packed)
    here, there, keys = [3, 1], [2, 4], names(2)
    for number, entry in enumerate(linker.pools.values()):
        for buffer in entry.kv_buffer:
            flat = buffer.view(torch.uint8)
            flat.random_(0, 256, generator=torch.Generator().manual_seed(number))
    ends = {name: name not in whole(linker) for name in linker.pools}
    moved = {name: [1] if ends[name] else [0, 1] for name in linker.pools}
    wanted = {
        name: [[row.clone() for row in rows_of(linker, name, here[i])] for i in moved[name]]
        for name in linker.pools
    }
    assert linker.offload(transfers(pools, keys, here))
    for tier in linker.tiers.values():
        tier.drain()
    assert linker.lookup("req", transfers(pools, keys, here))[-1:] == [2]
    assert linker.load("req", transfers(pools, keys, there))
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    for name, pages in wanted.items():
        for i, rows in zip(moved[name], pages, strict=True):
            landed = rows_of(linker, name, there[i])
            assert all(torch.equal(a, b) for a, b in zip(landed, rows, strict=True)), name
            other = rows_of(linker, name, 5)
            assert not any(torch.equal(a, b) for a, b in zip(other, rows, strict=True)), name
    linker.close()


def whole(linker: KVConnectLinker) -> set[PoolName]:
    """Return the pools of which every page is stored."""
    return {n for n, entry in linker.pools.items() if entry.indices_from_pool is PoolName.KV}


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_byte_for_byte(name: str) -> None:
    check_offload(POOLS[name]())


HYBRIDS = ("HybridLinearKVPool", "HybridLinearKVPool, MLA")


@pytest.mark.parametrize("name", ["MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", *HYBRIDS])
@pytest.mark.parametrize("draft", [mha_pool, mla_pool])
def test_the_kv_of_a_draft_model_is_kept_beside_the_target_s(name: str, draft: Any) -> None:
    pool = draft(layers=1) if draft is mha_pool else draft()
    assert PoolName.DRAFT in linked(POOLS[name](), pool).pools
    check_offload(POOLS[name](), pool)


@pytest.mark.parametrize("kind", ["DSA", "MLA", "DeepSeekV4"])
def test_the_kv_of_the_model_s_own_draft_layers_is_kept(kind: str) -> None:
    name = f"{kind}TokenToKVPool"
    alone = linked(POOLS[name]())
    beside = linked(POOLS[name](), POOLS[name]().kvcache, packed=True)
    buffers = [
        sum(len(entry.kv_buffer) for entry in linker.pools.values()) for linker in (alone, beside)
    ]
    assert buffers[0] < buffers[1]
    check_offload(POOLS[name](), POOLS[name]().kvcache, packed=True)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_states_of_a_draft_model_are_refused(name: str) -> None:
    pools = POOLS[name]()
    params = params_for(pools.kvcache, tuple(pools.components))
    params.req_to_token_pool = pools.requests
    params.mtp_draft_device_pools = (mha_pool(layers=1),)
    assert PoolName.DRAFT in device_pools(params, pools.components).entry_map
    params.mtp_draft_mamba_pools = (pools.requests.mamba_pool,)
    with pytest.raises(Incompatible, match="states of a draft model") as refused:
        device_pools(params, pools.components)
    assert "\n" not in str(refused.value)


def test_draft_layers_that_sglang_leaves_out_are_refused() -> None:
    """Windows and states in one model, which SGLang assembles."""
    pools = POOLS["SWAKVPool"]()
    components = pools.components | FULL_MAMBA
    params = params_for(pools.kvcache, tuple(components))
    params.req_to_token_pool = POOLS["HybridLinearKVPool"]().requests
    assert PoolName.MAMBA in device_pools(params, components).entry_map
    params.mtp_draft_device_pools = (mha_pool(layers=1),)
    with pytest.raises(Incompatible, match=r"own draft layers.*without the linker") as refused:
        device_pools(params, components)
    assert "\n" not in str(refused.value)


def test_a_draft_of_another_kind_is_refused() -> None:
    with pytest.raises(Incompatible, match="draft model in SWAKVPool"):
        linked(POOLS["MHATokenToKVPool"](), POOLS["SWAKVPool"]().kvcache)


@pytest.mark.parametrize(
    "name",
    [name for name, (_, linker) in KINDS.items() if linker != SERVED and name not in ABSTRACT],
)
def test_refused_in_one_line(name: str) -> None:
    pool = object.__new__(classes()[name])
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), page_size=PAGE
    )
    with pytest.raises(Incompatible) as refused:
        device_pools(params, POOLS["MHATokenToKVPool"]().components)
    line = str(refused.value)
    assert line.startswith(f"{name} (FULL) cannot be offloaded: its layout is not known")
    assert "\n" not in line and "without the linker" in line
