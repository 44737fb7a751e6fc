"""Prefill and decode engines that change roles, in simulated time, on the conversation trace.

A prefill engine computes one prompt after the other. A decode engine has seats; a prompt without
one waits. Waits are measured as the router measures them. An engine that changes its role first
ends what it has.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.serve.trace import Request, read, spread
from kvconnect.router.policy.fleet_view import EngineView, FleetView, Role
from kvconnect.router.policy.prompt_times import PromptTimer
from kvconnect.router.policy.role_balance import LOOK_S, Waits, other_role, waits_of

TRACE = Path(__file__).parents[3] / "benchmarks" / "serve" / "conversations.jsonl.gz"
PREFILL_TOKENS_PER_S = 10_000.0
TOKEN_S = 0.03
SEATS = 16
TRANSFER_S = 0.05
CHANGE_S = 5.0  # of an engine without requests
_ANY = "pull"


def conversations(requests_per_s: float, hours: float) -> list[Request]:
    """Return the trace, one time after the other, at a rate; times are in ms."""
    once = read(TRACE)
    seconds = len(once) / requests_per_s
    rounds = range(int(hours * 3600 / seconds))
    return [
        Request(one.timestamp + number * seconds * 1e3, one.input_length, one.output_length, ())
        for number in rounds
        for one in spread(once, seconds)
    ]


class Balance(Protocol):
    """What proposes changes."""

    def look(self, waits: Waits, now: float) -> Role | None:
        """Return the role that should get an engine."""

    def changed(self, role: Role, now: float) -> None:
        """Note that it got one."""


class Prompt(NamedTuple):
    """A request that arrived at time ``at``."""

    at: float
    tokens: int
    output: int


@dataclass
class Node:
    """One engine."""

    number: int
    role: Role
    timer: PromptTimer = field(default_factory=PromptTimer)
    up: bool = True
    open: int = 0
    queue: deque[tuple[Prompt, float]] = field(default_factory=deque)
    free_at: float = 0.0

    def view(self, now: float) -> EngineView:
        return EngineView(self.number, self.up, times=self.timer.at(now))


class Outcome(NamedTuple):
    """What a run showed: the role that each change gave an engine to, its time, and all times to
    the first token."""

    changes: list[tuple[float, Role]]
    ttft_s: list[float]

    @property
    def reversals(self) -> int:
        """Changes that undo the one before."""
        roles = [role for _, role in self.changes]
        return sum(a is not b for a, b in pairwise(roles))


class Simulation:
    """A fleet, and the events that are still to come."""

    def __init__(self, prefill: int, decode: int, balance: Balance | None) -> None:
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        self._nodes = [Node(number, role) for number, role in enumerate(roles)]
        self._balance = balance
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order: Iterator[int] = count()
        self._leaving: Node | None = None
        self._seen = Outcome([], [])

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Serve all requests."""
        for one in requests:
            at = one.timestamp / 1e3
            prompt = Prompt(at, one.input_length, one.output_length)
            self._later(at, lambda now, prompt=prompt: self._arrive(prompt, now))
        ends = requests[-1].timestamp / 1e3
        if self._balance is not None:
            for look in range(int(ends / LOOK_S)):
                self._later(look * LOOK_S, self._look)
        while self._events:
            now, _, happens = heapq.heappop(self._events)
            happens(now)
        return self._seen

    def _later(self, at: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), happens))

    def _of(self, role: Role) -> list[Node]:
        return [node for node in self._nodes if node.role is role and node.up]

    def _arrive(self, prompt: Prompt, now: float) -> None:
        node = min(self._of(Role.PREFILL), key=lambda node: node.free_at)
        started = node.timer.begin(None, prompt.tokens, now, seen=True)
        node.open += 1
        node.free_at = max(now, node.free_at) + prompt.tokens / PREFILL_TOKENS_PER_S

        def computed(now: float) -> None:
            node.timer.end(started, now, measured=True)
            self._ended(node, now)
            self._decode(prompt, now)

        self._later(node.free_at, computed)

    def _decode(self, prompt: Prompt, now: float) -> None:
        node = min(self._of(Role.DECODE), key=lambda node: node.open)
        node.open += 1
        node.queue.append((prompt, now))
        self._seat(node, now)

    def _seat(self, node: Node, now: float) -> None:
        while node.queue and node.open - len(node.queue) < SEATS:
            prompt, prefilled_at = node.queue.popleft()
            first = now + TRANSFER_S
            self._seen.ttft_s.append(first - prompt.at)
            node.timer.arrived(_ANY, prompt.tokens, first - prefilled_at, first)

            def done(now: float) -> None:
                self._ended(node, now)
                self._seat(node, now)

            self._later(first + prompt.output * TOKEN_S, done)

    def _ended(self, node: Node, now: float) -> None:
        node.open -= 1
        if node is self._leaving and not node.open:
            self._later(now + CHANGE_S, lambda now: self._change(node, now))

    def _look(self, now: float) -> None:
        views = {role: tuple(node.view(now) for node in self._of(role)) for role in Role}
        assert self._balance is not None
        view = FleetView(views[Role.PREFILL], views[Role.DECODE])
        needy = self._balance.look(waits_of(view), now)
        if needy is None or self._leaving is not None:
            return
        givers = self._of(other_role(needy))
        if len(givers) < 2:
            return
        node = min(givers, key=lambda node: node.open)
        node.up, self._leaving = False, node
        if not node.open:
            self._later(now + CHANGE_S, lambda now: self._change(node, now))

    def _change(self, node: Node, now: float) -> None:
        assert self._balance is not None
        node.role, node.up, self._leaving = other_role(node.role), True, None
        node.timer, node.free_at = PromptTimer(), now
        self._seen.changes.append((now, node.role))
        self._balance.changed(node.role, now)
