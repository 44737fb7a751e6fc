"""A router in front of a prefill and a decode server with two data-parallel ranks each: what must
hold whichever engine the servers are of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from tests.engines.models import prompt_tokens
from tests.engines.server import Answer, Process, Router

RANKS = (0, 1)
ROLES = ("prefill", "decode")
COUNT, CROWD, NEW = 24, 4, 12
LOADED = 1000  # tokens; more than all short prompts here together
WAIT_S = 60.0
_LOOK_S = 0.05
Tokens = list[tuple[int, ...]]


def prompts() -> list[list[int]]:
    """Prompts that share no block with one another."""
    return [prompt_tokens(40 + 17 * number, start=1100 * number) for number in range(COUNT)]


@dataclass
class Ranked:
    """Servers and routers; ``kind`` is what the servers' metrics begin with and ``label`` that of a
    rank. ``least`` has the default policies, ``turns`` round robin, and ``turns_least`` that with
    ``--dp-minimum-tokens-scheduler``."""

    prefill: Process
    decode: Process
    least: Router
    turns: Router
    turns_least: Router
    kind: str
    label: str

    @property
    def routers(self) -> tuple[Router, Router, Router]:
        return self.least, self.turns, self.turns_least

    def handed_off(self) -> dict[str, list[float]]:
        """Return by role how many hand-offs each rank has done."""
        name = f"{self.kind}:kvconnect_handoff_{{}}_requests_total"
        verbs = zip(ROLES, (self.prefill, self.decode), ("sent", "received"), strict=True)
        return {
            role: [
                server.metric(name.format(verb), outcome="done", **{self.label: str(rank)})
                for rank in RANKS
            ]
            for role, server, verb in verbs
        }


@contextmanager
def routed(
    router: Callable[..., Router], prefill: Process, decode: Process, kind: str, label: str
) -> Iterator[Ranked]:
    """Start the routers in front of two servers."""
    turns = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin")
    flags = ((), turns, (*turns, "--dp-minimum-tokens-scheduler"))
    with ExitStack() as stack:
        started = [stack.enter_context(router([prefill], [decode], args)) for args in flags]
        least, in_turns, turns_least = started
        fleet = Ranked(prefill, decode, least, in_turns, turns_least, kind, label)
        for each in started:  # how many ranks there are is learned from the first report
            for role in ROLES:
                until(lambda r=each, role=role: foreign(r, role, 1) >= 0)
        yield fleet


def picked(answer: Answer) -> tuple[int, int]:
    """Return the ranks that a router says it took for prefill and decode."""
    prefill, decode = (int(answer.headers[f"X-KVConnect-{role}-Rank"]) for role in ROLES)
    return prefill, decode


def foreign(router: Router, role: str, rank: int) -> float:
    """Return the tokens of others that a router knows of; -1 while it does not."""
    try:
        return router.metric("kvconnect_router_foreign_tokens", role=role, rank=str(rank))
    except KeyError:
        return -1.0


def until(true: Callable[[], bool], what: str = "it") -> None:
    for _ in range(int(WAIT_S / _LOOK_S)):  # not by the clock: the whole machine may have paused
        if true():
            return
        time.sleep(_LOOK_S)
    raise AssertionError(f"not true: {what}")


def check_that_picked_ranks_run(
    fleet: Ranked, want: Tokens, publish: Callable[[], None] = lambda: None
) -> None:
    """Answers are those of a single engine; each rank did the hand-offs that it was picked for.
    ``publish`` has idle servers tell of what they did last."""
    assert len(set(want)) == COUNT  # else equality would prove little
    before = fleet.handed_off()
    with ThreadPoolExecutor(CROWD) as crowd:
        answers = list(crowd.map(lambda prompt: fleet.least.complete(prompt, NEW), prompts()))
    assert [answer.tokens for answer in answers] == want
    ranks = list(zip(*map(picked, answers), strict=True))
    for role, of_role in zip(ROLES, ranks, strict=True):
        expected = [
            was + of_role.count(rank) for rank, was in zip(RANKS, before[role], strict=True)
        ]
        assert expected > before[role] and set(of_role) == set(RANKS)

        def told(role: str = role, expected: list[float] = expected) -> bool:
            publish()
            return fleet.handed_off()[role] == expected

        until(told, f"{role} ranks did the hand-offs {expected}")


def check_minimum_tokens(fleet: Ranked, long_requests: AbstractContextManager[None]) -> None:
    """While somebody else's long requests are on rank 0 of both servers, requests go to rank 1, but
    not those of a policy that looks at no loads (the control)."""
    asked = prompts()[:4]
    with ThreadPoolExecutor(len(RANKS)) as both:
        with long_requests:
            for router in fleet.routers:
                until(lambda r=router: is_loaded(r))
            for router in (fleet.least, fleet.turns_least):
                found = [picked(router.complete(prompt, NEW)) for prompt in asked]
                assert found == [(1, 1)] * len(asked), found
            assert is_loaded(fleet.turns), "the long requests ended too early"
            held_up = [both.submit(fleet.turns.complete, prompt, NEW) for prompt in asked[:2]]
            in_flight = "kvconnect_router_in_flight"
            until(
                lambda: (
                    any(one.done() for one in held_up)
                    or fleet.turns.metric(in_flight, role="decode") > 0
                )
            )
        assert sorted(picked(each.result()) for each in held_up) == [(0, 0), (1, 1)]
    # What was left on rank 0 is cleared away behind the answers.
    until(lambda: picked(fleet.least.complete(asked[0], NEW)) == (0, 0), "rank 0 is used again")


def is_loaded(router: Router) -> bool:
    """Whether a router knows of others' tokens on rank 0 of both servers, and of few on rank 1."""
    return all(foreign(router, role, 0) >= LOADED > foreign(router, role, 1) for role in ROLES)
