"""Admission: requests wait their turn, and every place is given back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvconnect import memory
from kvconnect.router.connections import pool
from kvconnect.router.http.admission import Admission, BodyMemory, Busy, ClientConcurrency
from kvconnect.router.http.fair_queue import FairQueue
from kvconnect.router.options import RouterLimits
from tests.fakes.engine import (
    ASK,
    FakeEngine,
    bench,
    decodes,
    hangs,
    hurry,
    on_loop,
    prefills,
    until,
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@on_loop
async def test_who_waits_gets_in_in_order_and_too_many_are_turned_away() -> None:
    said: list[int] = []
    admission, order = Admission(RouterLimits(concurrent=1, queue=2, queue_s=30.0), said.append), []
    ends = [asyncio.Event() for _ in range(3)]

    async def work(number: int) -> None:
        async with admission.enter("a"):
            order.append(number)
            await ends[number].wait()

    tasks = []
    for number in range(3):
        tasks.append(asyncio.create_task(work(number)))
        await asyncio.sleep(0)
    with pytest.raises(Busy, match="the queue is full: 2 requests") as busy:
        await work(3)
    assert busy.value.retry_s == 30
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    for event in ends:
        event.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert order == [0, 2] and said[-1] == 0
    async with admission.enter("a"):
        pass


class Crowd:
    """Requests of several clients for one place, which each gives back as soon as it has it."""

    def __init__(self, queue: int, **weights: int) -> None:
        self._weights = weights
        self.admission = Admission(RouterLimits(concurrent=1, queue=queue), lambda waiting: None)
        self.order: list[str] = []
        self.refused: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._open = asyncio.Event()

    async def ask(self, *clients: str) -> None:
        """Have a request of each wait."""
        for client in clients:
            self.tasks.append(asyncio.create_task(self._work(client)))
            await asyncio.sleep(0)

    async def served(self) -> list[str]:
        """Let all go on; return whose requests were worked on, in order."""
        self._open.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.order

    async def _work(self, client: str) -> None:
        try:
            async with self.admission.enter(client, self._weights.get(client, 1)):
                await self._open.wait()
                self.order.append(client)
        except Busy:
            self.refused.append(client)


HONEST = ["b", "c", "d"]


@on_loop
async def test_nobody_waits_behind_all_requests_of_a_greedy_client() -> None:
    crowd = Crowd(queue=1000)
    await crowd.ask(*["greedy"] * 101, *HONEST)
    order = await crowd.served()
    assert sorted(order[:5]) == ["b", "c", "d", "greedy", "greedy"]
    assert len(order) == 104 and not crowd.refused


@on_loop
async def test_control_first_come_first_served_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    append = FairQueue._append
    monkeypatch.setattr(FairQueue, "_append", lambda queue, _, *more: append(queue, "all", *more))
    crowd = Crowd(queue=1000)
    await crowd.ask(*["greedy"] * 101, *HONEST)
    assert (await crowd.served())[-3:] == HONEST


@on_loop
async def test_a_greedy_clients_requests_give_way_in_a_full_queue() -> None:
    crowd = Crowd(queue=6)
    await crowd.ask(*["greedy"] * 10, *HONEST, "greedy", "b")
    order = await crowd.served()
    assert crowd.refused == ["greedy"] * 8
    assert sorted(order) == ["b", "b", "c", "d", "greedy", "greedy", "greedy"]


@on_loop
async def test_a_client_has_as_many_turns_in_a_row_as_it_has_weight() -> None:
    crowd = Crowd(queue=1000, b=3)
    await crowd.ask("a", *["a", "b", "c"] * 6)  # the first one does not wait
    assert (await crowd.served())[1:11] == [*"abbbcabbbc"]
    control = Crowd(queue=1000)
    await control.ask("a", *["a", "b", "c"] * 6)
    assert (await control.served())[1:11] == [*"abcabcabca"]


@on_loop
async def test_turns_in_a_row_end_with_the_clients_requests() -> None:
    crowd = Crowd(queue=1000, a=3, b=3)
    await crowd.ask("c", *"aa", *"bbbb", *"c")
    crowd.tasks[1].cancel()
    await asyncio.sleep(0)
    assert await crowd.served() == [*"cabbbcb"]


@on_loop
async def test_a_client_with_weight_has_more_room_in_a_full_queue() -> None:
    crowd = Crowd(queue=8, heavy=3)
    await crowd.ask("light", *["light"] * 8, *["heavy"] * 8)
    order = (await crowd.served())[1:]
    assert (order.count("heavy"), order.count("light")) == (6, 2)


@on_loop
async def test_a_request_that_gave_way_and_is_cancelled_holds_no_place() -> None:
    crowd = Crowd(queue=2)
    await crowd.ask("greedy", "greedy", "greedy", "b")
    for task in crowd.tasks[1:3]:  # one waits, the other has given way
        task.cancel()
    assert await crowd.served() == ["greedy", "b"]
    async with crowd.admission.enter("c"):
        pass


@on_loop
async def test_by_default_the_router_has_limits() -> None:
    limits = RouterLimits()
    assert 0 < limits.client_concurrent < limits.concurrent
    waiting: list[int] = []
    admission = Admission(limits, waiting.append)
    async with contextlib.AsyncExitStack() as inside:
        for _ in range(limits.concurrent):
            await inside.enter_async_context(admission.enter("a"))
        assert not waiting, "the control: none of these waits"
        late = asyncio.create_task(inside.enter_async_context(admission.enter("b")))
        while not waiting:
            await asyncio.sleep(0)
        late.cancel()
    clients = ClientConcurrency(limits.client_concurrent)
    with contextlib.ExitStack() as open_requests:
        for _ in range(limits.client_concurrent):
            open_requests.enter_context(clients.enter("a"))
        with pytest.raises(Busy, match="2048 open requests"):
            open_requests.enter_context(clients.enter("a"))
        open_requests.enter_context(clients.enter("b"))


@pytest.mark.parametrize("chunked", [False, True])
@on_loop
async def test_bodies_of_all_open_requests_together_have_a_bound(
    monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1)
    raw = json.dumps(ASK | {"prompt": "a" * 60_000}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(raw), 7_000):
            yield raw[at : at + 7_000]

    p, d = FakeEngine(prefills), FakeEngine(hangs)
    # Room for one body there must be.
    async with bench([p], [d], body_mib=100_000 / 2**20) as router:

        async def send() -> tuple[int, str | None]:
            data = pieces() if chunked else raw
            async with router.client.post(router.url + "/v1/completions", data=data) as answer:
                return answer.status, answer.headers.get("Retry-After")

        for _ in range(2):
            first = asyncio.create_task(send())
            await until(lambda: d.asked)
            for _ in range(3):
                assert await send() == (429, "1")
            d.asked.clear()
            first.cancel()
            await until(lambda: d.dropped)
            d.dropped = 0
        d.answer = decodes
        for _ in range(5):
            assert await send() == (200, None)


@on_loop
async def test_whole_answers_of_all_open_requests_have_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1)
    size = 0

    async def long_answer(
        engine: FakeEngine, request: web.Request, body: dict[str, object]
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        for _ in range(size // 1024):
            await answer.write(b"7" * 1024)
        return answer

    p, d = FakeEngine(prefills), FakeEngine(long_answer)
    async with bench([p], [d], body_mib=1.0) as router:
        for size, status in ((1 << 18, 200), (1 << 30, 429), (1 << 18, 200)):
            answer = await router.post(ASK)
            assert answer.status == status
            assert status == 429 or len(answer.body) == size
        await until(lambda: d.dropped == 1)


@on_loop
async def test_bodies_that_arrive_at_one_moment_do_not_all_give_way() -> None:
    """Who gives way gives its memory at once, not when its request has ended."""
    bodies = BodyMemory("bodies", 100, 100)
    allocations = [bodies.allocation(f"client {number}") for number in range(4)]
    refused = []
    with contextlib.ExitStack() as arriving:
        for allocation in allocations:
            arriving.enter_context(allocation.arriving(asyncio.current_task()))
            allocation.take(25)
        for allocation in allocations:
            if not allocation.try_take(5):
                bodies.arriving.pop(allocation)  # as its reader does
                refused.append(allocation)
        assert refused == allocations[:1]
        assert [each.taken for each in allocations] == [0, 30, 30, 30]


def test_what_an_answer_does_not_get_is_not_counted() -> None:
    bodies = BodyMemory("answers", 100, 100)
    with bodies.allocation("one") as one, bodies.allocation("two") as two:
        one.take(60)
        assert not two.try_take(50)
        assert (one.taken, two.taken) == (60, 0)
        two.take(40)  # all that is left
        assert not one.try_take(1)
        assert one.taken == 60
    bodies.allocation("three").take(100)


def test_what_arrives_after_a_request_takes_nothing() -> None:
    bodies = BodyMemory("bodies", 100, 100)
    for _ in range(10):
        with bodies.allocation("a") as room:
            room.take(100)
        room.take(100)
    with bodies.allocation("a") as room, pytest.raises(Busy):  # control
        room.take(101)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 3))
def test_every_place_is_given_back(cancelled: list[bool], places: int) -> None:
    async def run() -> None:
        admission = Admission(RouterLimits(concurrent=places, queue=99), lambda waiting: None)
        inside, most = 0, 0

        async def work() -> None:
            nonlocal inside, most
            async with admission.enter("a"):
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(work()) for _ in cancelled]
        for task, cancel in zip(tasks, cancelled, strict=True):
            await asyncio.sleep(0)
            if cancel:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= places and inside == 0
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(places):
                await asyncio.wait_for(stack.enter_async_context(admission.enter("a")), 5)

    asyncio.run(run())


@on_loop
async def test_a_full_router_answers_429() -> None:
    p, d = FakeEngine(hangs), FakeEngine(hangs)
    async with bench([p], [d], concurrent=1, queue=1, queue_s=0.2) as router:
        first = asyncio.create_task(router.post(ASK))
        await until(lambda: bool(p.asked))
        second, third = await asyncio.gather(router.post(ASK), router.post(ASK))
        for status, body, headers in (second, third):
            assert (status, headers["retry-after"]) == (429, "1")
            assert json.loads(body)["error"]["code"] == 429
        assert len(p.asked) == 1
        first.cancel()
        await until(lambda: p.dropped == 1)
        p.answer, d.answer = prefills, decodes
        assert (await router.post(ASK)).status == 200


@on_loop
async def test_an_engine_that_froze_is_gone_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "END_SILENT_S", 0.1)
    ps, d = [FakeEngine(hangs), FakeEngine(prefills)], FakeEngine(decodes)
    async with bench(ps, [d], handoff="pull") as router:
        asking = asyncio.create_task(router.post(ASK))
        await until(lambda: len(ps[0].asked) == 1)
        ps[0].well = False
        status, _, headers = await asking
        assert (status, headers["x-kvconnect-prefill"]) == (200, "1")
        assert await router.metric("retries_total", role="prefill", cause="lost") == 1
        await until(lambda: ps[0].dropped == 1)


@on_loop
async def test_a_client_that_reads_a_long_answer_slowly_is_no_load_of_an_engine() -> None:
    computed = asyncio.Event()

    async def long_answer(
        engine: FakeEngine, request: web.Request, body: dict[str, object]
    ) -> web.Response:
        await computed.wait()
        return web.Response(body=b"7" * (16 << 20), content_type="application/json")

    p, d = FakeEngine(prefills), FakeEngine(long_answer)
    async with bench([p], [d]) as router:
        host, port = "127.0.0.1", int(router.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        raw = json.dumps(ASK).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)

        async def load() -> float:
            engine = {"role": "decode", "upstream": d.url, "rank": "0"}
            return await router.metric("tokens_in_flight", **engine)

        async def free() -> bool:
            return await load() == 0

        await until(lambda: d.asked)
        assert await load() > 0  # control: while the engine computes
        computed.set()
        assert b"200" in await reader.readline()
        await until(free)
        # What has not been read is still on its way: who ends this engine loses it.
        assert await router.metric("in_flight", role="decode", upstream=d.url) == 1
        writer.transport.abort()
