"""What ``benchmarks/serve`` computes itself: the sample of a trace, what a cache could hit, wrong
answers, ratios."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError

import pytest

pytest.importorskip("torch")

from benchmarks.serve import answers, fleet, sglang_servers, trace, workloads
from benchmarks.serve.load import LoadFailed
from benchmarks.serve.trace import Request
from kvconnect.settings.quantities import parse_bytes
from tests.engines.server import Answer

BLOCK = 32
PLENTY = 1 << 40


def conversations(count: int, turns: int) -> list[Request]:
    """Turns of many conversations at a time; each turn repeats the last one and adds two ids."""
    found = []
    for turn in range(turns):
        for name in range(count):
            ids = (0, *range(1000 * name + 1, 1000 * name + 2 * turn + 4))
            time = 1000.0 * (turn * count + name)
            found.append(Request(time, 512 * len(ids), 320, ids))
    return found


def share(requests: list[Request], capacity: int = PLENTY) -> float:
    """Hits over all prompt tokens of the small form."""
    small = trace.scaled(requests)
    return trace.ideal_hits(small, capacity, BLOCK) / sum(one.input_length for one in small)


def test_a_sample_has_whole_conversations_by_time() -> None:
    all_of_them = conversations(100, 5)
    drawn = trace.sample(all_of_them, 50, seed=3)
    assert drawn == trace.sample(all_of_them, 50, seed=3) != trace.sample(all_of_them, 50, seed=4)
    assert len(drawn) == 50
    assert sorted(drawn, key=lambda one: one.timestamp) == drawn
    names = {one.hash_ids[:2] for one in drawn}
    assert len(names) == 10
    assert drawn == [one for one in all_of_them if one.hash_ids[:2] in names]


def test_a_sample_keeps_the_reuse() -> None:
    """Control: as many requests in a row have next to none."""
    all_of_them = conversations(100, 5)
    assert share(trace.sample(all_of_them, 50, seed=0)) == pytest.approx(
        share(all_of_them), abs=0.01
    )
    assert share(all_of_them[:50]) < share(all_of_them) / 10


def test_the_small_trace_has_an_id_for_16_tokens() -> None:
    original = [Request(0.0, 6758, 500, tuple(range(14))), Request(3.0, 1, 1, (0,))]
    small = trace.scaled(original)
    assert [(one.input_length, one.output_length) for one in small] == [(212, 16), (1, 1)]
    for one in small:
        assert len(one.hash_ids) == -(-one.input_length // trace.ID_TOKENS)


def test_times_are_spread_in_proportion() -> None:
    requests = [Request(time, 1, 1, (0,)) for time in (500.0, 1500.0, 4500.0)]
    assert [one.timestamp for one in trace.spread(requests, 8.0)] == [0.0, 2000.0, 8000.0]
    assert [one.timestamp for one in trace.spread(requests, 0.0)] == [0.0, 0.0, 0.0]
    assert [one.timestamp for one in trace.spread(requests[:1], 8.0)] == [0.0]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    path, requests = tmp_path / name, conversations(2, 2)
    trace.write(path, requests)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    else:  # the fields that vLLM's reader asks for
        fields = {"timestamp", "input_length", "output_length", "hash_ids"}
        assert json.loads(path.read_text().splitlines()[0]).keys() == fields
    assert trace.read(path) == requests


def simulated(requests: list[Request], capacity: int) -> int:
    """The same count by another way: a list of blocks, oldest first, named by their tokens."""
    kept: list[tuple[tuple[int, int], ...]] = []
    hits = 0
    for one in requests:
        tokens = [(h, n) for h in one.hash_ids for n in range(trace.ID_TOKENS)]
        tokens = tokens[: one.input_length]
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        found = 0
        for end in ends:
            if end == len(tokens) or tuple(tokens[:end]) not in kept:
                break
            found = end
        hits += found
        for end in reversed(ends):
            name = tuple(tokens[:end])
            if name in kept:
                kept.remove(name)
            kept.append(name)
        kept = kept[max(0, len(kept) - capacity) :]
    return hits


@pytest.mark.parametrize("capacity", [0, 1, 7, 20, PLENTY])
def test_ideal_hits_are_those_of_a_cache_of_tokens(capacity: int) -> None:
    draw = random.Random(capacity)
    requests = []
    for _ in range(60):
        ids = (0, draw.randrange(3), *(draw.randrange(2) for _ in range(draw.randrange(8))))
        length = draw.randrange(16 * (len(ids) - 1) + 1, 16 * len(ids) + 1)
        requests.append(Request(0.0, length, 1, ids))
    found = trace.ideal_hits(requests, capacity, BLOCK)
    assert found == simulated(requests, capacity)
    assert (found > 0) is (capacity > 0)


def test_a_smaller_cache_hits_less() -> None:
    requests = conversations(20, 5)
    blocks = sum(one.input_length for one in trace.scaled(requests)) // BLOCK
    assert share(requests, 0) == 0 < share(requests, 60) < share(requests, blocks)
    assert share(requests, blocks) == share(requests)


def test_the_last_token_of_a_prompt_is_computed() -> None:
    whole, longer = (Request(0.0, length, 1, (0, 1, 2, 3, 4)) for length in (64, 65))
    assert trace.ideal_hits([whole, whole], PLENTY, BLOCK) == 32
    assert trace.ideal_hits([whole, longer], PLENTY, BLOCK) == 64


def test_answers_that_differ_are_counted() -> None:
    want = [(1, 2), (3, 4), (5, 6)]
    assert answers.differing(want, want) == 0
    assert answers.differing(want, [(1, 2), (3, 5), (5,)]) == 2
    with pytest.raises(ValueError, match="shorter"):
        answers.differing(want, want[:2])


@dataclass
class Engine:
    """Answers with its prompt's length; wrongly once its device was emptied, if it is ``bad``."""

    bad: bool = False
    loads: bool = True
    emptied: bool = False
    connector: str | None = "KVConnect"

    def complete(self, prompt: list[int], max_tokens: int) -> Answer:
        token = len(prompt) + (self.bad and self.emptied)
        return Answer((token,) * max_tokens, 32 * (self.loads and self.emptied))

    def post(self, path: str) -> str:
        self.emptied = "reset_external" not in path
        return json.dumps({"success": True})

    def settle(self) -> None:
        pass


@dataclass
class Server(Engine):
    """Counts how often its caches were emptied."""

    port: int = 0
    resets: int = 0

    def post(self, path: str) -> str:
        self.resets += 1
        return super().post(path)


class Asked(fleet.Variant):
    """A variant without processes."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield


def check_answers(**ours: bool) -> dict[str, int]:
    engines = {fleet.PLAIN: Engine(connector=None), fleet.OURS: Engine(**ours)}
    return answers.wrong({name: Asked(name, [one]) for name, one in engines.items()}, 0)  # type: ignore[list-item]


def test_an_answer_that_is_wrong_only_after_a_load_is_found() -> None:
    """Control: when nothing is loaded, the check itself fails."""
    assert check_answers() == {fleet.PLAIN: 0, fleet.OURS: 0}
    assert check_answers(bad=True) == {fleet.PLAIN: 0, fleet.OURS: len(answers.prompts(0))}
    with pytest.raises(SystemExit, match="loaded nothing"):
        check_answers(loads=False)


@dataclass
class SglangEngine:
    """Answers with its prompt's length; wrongly what it loads, if it is ``bad``."""

    bad: bool = False
    loads: bool = True
    fillers: int = 0

    def complete(self, prompt: list[int], max_tokens: int) -> Answer:
        self.fillers += max_tokens == 1
        pushed_out = self.fillers == sglang_servers.FILLERS
        token = len(prompt) + (self.bad and pushed_out)
        return Answer((token,) * max_tokens, 64 * (self.loads and pushed_out))

    def forget(self) -> None:
        self.fillers = 0


class AskedSglang(sglang_servers.SglangVariant):
    """A variant without processes."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield


def wrong_on_sglang(**ours: bool) -> int:
    engines = {sglang_servers.NONE: SglangEngine(), fleet.OURS: SglangEngine(**ours)}
    return sglang_servers.wrong(
        {name: AskedSglang(name, [one]) for name, one in engines.items()}, 0
    )


def test_an_answer_of_sglang_that_is_wrong_only_after_a_load_is_found() -> None:
    """Control: when nothing is loaded, the check itself fails."""
    assert wrong_on_sglang() == 0
    assert wrong_on_sglang(bad=True) == len(answers.prompts(0))
    with pytest.raises(SystemExit, match="loaded nothing"):
        wrong_on_sglang(loads=False)


def test_sglang_s_host_memory_is_that_of_the_linker() -> None:
    device = sglang_servers.DEVICE_TOKENS * 16 * 1024  # bytes of a token: tests/engines/models.py
    assert sglang_servers.HOST_RATIO * device == parse_bytes("host_bytes", fleet.HOST_BYTES)


@pytest.mark.parametrize("failing", [0, fleet.INTRODUCTIONS - 1, fleet.INTRODUCTIONS])
def test_engines_that_do_not_connect_at_first_may_fail_a_few_requests(failing: int) -> None:
    """Control: those that never connect end the benchmark."""
    left = failing

    class Late(Engine):
        def complete(self, prompt: list[int], max_tokens: int) -> Answer:
            nonlocal left
            left -= 1
            if left >= 0:
                raise HTTPError("http://decode", 500, "not connected", Message(), None)
            return super().complete(prompt, max_tokens)

    ends = pytest.raises(HTTPError) if failing == fleet.INTRODUCTIONS else nullcontext()
    with ends:
        fleet.introduce(Asked(fleet.NIXL, [Late()]))  # type: ignore[list-item]


def test_prompts_of_the_check_share_one_prefix_only() -> None:
    found = answers.prompts(0)
    assert found[-1][: answers.SHARED] == found[-2][: answers.SHARED]
    assert found[-1][answers.SHARED :] != found[-2][answers.SHARED : 2 * answers.SHARED]
    assert len({tuple(prompt[:BLOCK]) for prompt in found}) == len(found) - 1


def test_a_ratio_is_of_runs_of_one_round() -> None:
    """Control: the ratio of medians would be 1 here."""
    found = {"a": [{"s": 2.0}, {"s": 6.0}, {"s": 30.0}], "b": [{"s": 1.0}, {"s": 6.0}, {"s": 10.0}]}
    assert fleet.ratio(found, "a", "b", "s") == 2.0


LMCACHE_RESULT = {"successful_requests": 3, "failed_requests": 0, "mean_ttft_ms": 8.0}
OTHERS_RESULT = {"completed": 3, "errors": ["", "", ""], "mean_ttft_ms": 8.0}


@pytest.mark.parametrize(
    ("result", "failures"),
    [
        (LMCACHE_RESULT, 0),
        ({**LMCACHE_RESULT, "failed_requests": 2}, 2),
        (OTHERS_RESULT, 0),
        ({**OTHERS_RESULT, "errors": ["", "gone", ""]}, 1),
    ],
)
def test_failed_requests_of_every_load_generator_are_counted(
    result: dict[str, object], failures: int
) -> None:
    assert workloads.failed(result) == failures


@pytest.mark.parametrize(
    "result",
    [
        {**LMCACHE_RESULT, "successful_requests": 0, "failed_requests": 3},
        {**OTHERS_RESULT, "completed": 0, "errors": ["gone"] * 3},
    ],
)
def test_a_run_without_an_answer_is_an_error(result: dict[str, object]) -> None:
    with pytest.raises(LoadFailed, match="no request was answered"):
        workloads.failed(result)


def test_prefixes_do_not_fit_the_device_but_the_host_tier() -> None:
    device = fleet.DEVICE_BLOCKS * BLOCK
    tokens = workloads.FULL.prefixes * workloads.FULL.prefix_length
    assert device < tokens < fleet.HOST_BLOCKS * BLOCK / 2


def test_each_workload_gives_a_ratio_and_its_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of either engine count as failed; every run begins with empty caches."""
    engines = [Server(connector=None), Server()]
    asked: list[int] = []

    def ask(port: int, scale: workloads.Scale, number: int) -> dict[str, object]:
        assert engines[port].resets == len(asked) // 2 + 1
        asked.append(port)
        return {**LMCACHE_RESULT, "failed_requests": port + 1, "mean_ttft_ms": 8.0 / (port + 1)}

    for port, engine in enumerate(engines):
        engine.port = port
    monkeypatch.setattr(workloads, "ALL", {"one": ask, "two": ask})
    variants = {
        name: Asked(name, [engine])  # type: ignore[list-item]
        for name, engine in zip((fleet.PLAIN, fleet.OURS), engines, strict=True)
    }
    found = workloads.shared_prompts(variants, workloads.QUICK)
    assert found == {"one_ttft_ratio": 0.5, "two_ttft_ratio": 0.5, "workload_failures": 6}
    assert asked == [0, 1, 0, 1]
