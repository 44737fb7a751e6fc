"""Every benchmark runs to its end, small, in seconds: what it asks of the code is still there.

Figures mean nothing here. Benchmarks that start servers get servers without a model
(``tests/fakes/model_servers.py``); those that look into an engine are run with one in
``tests/engines/test_benchmarks.py``, SGLang's in ``tests/sglang``.
"""

from __future__ import annotations

import ast
import gc
import logging
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import chaos, choosing, common, disaggregate, handoff, hostile, sharing
from benchmarks.copy import MIB
from benchmarks.offload_engine import DEVICE_BLOCKS
from benchmarks.serve import fleet as serve_fleet
from benchmarks.serve import parts, sglang_servers, workloads
from kvconnect.settings import check_settings
from scripts import headlines, measured
from tests.fakes import model_servers
from tests.fakes.model_servers import Caches, LoopbackLink, use_model_servers
from tests.hostile import Outcome
from tests.small import smoke

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
MARK = "smokes"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a benchmark by its name, with arguments and other constants."""
    return lambda *words, **sizes: smoke(monkeypatch, tmp_path, *words, **sizes)


# With servers without a model ---------------------------------------------------------------------


@pytest.mark.smokes("handoff")
def test_handoff(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_model_servers(monkeypatch)
    found = run("handoff", "--quick", Link=LoopbackLink)
    rows = {row.format(way) for row in measured.PUSHED.values() for way in ("push", "pull")}
    assert shown("handoff") | rows | {f"{row}_apart" for row in rows} <= found.keys()
    assert {"ttft_pull_over_nixl_4k_apart", "exposed_over_wire_4k_apart"} <= found.keys()
    assert found["wrong_tokens"] == 0


def test_the_hand_off_s_benchmark_ends_with_an_error_after_a_rename(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a smoke run finds what is not there any more, or means something else."""
    use_model_servers(monkeypatch)
    monkeypatch.delattr(handoff.pd, "standing_ticket")
    with pytest.raises(AttributeError, match="standing_ticket"):
        run("handoff", "--quick", Link=LoopbackLink)
    monkeypatch.setattr(sharing, "HOST_BYTES", "many")
    with pytest.raises(ValueError, match="host_bytes"):
        run("sharing", "--rounds", "1")


@pytest.mark.smokes("sharing")
def test_sharing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_model_servers(monkeypatch)
    found = run("sharing", "--rounds", "1", "--requests", "20", POLLS_S=0.0)
    assert found["receipt_mismatch"] == found["wrong_tokens"] == 0
    assert {"ttft_peer_over_host_2k_apart", "server_slowdown_apart"} <= found.keys()


@pytest.mark.smokes("chaos")
def test_chaos(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_model_servers(monkeypatch)
    monkeypatch.setattr(chaos, "cut", lambda ports: nullcontext())
    every = {"THINK_S": 0.0, "SHORT_S": 0.0, "LONG_S": 0.0, "BETWEEN_S": (0.0, 0.0)}
    found = run("chaos", "--minutes", "0.01", **every)
    assert found["faults"] > 0
    assert found["right"] > 0 == found["wrong_tokens"]
    assert 0 < found["served_share"] <= 1


@pytest.mark.smokes("serve")
def test_serve(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_model_servers(monkeypatch)
    for owner, name in (
        (serve_fleet, "VLLM_ROUTER"),
        (serve_fleet, "LMCACHE_PACKAGES"),
        (sglang_servers, "SGLANG"),
    ):
        monkeypatch.setattr(owner, name, tmp_path)
    for owner in (parts, workloads, sglang_servers):
        for name in ("bench_serve", "sglang_bench", "guidellm", "lmcache_bench", "shared_prefix"):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, loaded)
    found = run("serve.__main__", "--rounds", "1", "--requests", "12")
    assert shown("serve") <= found.keys()


@pytest.mark.smokes("choosing")
def test_choosing(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_model_servers(monkeypatch)

    def lossy(port: int, *arguments: Any) -> dict[str, Any]:
        found = loaded(port, *arguments)
        if "--max-concurrency" not in arguments[1]:
            found["completed"], found["errors"][0] = found["completed"] - 1, "gone"
            del found["failed_requests"]  # a name of LMCache's
        return found

    monkeypatch.setattr(parts, "bench_serve", lossy)
    there = dict.fromkeys(("VLLM_ROUTER", "SMG", "LMCACHE_PACKAGES", "SGLANG"), tmp_path)
    monkeypatch.setattr(serve_fleet, "VLLM_ROUTER", tmp_path)
    monkeypatch.setattr(serve_fleet, "LMCACHE_PACKAGES", tmp_path)
    found = run("choosing", "--rounds", "2", "--requests", "12", **there)
    assert choosing.FLEETS.keys() == measured.CHOICES.keys()
    for name, fleet in choosing.FLEETS.items():
        assert found[f"failed_{name}"] == 2, "one a round"
        assert found[f"ttft_ms_{name}_low"] <= found[f"ttft_ms_{name}"]
        assert (f"ttft_over_{name}" in found) is bool(fleet.ours)


@pytest.mark.smokes("disaggregate")
def test_disaggregate(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_model_servers(monkeypatch)
    monkeypatch.setattr(parts, "bench_serve", loaded)
    found = run("disaggregate", "--rounds", "2", "--requests", "12")
    assert found["ttft_auto_over_best_p50"] == 1.0
    for workload in ("trace", "mixed"):
        assert {f"itl_p99_auto_over_always_{workload}", f"handed_off_{workload}"} <= found.keys()
        assert {f"ttft_p50_ms_{workload}_{rule}" for rule in disaggregate.RULES} <= found.keys()


def test_auto_is_compared_with_what_was_better_in_the_same_round() -> None:
    """Control: the ratio of medians would be 1 here."""
    ms = {"always": (1.0, 4.0, 8.0), "never": (2.0, 2.0, 9.0), "auto": (2.0, 4.0, 8.0)}
    others = {"p99_ttft_ms": 1.0, "p99_itl_ms": 1.0, "handed_off": 0.5}
    saved = {rule: [{"p50_ttft_ms": one, **others} for one in each] for rule, each in ms.items()}
    found = disaggregate.figures("x", saved)
    assert found["ttft_auto_over_best_p50_x"] == 2.0
    assert found["ttft_p50_ms_x_always"] == found["ttft_p50_ms_x_auto"] == 4.0
    assert found["handed_off_x"] == 0.5


def test_the_spread_is_that_of_rounds_and_ratios_are_within_one() -> None:
    """Control: the ratio of medians would be 1 here."""
    saved = {
        "plain": [{"mean_ttft_ms": ms} for ms in (1.0, 6.0, 10.0)],
        "kvconnect": [{"mean_ttft_ms": ms} for ms in (2.0, 6.0, 30.0)],
    }
    for each in saved.values():
        for one in each:
            others = {"p99_ttft_ms": 1.0, "mean_itl_ms": 1.0, "output_throughput": 1.0}
            one.update({**others, "completed": 1, "errors": ["", "gone"]})  # type: ignore[dict-item]
    found = choosing.figures(saved)
    assert (found["ttft_ms_plain_low"], found["ttft_ms_plain"]) == (1.0, 6.0)
    assert found["ttft_ms_plain_high"] == 10.0
    assert found["ttft_over_plain"] == 2.0
    assert "ttft_over_kvconnect" not in found
    assert found["failed_plain"] == 3


def loaded(port: int, *arguments: Any, **_: Any) -> dict[str, Any]:
    """What load generators save, of as many requests as they are told."""
    words = [str(word) for each in arguments if isinstance(each, (list, tuple)) for word in each]
    count = parts.FULL.documents * 2
    for word in words:
        if "max_requests,count=" in word:
            count = int(word.rpartition("=")[2])
    if "--num-prompts" in words:
        count = int(words[words.index("--num-prompts") + 1])
    times = ("ttft", "itl", "tpot", "e2el")
    ms = {f"{kind}_{time}_ms": 1.0 for kind in ("mean", "p50", "p99") for time in times}
    both = {"completed": count, "errors": [""] * count, "successful_requests": count}
    rate = {"duration": 1.0, "elapsed_time": 1.0, "output_throughput": 1.0}
    totals = {"request_totals": {"successful": count}}
    nested = {"time_to_first_token_ms": {"successful": {"mean": 1.0}}}
    return {**both, **ms, **rate, **totals, **nested, "failed_requests": 0}


# With an engine without a model -------------------------------------------------------------------


class FakeEngine:
    """Stands in for :class:`benchmarks.offload_engine.Engine`."""

    def __init__(self, name: str, connector: str | None, extra: dict[str, Any]) -> None:
        self.name = name
        if connector == "KVConnect":
            check_settings(extra)
        self._caches = Caches(DEVICE_BLOCKS, 1 << 20 if connector else 0, 1)
        self._hits = 0
        self.llm = SimpleNamespace(generate=self._generate)

    def generate(
        self, prompts: list[list[int]], tokens: int, cached: int
    ) -> tuple[float, list[list[int]]]:
        for prompt in prompts:
            sources = self._caches.look_up(prompt)
            self._hits += sources["host"]
            assert len(prompt) - sources["computed"] == cached, self.name
        return 0.001, [model_servers.answer(prompt, tokens) for prompt in prompts]

    def _generate(self, asked: list[dict[str, list[int]]], *_: Any, **__: Any) -> None:
        for one in asked:
            self._caches.look_up(one["prompt_token_ids"])

    def ttft(self, prompt: list[int], cached: int) -> float:
        return self.generate([prompt], 1, cached)[0]

    def counter(self, name: str, **_: str) -> float:
        assert name in model_servers.METRICS
        return self._hits if name == "hit_tokens" else 1.0

    def close(self) -> None: ...


@pytest.mark.smokes("offload_engine")
def test_offload_engine(run: Any) -> None:
    found = run("offload_engine", "--rounds", "1", Engine=FakeEngine)
    assert shown("offload_engine") <= found.keys()


@pytest.mark.smokes("tiers")
def test_tiers(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = {"kind": "valkey", "address": "127.0.0.1:1"}
    found = run(
        "tiers", "--rounds", "1", Engine=FakeEngine, SETTLE_S=0.0, start_server=lambda *_: server
    )
    assert shown("tiers") <= found.keys()
    assert "ttft_remote_over_recompute" in found


# As they are, but small ---------------------------------------------------------------------------


@pytest.mark.smokes("copy")
def test_copy(run: Any) -> None:
    found = run("copy", "--rounds", "1", AREA_BYTES=24 * MIB, SAMPLE_BYTES=4 * MIB)
    assert "ratio_64k_store" in found


@pytest.mark.smokes("copy_model")
def test_copy_model(run: Any) -> None:
    assert run("copy_model", WARM_BYTES=1 << 30, MEASURED_BYTES=1 << 30)


@pytest.mark.smokes("disk_paths")
def test_disk_paths(run: Any) -> None:
    assert run("disk_paths", ROUNDS=1, ROUND_BYTES=8 * MIB)


@pytest.mark.smokes("store", "valkey_server")
def test_store(run: Any) -> None:
    small = {"ROUNDS": 1, "ROUND_BYTES": 16 * MIB, "TIER_BYTES": 64 * MIB, "BLOCKS": 2000}
    assert shown("store") <= run("store", **small).keys()


@pytest.mark.smokes("transport", "transfer_methods", "link")
def test_transport(run: Any) -> None:
    found = run(
        "transport",
        "--quick",
        SAMPLE_BYTES=4 * MIB,
        RATES={"1g": (1e9, 4 * MIB)},
        HANDSHAKES=2,
        IDLE_S=0.01,
        AREA_BYTES=16 * MIB,
    )
    assert shown("transport") <= found.keys()


@pytest.mark.smokes("handoff_beside")
def test_handoff_beside(run: Any) -> None:
    found = run("handoff_beside", "--rounds", "1", HANDOFFS=3)
    assert found["shared_gbps_alone"] == 0 < found["shared_gbps_beside"]
    assert found["p99_beside_over_elsewhere"] > 0


@pytest.mark.smokes("decisions")
def test_decisions(run: Any) -> None:
    found = run("decisions", "--rounds", "1", FLEETS=(2, 4), DECISIONS=5)
    assert found["decision_us_2"] > 0 and found["decision_us_4"] > 0


@pytest.mark.smokes("plan")
def test_plan(run: Any) -> None:
    small = {"PROMPT_BLOCKS": 256, "PROMPTS": 8, "SLOTS": 8 * 256, "RUNNING": 16}
    garbage = SimpleNamespace(collect=gc.collect, freeze=int, unfreeze=int)
    assert run("plan", "--rounds", "1", **small, INTERVAL=2000, gc=garbage)


@pytest.mark.smokes("router", "fake_engines")
def test_router(run: Any) -> None:
    found = run(
        "router",
        "--seconds",
        "0.5",
        "--rate",
        "100",
        ROUNDS=1,
        SLOW=4,
        HOSTILE=2,
        PEERS=Path("nowhere"),
    )
    assert found["answers_per_core_second_push"] > 0


@pytest.mark.smokes("continue_streams")
def test_continue_streams(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_model_servers(monkeypatch)
    small = {"ROUNDS": 1, "STREAMS": 2, "NEW": 40}
    found = run("continue_streams", "--seconds", "0.5", "--rate", "50", **small)
    assert found["wrong_streams"] == found["broken_streams"] == 0
    assert found["journal_over_relay"] > 0
    assert found["cut_streams"] == found["left_streams"] == 2


@pytest.mark.smokes("balance")
def test_balance(run: Any) -> None:
    small = {"REQUESTS": 200, "SEEDS": 1, "CACHED_SEEDS": 1, "CACHED_REQUESTS": 200}
    small |= {"REAL_REQUESTS": 40}
    assert run("balance", **small)["real_imbalance_minimum"] > 0


@pytest.mark.smokes("hostile")
def test_hostile(run: Any) -> None:
    """What a corpus does has tests of its own, and takes minutes."""
    names = hostile.corpora()
    silent = SimpleNamespace(disable=int, CRITICAL=logging.CRITICAL)
    corpora = dict.fromkeys(names, lambda: Outcome(cases=1))
    found = run("hostile", corpora=lambda: corpora, logging=silent)
    assert found["cases"] == len(names) > 5


@pytest.mark.smokes("mooncake_storage")
def test_mooncake_storage(run: Any, tmp_path: Path) -> None:
    program = tmp_path / "checkout" / "benchmarks" / "storage_benchmark_v1" / "benchmark.py"
    program.parent.mkdir(parents=True)
    program.write_text(textwrap.dedent(THEIR_BENCHMARK))
    checkout = str(tmp_path / "checkout")
    found = run("mooncake_storage", "--mooncake", checkout, "--rounds", "1", makers=disk_alone)
    assert found["disk_read_over_file"] > 0


@contextmanager
def disk_alone(folder: Path) -> Iterator[dict[str, Any]]:
    from kvconnect.tiers.backends import make_store

    settings = {"path": str(folder / "tier"), "capacity": 64 * MIB, "min_free": 0}
    yield {"disk": lambda: make_store("disk", settings, b"benchmark")}


THEIR_BENCHMARK = """
    class DiskHashTable:
        page_size = 4096

        def __init__(self):
            self._written_pages = set()
            names = ("read", "write")
            self.stats = {f"{n}_{k}": 0 for n in names for k in ("count", "bytes", "time_s")}
            self.stats |= {f"{n}_latencies_ms": [] for n in names}
            self._allocate_file()

        def _allocate_file(self): ...
        def read(self, page_id, **place): return 1.0
        def write(self, page_id, **place): return 1.0
        def close(self, **_): ...

    def get_model_config(name):
        return name

    def run_benchmark(*_, **__):
        made = DiskHashTable()
        place = {"offset_in_page": 0, "length": made.page_size}
        times = {n: {"p50_ms": getattr(made, n)(1, **place)} for n in ("write", "read")}
        made.close()
        return {"read_pages": 1, "write_pages": 1, "storage": times, "requests_per_second": 1.0}
"""


# All of them --------------------------------------------------------------------------------------


def shown(name: str) -> set[str]:
    """Return the figures of a benchmark that the README and docs/benchmarks.md show."""
    tables = {"serve": measured.SERVING}
    rows = {figure for row in tables.get(name, ()) for figure in row.figures}
    return rows | {row.figure for row in headlines.HEADLINES if row.file == name}


def benchmarks(folder: Path) -> set[str]:
    """Return the names of all files and packages but the one that every benchmark uses."""
    files = {path.stem for path in folder.glob("*.py")}
    packages = {path.parent.name for path in folder.glob("*/__main__.py")}
    return (files | packages) - {Path(common.__file__).stem}


def smoked(files: Iterable[Path]) -> set[str]:
    """Return the benchmarks that tests are marked with: ``@pytest.mark.smokes("NAME", ...)``."""
    found = set()
    for path in files:
        if MARK not in (text := path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == f"pytest.mark.{MARK}":
                    found |= {ast.literal_eval(argument) for argument in mark.args}
    return found


def test_every_benchmark_has_a_smoke_run(tmp_path: Path) -> None:
    """Control: a new one has none, and a mark of one that is gone is found."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    assert smoked(tests) == benchmarks(BENCHMARKS)
    (tmp_path / "new.py").touch()
    assert benchmarks(tmp_path) - smoked(tests) == {"new"}
    assert smoked(tests) - benchmarks(tmp_path)
