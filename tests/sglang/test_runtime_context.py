"""What of SGLang's own settings is refused, and what its ranks are told to share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.environ import envs
from sglang.srt.runtime_context import SpawnRanks, reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import publish

from kvconnect import memory
from kvconnect.engines.sglang import runtime_context
from kvconnect.engines.sglang.runtime_context import worker_share
from kvconnect.errors import ConfigError
from kvconnect.settings import Settings

GIB = 1 << 30
RELEASE = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE
RELEASE_TIMEOUT = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT


def published(ranks: SpawnRanks | None = None, **flags: Any) -> ServerArgs:
    reset_context()
    args = ServerArgs(model_path="dummy", device="cpu", **flags)
    publish(args, role="test", ranks=ranks)
    return args


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    yield
    reset_context()


@pytest.fixture
def setting() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_settings_as_they_come_are_taken() -> None:
    runtime_context.check(published())
    assert runtime_context.quiet_s() > runtime_context.SPARE_S


def test_pages_that_are_given_away_at_once(setting: ExitStack) -> None:
    """SGLang would use an aborted request's pages again while some still land in them."""
    setting.enter_context(RELEASE.override(False))
    with pytest.raises(ConfigError, match=f"{RELEASE.name}='0'.*unset it"):
        runtime_context.check(published())


@pytest.mark.parametrize("seconds", [-1, 0, 4.5, 5, float("inf"), float("nan")])
def test_pages_that_are_given_away_too_early_or_never(setting: ExitStack, seconds: float) -> None:
    setting.enter_context(RELEASE_TIMEOUT.override(seconds))
    with pytest.raises(ConfigError, match=f"{RELEASE_TIMEOUT.name}={seconds}.*more than 5 s"):
        runtime_context.check(published())


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({}, None),
        ({"attn_cp_size": 2}, "--attention-context-parallel-size=2"),
        ({"attn_dcp_size": 2}, "--decode-context-parallel-size=2"),
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding=True"),
    ],
    ids=str,
)
def test_pages_of_which_a_rank_has_a_part(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], flag: str | None
) -> None:
    plain = {"attn_cp_size": 1, "attn_dcp_size": 1, "enable_kv_cache_sharding": False}
    args = published()
    parallel = SimpleNamespace(**{**plain, **changed})
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    if flag is None:
        runtime_context.check(args)
    else:
        with pytest.raises(ConfigError, match=re.escape(flag)):
            runtime_context.check(args)


def test_pages_that_would_land_in_host_memory() -> None:
    args = published(enable_hisparse=True)
    with pytest.raises(ConfigError, match=r"--enable-hisparse=True.*leave it out"):
        runtime_context.check(args)


def test_checksums_of_pages_that_are_not_the_ones_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    args = published(disaggregation_enable_kv_checksum=True)
    runtime_context.check(args)
    monkeypatch.setenv("KVCONNECT_LAYERWISE", "1")
    with pytest.raises(ConfigError, match=r"KVCONNECT_LAYERWISE='1'.*-enable-kv-checksum"):
        runtime_context.check(args)


@pytest.mark.parametrize(("name", "used"), [("auto", "tcp"), ("tcp", "tcp"), ("nixl", None)])
def test_memory_that_is_given_up_and_taken_again(name: str, used: str | None) -> None:
    assert runtime_context.transport(name, published()) == name
    args = published(enable_memory_saver=True)
    if used is None:
        with pytest.raises(ConfigError, match=r"transport='nixl'.*--enable-memory-saver"):
            runtime_context.transport(name, args)
    else:
        assert runtime_context.transport(name, args) == used


@pytest.mark.parametrize(
    "flag", [{"enable_two_batch_overlap": True}, {"elastic_ep_backend": "mooncake"}], ids=str
)
def test_some_forwards_call_layers_twice(flag: dict[str, Any]) -> None:
    """Elastic expert parallelism runs a forward again after it has lost a rank."""
    plain = published()
    assert runtime_context.calls_layers_once(plain)
    both = {"enable_two_batch_overlap": False, "elastic_ep_backend": None}
    assert all(getattr(plain, name) == value for name, value in both.items())
    args: Any = SimpleNamespace(**{**both, **flag})
    assert not runtime_context.calls_layers_once(args)


def test_media_whose_hashes_are_of_this_server_alone(setting: ExitStack) -> None:
    assert runtime_context.compares_media(published())
    assert not runtime_context.compares_media(published(language_only=True))
    setting.enter_context(envs.SGLANG_MM_SKIP_COMPUTE_HASH.override(True))
    assert not runtime_context.compares_media(published())


@pytest.mark.parametrize(
    ("flags", "workers"),
    [
        ({}, 1),
        ({"tp_size": 2}, 2),
        ({"dp_size": 2}, 2),  # two engines
        ({"tp_size": 2, "attn_dp_size": 2}, 2),  # one, of two ranks
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 2),  # as it was once spelt
    ],
    ids=str,
)
def test_host_memory_is_divided_once(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], workers: int
) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda: 64 * GIB)
    published()
    whole = worker_share(Settings())
    published(**flags)
    assert worker_share(Settings()) == whole // workers


def test_an_explicit_size_is_of_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda: 64 * GIB)
    published(tp_size=2, attn_dp_size=2)
    assert worker_share(Settings(host_bytes=40 * GIB)) == 20 * GIB
    published(dp_size=2)
    with pytest.raises(ConfigError, match="2 engines"):
        worker_share(Settings(host_bytes=40 * GIB))


def test_every_rank_has_a_port_of_its_own() -> None:
    """Also where ranks of one tensor-parallel group attend to requests of their own."""
    numbers = []
    for rank in range(4):
        published(ranks=SpawnRanks(world_rank=rank), tp_size=4, attn_dp_size=2)
        numbers.append(runtime_context.rank_number())
    assert numbers == [0, 1, 2, 3]


def test_replicas_and_stages_have_ports_of_their_own() -> None:
    numbers = []
    for replica in range(2):
        for rank in range(4):
            ranks = SpawnRanks(world_rank=rank, dp_rank=replica)
            published(ranks=ranks, tp_size=2, pp_size=2, dp_size=2)
            numbers.append(runtime_context.rank_number())
    assert numbers == list(range(8))
