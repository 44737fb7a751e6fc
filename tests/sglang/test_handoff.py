"""Prefill on one SGLang server, decode on another: the tokens of a server of its own, no leaks."""

from __future__ import annotations

import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.engines.models import MODELS, prompt_tokens
from tests.sglang.pd import ask, ask_all, room
from tests.sglang.scenario import (
    CROWD,
    LENGTHS,
    MOST_ROW_BYTES,
    NEW,
    Fleet,
    Tokens,
    assert_quiet,
    moved_so_far,
    page_bytes,
    pages,
    prompts,
    settled,
    tokens,
    traded,
)
from tests.sglang.server import PAGE, SglangServer

MANY = 50
OPERATIONS = "sglang:kvconnect_transfer_operations_total"
Expected = Callable[[list[list[int]]], Tokens]

every_pair = pytest.mark.parametrize(
    ("sends", "receives"),
    [("layers", "tcp"), ("layers", "nixl"), ("chunks", "tcp"), ("chunks", "nixl")],
)


@pytest.fixture(scope="session")
def expected(fleet: Fleet) -> Expected:
    """What a server answers that prefills and decodes by itself, one request at a time."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def answers(asked: list[list[int]]) -> Tokens:
        for prompt in asked:
            if tuple(prompt) not in known:
                known[tuple(prompt)] = fleet.single.complete(prompt, NEW).tokens
        return [known[tuple(prompt)] for prompt in asked]

    return answers


def test_the_reference_can_tell_prompts_apart(expected: Expected) -> None:
    assert len(set(expected(prompts()))) == len(LENGTHS)


@every_pair
def test_prompts_of_every_length(
    fleet: Fleet, expected: Expected, sends: str, receives: str
) -> None:
    p, d = getattr(fleet, sends), getattr(fleet, receives)
    p.forget()
    before = moved_so_far(p, d)
    answers = [ask(p, d, prompt, NEW) for prompt in prompts()]
    assert tokens(answers) == expected(prompts())
    nbytes = pages(prompts()) * page_bytes()
    assert_rows(traded(p, d, before, nbytes) - nbytes, len(LENGTHS) * d.tp)
    # Once more, of what the prefill server's prefix cache has.
    assert tokens(ask_all(p, d, prompts(), NEW, CROWD)) == expected(prompts())
    assert_rows(traded(p, d, before, 2 * nbytes) - 2 * nbytes, 2 * len(LENGTHS) * d.tp)
    assert_quiet(p, d)


def assert_rows(nbytes: float, rows: int) -> None:
    """These bytes are of so many equal rows, and of nothing else."""
    row, rest = divmod(nbytes, rows)
    assert 0 < row < MOST_ROW_BYTES and not rest


def test_layers_leave_one_by_one(fleet: Fleet) -> None:
    """One chunk of prefill: as many operations as layers, or one."""
    prompt = prompt_tokens(60, start=3100)
    operations = []
    for p in (fleet.layers, fleet.chunks):
        p.forget()
        before = moved_so_far(p, fleet.tcp)
        count = p.metric(OPERATIONS, transfer_type="SEND")
        ask(p, fleet.tcp, prompt, NEW)
        nbytes = pages([prompt]) * page_bytes()
        assert_rows(traded(p, fleet.tcp, before, nbytes) - nbytes, 1)
        operations.append(p.metric(OPERATIONS, transfer_type="SEND") - count)
    layers = MODELS["llama"].config["num_hidden_layers"]
    assert operations[0] >= layers > operations[1]


@pytest.mark.parametrize(("sends", "receives"), [("layers", "nixl"), ("chunks", "tcp")])
def test_many_at_once(fleet: Fleet, expected: Expected, sends: str, receives: str) -> None:
    p, d = getattr(fleet, sends), getattr(fleet, receives)
    asked = [prompt_tokens(20 + 97 * i % 480, start=40_000 + 600 * i) for i in range(MANY)]
    p.forget()
    assert tokens(ask_all(p, d, asked, NEW, CROWD)) == expected(asked)
    assert_quiet(p, d)


@every_pair
def test_wrong_pages_change_the_tokens(
    fleet: Fleet, expected: Expected, sends: str, receives: str
) -> None:
    """Negative control of all tests that compare tokens: a page from next door shows."""
    p, d = getattr(fleet, sends), getattr(fleet, receives)
    asked = prompts()[2:]
    fleet.shift.touch()
    try:
        wrong = tokens(ask_all(p, d, asked, NEW, CROWD))
    finally:
        fleet.shift.unlink()
    right = expected(asked)
    assert all(a != b for a, b in zip(wrong, right, strict=True))
    assert tokens(ask_all(p, d, asked, NEW, CROWD)) == right


OTHER_PROMPTS: dict[str, tuple[list[int], dict[str, str], str]] = {
    "ids": (prompt_tokens(60, start=9000), {}, "token ids"),
    "longer": (prompt_tokens(60 + 3 * PAGE, start=8000), {}, "token ids"),
    "shorter": (prompt_tokens(60 - PAGE, start=8000), {}, "token ids"),
    "salt": (prompt_tokens(60, start=8000), {"cache_salt": "x"}, "media, adapter or salt"),
}


@pytest.mark.parametrize("case", OTHER_PROMPTS)
@pytest.mark.parametrize("sends", ["layers", "chunks"])
def test_halves_with_different_prompts_fail_and_say_why(
    fleet: Fleet, expected: Expected, sends: str, case: str
) -> None:
    """As with another chat template or tokenizer on one side. No answer is of a mixture."""
    p, d, prompt = getattr(fleet, sends), fleet.tcp, prompt_tokens(60, start=8000)
    assert tokens([ask(p, d, prompt, NEW)]) == expected([prompt])  # control: one prompt
    other, extra, what = OTHER_PROMPTS[case]
    before = refusals(p, d)
    meeting = room(p)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(p.complete, prompt, NEW, **meeting)
        for ask_half in (partial(d.complete, other, NEW, **meeting, **extra), first.result):
            with pytest.raises(urllib.error.HTTPError) as failed:
                ask_half()
            text = failed.value.read().decode()
            assert failed.value.code == 500
            assert f"the prompts differ in their {what}" in text
            assert "60 tokens" in text and f"{len(other)} tokens" in text
    after = [count + 1 for count in before]
    assert settled(lambda: refusals(p, d), after) == after
    assert_quiet(p, d)


def refusals(p: SglangServer, d: SglangServer) -> list[float]:
    return [
        p.metric("sglang:kvconnect_handoff_refused_total", field="prompt"),
        d.metric("sglang:kvconnect_handoff_failures_total", cause="prompt"),
    ]


@pytest.mark.parametrize("sends", ["layers", "chunks"])
def test_clients_that_hang_up(fleet: Fleet, expected: Expected, sends: str) -> None:
    """Before the first token and after some, on both servers or one of them."""
    p, d = getattr(fleet, sends), fleet.tcp
    p.forget()

    def hang_up(number: int, prompt: list[int]) -> None:
        meeting = room(p)
        with ThreadPoolExecutor(2) as pool:
            pool.submit(p.abort, prompt, number % 2, NEW, **meeting)
            pool.submit(d.abort, prompt, number // 2, 64, **meeting)

    with ThreadPoolExecutor(CROWD) as crowd:  # some wait until the other half is given up
        list(crowd.map(hang_up, range(len(LENGTHS)), prompts(1)))
    assert tokens(ask_all(p, d, prompts(), NEW, CROWD)) == expected(prompts())
    assert_quiet(p, d)


def test_one_half_never_comes(fleet: Fleet, expected: Expected) -> None:
    """A request that only the prefill or only the decode server got ends in an error."""
    p, d = fleet.chunks, fleet.tcp
    prompt = prompts(2)[3]

    def status(alone: SglangServer) -> int:
        with pytest.raises(urllib.error.HTTPError) as failed:
            alone.complete(prompt, NEW, **room(p))
        failed.value.close()
        return failed.value.code

    with ThreadPoolExecutor(2) as both:
        assert min(both.map(status, (p, d))) >= 500
    assert ask(p, d, prompt, NEW).tokens == expected([prompt])[0]
    assert_quiet(p, d)


def test_latency_is_the_time_on_the_wire(fleet: Fleet) -> None:
    """SGLang's histogram has every request once, with what the transport measured for it."""
    p, d = fleet.layers, fleet.tcp
    names = ("sglang:kvcache_transfer_latency", "sglang:kvconnect_handoff_wire_seconds")
    parts = [f"{name}_{part}" for name in names for part in ("count", "sum")]
    before = {part: p.metric(part, role="send") for part in parts}
    ask_all(p, d, prompts(3), NEW, CROWD)
    want = before[parts[0]] + len(LENGTHS)
    assert settled(partial(p.metric, parts[0], role="send"), want) == want
    latency, latency_s, wire, wire_s = (
        p.metric(part, role="send") - before[part] for part in parts
    )
    assert latency == wire == len(LENGTHS)
    assert latency_s == pytest.approx(wire_s)
    assert latency_s > 0
