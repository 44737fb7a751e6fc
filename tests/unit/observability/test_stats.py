"""Stats: what is recorded is what arrives, whole, once, and in a bounded payload."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import Misuse
from kvconnect.stats import (
    COUNTERS,
    HISTOGRAMS,
    MOST_LABELS,
    OTHER,
    SIZE_BUCKETS,
    TIME_BUCKETS,
    TRANSFER_SIZE,
    TRANSFER_WIRE,
    OffloadingConnectorStats,
)
from kvconnect.types import Tier, TransferType

VLLM_SIZE_BUCKETS = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)


def sample() -> OffloadingConnectorStats:
    stats = OffloadingConnectorStats()
    stats.record_transfer("GPU_to_CPU", 1 << 20, 0.25)
    stats.record_transfer("GPU_to_CPU", 3 << 20, 0.5)
    stats.record_transfer("CPU_to_GPU", 4096, 0.125)
    stats.count("lookups")
    stats.count("hit_tokens", 512, "host")
    stats.gauge("host_blocks_used", 7)
    stats.observe("load_latency_seconds", 2.0, "host")
    return stats


def counts(stats: OffloadingConnectorStats, name: str, label: str) -> list[int]:
    result: list[int] = stats.data[HISTOGRAMS][name][label][1:]
    return result


# --- recording --------------------------------------------------------------------------------


def test_one_operation_counts_once_in_size_and_in_time() -> None:
    stats = OffloadingConnectorStats()
    stats.record_transfer("GPU_to_CPU", 5000, 0.25)
    size = stats.data[HISTOGRAMS][TRANSFER_SIZE]["GPU_to_CPU"]
    wire = stats.data[HISTOGRAMS][TRANSFER_WIRE]["GPU_to_CPU"]
    assert (size[0], sum(size[1:])) == (5000, 1)
    assert (wire[0], sum(wire[1:])) == (0.25, 1)


@pytest.mark.parametrize("bounds", [SIZE_BUCKETS, TIME_BUCKETS], ids=["size", "time"])
def test_buckets_are_a_strictly_rising_series(bounds: tuple[float, ...]) -> None:
    assert all(low < high for low, high in pairwise(bounds))


def test_buckets_keep_vllms_bounds_and_reach_beyond() -> None:
    assert set(VLLM_SIZE_BUCKETS) <= set(SIZE_BUCKETS)
    assert SIZE_BUCKETS[0] <= 4096 and SIZE_BUCKETS[-1] >= 1e11
    assert TIME_BUCKETS[0] <= 1e-5 and TIME_BUCKETS[-1] >= 600


@pytest.mark.parametrize(
    ("nbytes", "bucket"),
    [
        (0, 0),
        (4096, 0),
        (4097, 1),
        (10**11, len(SIZE_BUCKETS) - 1),
        (10**11 + 1, len(SIZE_BUCKETS)),
    ],
)
def test_bounds_are_inclusive_and_the_last_bucket_is_open(nbytes: int, bucket: int) -> None:
    stats = OffloadingConnectorStats()
    stats.record_transfer("GPU_to_CPU", nbytes, 0.0)
    expected = [0] * (len(SIZE_BUCKETS) + 1)
    expected[bucket] = 1
    assert counts(stats, TRANSFER_SIZE, "GPU_to_CPU") == expected


def test_labels_from_enums_become_plain_text() -> None:
    stats = OffloadingConnectorStats()
    stats.record_transfer(TransferType.GPU_TO_CPU, 1, 0.0)
    stats.count("hit_tokens", 1, Tier.HOST)
    stats.gauge("host_blocks_used", 1, Tier.HOST)
    stats.observe("load_latency_seconds", 0.0, Tier.HOST)
    labels = {
        label for section in stats.data.values() for values in section.values() for label in values
    }
    assert {type(label) for label in labels} == {str}
    assert labels == {"GPU_to_CPU", "host"}


def test_numpy_numbers_become_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    stats = OffloadingConnectorStats()
    stats.record_transfer("GPU_to_CPU", numpy.int64(4096), numpy.float32(0.5))
    stats.count("lookups", numpy.int32(3))
    stats.gauge("host_blocks_used", numpy.float64(2.0))
    stats.count("handoff_peer_seconds", numpy.float32(0.25), "a:1")
    assert stats.data[COUNTERS]["handoff_peer_seconds"] == {"a:1": 0.25}, "not cut to whole seconds"
    assert OffloadingConnectorStats(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data)))
    # Control: unconverted, the same number is refused.
    with pytest.raises(Misuse):
        OffloadingConnectorStats({COUNTERS: {"lookups": {"": numpy.int32(3)}}})


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.record_transfer("GPU_to_CPU", -1, 0.0),
        lambda s: s.record_transfer("GPU_to_CPU", 1, -0.5),
        lambda s: s.record_transfer("GPU_to_CPU", 1, float("nan")),
        lambda s: s.count("lookups", -1),
        lambda s: s.count("handoff_peer_seconds", float("nan"), "a:1"),
        lambda s: s.observe("load_latency_seconds", -1.0),
        lambda s: s.observe("load_latency_seconds", float("nan")),
    ],
    ids=["bytes", "seconds", "seconds-nan", "count", "count-nan", "duration", "duration-nan"],
)
def test_numbers_that_would_take_a_counter_back_are_refused(call: Any) -> None:
    stats = OffloadingConnectorStats()
    with pytest.raises(Misuse):
        call(stats)
    assert stats.is_empty()


# --- merging ----------------------------------------------------------------------------------


def test_aggregate_sums_and_leaves_the_other_alone() -> None:
    mine, theirs = sample(), sample()
    theirs.gauge("host_blocks_used", 9)
    theirs.record_transfer("CPU_to_GPU", 8192, 0.5)
    before = copy.deepcopy(theirs.data)

    assert mine.aggregate(theirs) is mine
    mine.record_transfer("CPU_to_GPU", 1, 1.0)

    assert theirs.data == before
    assert mine.reduce() == {
        "GPU_to_CPU_total_bytes": 8 << 20,
        "GPU_to_CPU_total_time": 1.5,
        "GPU_to_CPU_operations": 4,
        "CPU_to_GPU_total_bytes": 4096 + 4096 + 8192 + 1,
        "CPU_to_GPU_total_time": 1.75,
        "CPU_to_GPU_operations": 4,
        "lookups": 2,
        "hit_tokens_host": 1024,
        "host_blocks_used": 9,
    }


def test_what_was_taken_over_whole_is_not_shared() -> None:
    theirs = sample()
    mine = OffloadingConnectorStats().aggregate(theirs)
    assert mine == theirs
    mine.record_transfer("CPU_to_GPU", 1, 1.0)
    mine.count("lookups")
    mine.gauge("host_blocks_used", 1)
    assert theirs == sample()


def test_a_gauge_the_other_lacks_stays() -> None:
    mine, theirs = OffloadingConnectorStats(), OffloadingConnectorStats()
    mine.gauge("ledger_held_blocks", 1, "store")
    mine.gauge("ledger_held_blocks", 2, "load")
    theirs.gauge("ledger_held_blocks", 5, "load")
    reduced = mine.aggregate(theirs).reduce()
    assert reduced == {"ledger_held_blocks_store": 1, "ledger_held_blocks_load": 5}


# Seconds are multiples of 1/1024: their sums are exact in any order.
OPERATION = st.tuples(
    st.sampled_from(["GPU_to_CPU", "CPU_to_GPU"]),
    st.integers(0, 2 * 10**11),
    st.integers(0, 1 << 20).map(lambda n: n / 1024),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), OPERATION), max_size=30))
def test_ranks_merged_equal_one_that_did_it_all(operations: list[Any]) -> None:
    whole = OffloadingConnectorStats()
    ranks = [OffloadingConnectorStats() for _ in range(4)]
    for rank, (kind, nbytes, seconds) in operations:
        whole.record_transfer(kind, nbytes, seconds)
        ranks[rank].record_transfer(kind, nbytes, seconds)
        whole.count("lookups", nbytes % 3)
        ranks[rank].count("lookups", nbytes % 3)
    merged = OffloadingConnectorStats()
    for stats in ranks:
        merged.aggregate(stats)
    assert merged == whole
    # Control: one operation more on one rank shows.
    merged.aggregate(sample())
    assert merged != whole


def test_two_loggers_given_the_same_dict_do_not_see_each_other() -> None:
    data = sample().data
    before = copy.deepcopy(data)
    first, second = OffloadingConnectorStats(data), OffloadingConnectorStats(data)
    first.aggregate(OffloadingConnectorStats(data))
    first.record_transfer("GPU_to_CPU", 1, 1.0)
    assert data == before
    assert second.data == before
    assert first.data != before


# --- peers ------------------------------------------------------------------------------------

PEERS = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 1 << 20)), max_size=150)


def peer_bytes(*events: tuple[int, int]) -> OffloadingConnectorStats:
    stats = OffloadingConnectorStats()
    for peer, nbytes in events:
        stats.count("handoff_peer_bytes", nbytes, f"10.0.0.{peer}:14580")
    return stats


def test_the_peers_of_a_payload_are_bounded_and_nothing_is_lost() -> None:
    values = peer_bytes(*((peer, 1) for peer in range(MOST_LABELS))).data[COUNTERS]
    assert OTHER not in values["handoff_peer_bytes"], "control: this many have room"
    stats = peer_bytes(*((peer, 1 + peer) for peer in range(40)), (0, 5), (39, 7))
    values = stats.data[COUNTERS]["handoff_peer_bytes"]
    assert len(values) == MOST_LABELS + 1
    assert values["10.0.0.0:14580"] == 6 and "10.0.0.39:14580" not in values
    assert values[OTHER] == sum(range(33, 41)) + 7


@settings(max_examples=60, deadline=None)
@given(st.lists(PEERS, max_size=4))
def test_peers_stay_bounded_when_ranks_are_merged(ranks: list[list[tuple[int, int]]]) -> None:
    merged = OffloadingConnectorStats()
    for events in ranks:
        merged.aggregate(peer_bytes(*events))
    values = merged.data[COUNTERS].get("handoff_peer_bytes", {})
    assert len(values) <= MOST_LABELS + 1
    assert sum(values.values()) == sum(nbytes for events in ranks for _, nbytes in events)


# --- intervals --------------------------------------------------------------------------------


def test_take_hands_over_without_copying_and_starts_afresh() -> None:
    stats = sample()
    recorded = stats.data
    taken = stats.take()
    assert taken is not None and taken.data is recorded
    assert stats.is_empty() and stats.take() is None
    stats.count("lookups")
    assert taken == sample()


def test_an_interval_with_only_failures_is_not_empty() -> None:
    stats = OffloadingConnectorStats()
    stats.count("failed_blocks", 0, "digest")
    assert stats.is_empty()
    stats.count("failed_blocks", 1, "digest")
    assert not stats.is_empty()
    assert stats.reduce() == {"failed_blocks_digest": 1}


def test_reset_forgets() -> None:
    stats = sample()
    stats.reset()
    assert stats.is_empty() and stats == OffloadingConnectorStats()


def test_reduce_is_flat_numbers_that_add_up() -> None:
    one = sample().reduce()
    two = sample().aggregate(sample()).reduce()
    assert all(type(value) in (int, float) for value in one.values())
    additive = {key: value for key, value in one.items() if key != "host_blocks_used"}
    assert {key: two[key] for key in additive} == {key: 2 * v for key, v in additive.items()}


# --- the way to the front end -----------------------------------------------------------------


def test_payload_does_not_grow_with_the_number_of_operations() -> None:
    def payload(operations: int) -> int:
        stats = OffloadingConnectorStats()
        for i in range(operations):
            stats.record_transfer("GPU_to_CPU", 4096 * (1 + i % 50_000), 1e-5 * (1 + i % 9973))
        return len(msgspec.msgpack.encode(stats.data))

    few, many = payload(100), payload(10_000)
    # Counts of up to 2**32 take at most 5 bytes per cell instead of 1.
    cells = len(SIZE_BUCKETS) + len(TIME_BUCKETS) + 4
    assert many - few <= 4 * cells


def test_round_trips_keep_everything() -> None:
    stats = sample()
    assert pickle.loads(pickle.dumps(stats)) == stats
    wire = msgspec.msgpack.encode(stats.data)
    assert OffloadingConnectorStats(msgspec.msgpack.decode(wire)) == stats
    # Control: a single other count is another object.
    data = msgspec.msgpack.decode(wire)
    data[HISTOGRAMS][TRANSFER_SIZE]["GPU_to_CPU"][3] += 1
    assert OffloadingConnectorStats(data) != stats
    assert stats != stats.data


def test_sections_of_a_newer_sender_are_left_out() -> None:
    data = {**sample().data, "traces": {"x": 1}}
    assert OffloadingConnectorStats(data) == sample()


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ([], "data"),
        ({COUNTERS: [1]}, "counters"),
        ({COUNTERS: {"lookups": 3}}, "counters.lookups"),
        ({COUNTERS: {1: {"": 3}}}, "counters"),
        ({COUNTERS: {"lookups": {("a",): 3}}}, "counters.lookups"),
        ({COUNTERS: {"lookups": {"": "3"}}}, "counters.lookups."),
        ({COUNTERS: {"lookups": {"": True}}}, "counters.lookups."),
        ({COUNTERS: {"lookups": {"": -3}}}, "counters.lookups."),
        ({"gauges": {"host_blocks_used": {"": None}}}, "gauges.host_blocks_used."),
        ({HISTOGRAMS: {TRANSFER_SIZE: {"GPU_to_CPU": 3}}}, "transfer_size_bytes.GPU_to_CPU"),
        ({HISTOGRAMS: {TRANSFER_SIZE: {"GPU_to_CPU": [0, 1]}}}, "transfer_size_bytes.GPU_to_CPU"),
        (
            {HISTOGRAMS: {TRANSFER_SIZE: {"GPU_to_CPU": [-1] * (len(SIZE_BUCKETS) + 2)}}},
            "transfer_size_bytes.GPU_to_CPU",
        ),
    ],
)
def test_a_malformed_payload_is_refused_by_name(data: Any, where: str) -> None:
    with pytest.raises(Misuse, match=where.replace(".", r"\.")):
        OffloadingConnectorStats(data)


# --- in an engine -----------------------------------------------------------------------------


@dataclass
class EngineStats:
    """The shape of vLLM's ``KVConnectorStats``."""

    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return self.data


class Mixed(OffloadingConnectorStats, EngineStats):
    """What an engine's binding declares."""


def test_mixes_with_an_engines_dataclass() -> None:
    stats = Mixed(sample().data)
    assert stats.to_dict() == sample().data
    taken = stats.take()
    assert type(taken) is Mixed and isinstance(taken, EngineStats)
    assert pickle.loads(pickle.dumps(taken)) == taken
    assert Mixed().aggregate(taken) == taken
    assert bool(Mixed()), "engines test stats objects for truth before they merge them"


def test_repr_is_one_honest_line() -> None:
    assert "'GPU_to_CPU_operations': 2" in repr(sample())
    assert "\n" not in repr(sample())


def test_import_loads_no_engine_torch_or_prometheus() -> None:
    code = (
        "import sys, kvconnect.stats, kvconnect.observability.metrics.catalog;"
        "sys.exit(sorted({'torch', 'vllm', 'prometheus_client', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
