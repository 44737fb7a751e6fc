"""Background tasks of the router: what an engine answers ends none of them for long."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvconnect.router import supervisor
from kvconnect.router.fleet import kv_events, reports, watch
from kvconnect.router.options import Intervals
from kvconnect.router.supervisor import Supervisor, TaskKind
from tests.fakes.engine import FakeEngine, bench, decodes, hurry, on_loop, prefills, says, until
from tests.hostile import engines, watched


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(supervisor, "PAUSE_FIRST_S", 0.001)
    monkeypatch.setattr(watch, "LEARN_EVERY_S", 0.05)


@on_loop
async def test_a_task_begins_again_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[tuple[str, str]] = []
    left = [ValueError("one"), RecursionError("two")]

    async def work() -> None:
        if left:
            raise left.pop()

    tasks = Supervisor(lambda *labels: counted.append(labels))
    await asyncio.wait_for(tasks.keep(TaskKind.LOAD, "http://a", work), 60)
    assert counted == [("task_failures", "load")] * 2
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert "http://a" in caplog.text


@on_loop
async def test_a_task_that_runs_once_tells_who_waits_and_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[tuple[str, str]] = []

    async def work() -> None:
        raise ValueError("odd")

    async def good() -> None:
        pass

    tasks = Supervisor(lambda *labels: counted.append(labels))
    ended = await asyncio.gather(
        tasks.once(TaskKind.HANDOFF, "http://a", work()),
        tasks.once(TaskKind.HANDOFF, "http://a", good()),
        return_exceptions=True,
    )
    assert [type(each) for each in ended] == [ValueError, type(None)]
    assert counted == [("task_failures", "handoff")]
    assert "odd" in caplog.text


@on_loop
async def test_a_cancelled_task_is_over_and_no_failure() -> None:
    counted: list[tuple[str, str]] = []
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = Supervisor(lambda *labels: counted.append(labels)).keep(TaskKind.LOAD, "a", work)
    await begun.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and not counted


def sglang(loads: list[Any]) -> FakeEngine:
    engine = FakeEngine(decodes)
    engine.settings, engine.standing_ticket_lifetime_s = ",engine=sglang", 0
    engine.extra["/v1/loads"] = says(200, {"loads": loads})
    engine.extra["/server_info"] = says(200, {"version": "1"})
    return engine


@on_loop
async def test_null_in_the_loads_of_an_engine_is_refused_and_the_next_ones_are_read() -> None:
    engine = sglang([{"dp_rank": 0, "num_used_tokens": 7}])
    prefill = sglang([{"dp_rank": 0, "num_used_tokens": 0}])
    async with bench([prefill], [engine], intervals=Intervals(0.01, 0)) as router:

        async def tokens(number: int) -> bool:
            known = {"role": "decode", "upstream": engine.url, "rank": "0"}
            return await router.metric("foreign_tokens", **known) == number

        async def refused() -> bool:
            return await router.metric("refused_answers_total", what="load") >= 3

        await until(lambda: tokens(7))
        odd = {"dp_rank": 0, "num_used_tokens": 1, "num_waiting_uncached_tokens": None}
        engine.extra["/v1/loads"] = says(200, {"loads": [odd]})
        await until(refused)
        assert await tokens(7), "the last good report holds"
        engine.extra["/v1/loads"] = says(200, {"loads": [{"dp_rank": 0, "num_used_tokens": 9}]})
        await until(lambda: tokens(9))
        assert await router.metric("task_failures_total", task="load") == 0


@on_loop
async def test_an_error_that_nobody_thought_of_is_counted_and_polling_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = sglang([{"dp_rank": 0, "num_used_tokens": 7}])
    prefill = sglang([{"dp_rank": 0, "num_used_tokens": 0}])
    read, errors = reports.sglang_tokens, [ZeroDivisionError("a bug"), ZeroDivisionError("a bug")]

    def buggy(answer: bytes) -> dict[int, float]:
        if errors:
            raise errors.pop()
        return read(answer)

    monkeypatch.setattr(reports, "sglang_tokens", buggy)
    async with bench([prefill], [engine], intervals=Intervals(0.01, 0)) as router:

        async def polled() -> bool:
            known = {"role": "decode", "upstream": engine.url, "rank": "0"}
            return await router.metric("foreign_tokens", **known) == 7

        await until(polled)
        assert await router.metric("task_failures_total", task="load") == 2


@on_loop
async def test_each_thing_that_an_engine_says_is_kept_by_itself() -> None:
    """A version that makes no sense leaves the models as they are, and the other way round."""
    prefill, decode = FakeEngine(prefills), FakeEngine(decodes)
    decode.extra["/version"] = says(200, {"version": "1"})
    async with bench([prefill], [decode], intervals=Intervals(0, 0)) as router:

        async def models() -> list[str]:
            status, answer, _ = await router.get("/v1/models")
            return [model["id"] for model in json.loads(answer)["data"]] if status == 200 else []

        async def serves(*names: str) -> bool:
            return await models() == list(names)

        async def refused(what: str) -> bool:
            return await router.metric("refused_answers_total", what=what) > 0

        await until(lambda: serves("tiny"))
        decode.extra["/version"] = says(200, {"version": None})
        decode.models = prefill.models = ("tiny", "other")
        await until(lambda: refused("version"))
        await until(lambda: serves("tiny", "other"))
        decode.models = ()
        await until(lambda: refused("models"))
        assert await serves("tiny", "other")


@on_loop
async def test_what_engines_and_sources_may_say_harms_nobody_else() -> None:
    outcome = await engines.run(limit=800)
    assert outcome.cases == 800
    assert outcome.crashes == outcome.hangs == outcome.wrong == 0, outcome.notes[:5]


@on_loop
async def test_the_corpus_finds_readers_that_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(answer: bytes) -> dict[int, float]:
        return {each["dp_rank"]: each["num_used_tokens"] for each in json.loads(answer)["loads"]}

    monkeypatch.setattr(kv_events, "_UNREADABLE", (KeyError,))
    monkeypatch.setattr(engines, "_JSON", (("loads", {"loads": [{"dp_rank": 0}]}, careless),))
    outcome = await engines.run()
    assert outcome.crashes > 50
    assert any(note.startswith("loads") for note in outcome.notes)
    assert any(note.startswith("event") for note in outcome.notes)


@on_loop
async def test_no_answer_and_no_frame_ends_a_task() -> None:
    outcome = await watched.run(limit=5)
    assert outcome.cases == 10
    assert outcome.crashes == outcome.hangs == outcome.wrong == 0, outcome.notes[:5]


@on_loop
async def test_the_corpus_finds_tasks_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_UNREADABLE", (KeyError,))
    outcome = await watched.run(limit=5)
    assert outcome.crashes > 0
    assert not outcome.hangs, "they begin again"
