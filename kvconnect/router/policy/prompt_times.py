"""What one engine's prompts took: seconds to compute them, and seconds from the end of prefill to
the first token. Pure.

Times are learned from requests. A time is taken to grow with the tokens: a fixed part, and a part
for each token. Recent requests count most. What was not measured for a while is not known any more.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import NamedTuple

STALE_S = 300.0
"""Seconds after which a time that was not measured again is unknown."""
FEWEST = 3
"""Requests from which on a time is known."""
LONGEST_S = 600.0
"""Limit of a measured time: a request that was stuck longer teaches no more than that."""
MOST_TOKENS = 2**24
"""Limit of the tokens of a measured time."""

_REMEMBERED = 32  # requests that count
_LEAP, _LEAP_S = 4.0, 0.1  # one request may take so many times what was expected, and seconds
_SPREAD = 0.1  # of the mean: lengths that differ less tell nothing about the part for each token


class LinearTime(NamedTuple):
    """A time that grows with the tokens."""

    fixed_s: float
    token_s: float

    def seconds(self, tokens: float) -> float:
        """Return the seconds that ``tokens`` take."""
        return self.fixed_s + self.token_s * tokens


class PromptTimes(NamedTuple):
    """What is known of one engine's prompts at one moment.

    Attributes:
        compute: from when a prompt is sent until it is computed, by the tokens before it and its
            own that are not cached; None: unknown.
        arrival: from the end of prefill to the first token of a prompt that was handed off, by mode
            and the tokens that are moved. A mode that is missing is unknown.
        waiting_tokens: by rank, those of the router's prompts that the engine has not computed yet.
        arrival_s: mean of the times from the end of prefill to the first token of all modes; None:
            unknown.
    """

    compute: LinearTime | None = None
    arrival: Mapping[str, LinearTime] = MappingProxyType({})
    waiting_tokens: Mapping[int, int] = MappingProxyType({})
    arrival_s: float | None = None

    def waiting(self, rank: int | None) -> int:
        """Return the tokens of a rank that are not computed yet."""
        return self.waiting_tokens.get(rank or 0, 0)


NOTHING_KNOWN = PromptTimes()
"""Of an engine that has had no prompts."""


class StartedPrompt(NamedTuple):
    """A prompt that was sent to a rank at time ``at``; ``ahead``: tokens that it waits for.
    ``number``: of the engine's prompts. ``done``: tokens that the rank had computed."""

    number: int
    rank: int
    tokens: int
    ahead: int
    at: float
    done: int


class TimeFit:
    """Fits a :class:`LinearTime` to measured times: least squares, the older the less weight.

    ``by_length``: while all have the same length, the time is taken for one of the tokens alone,
    else for one that is fixed.
    """

    def __init__(self, *, by_length: bool) -> None:
        self._by_length = by_length
        self._count = 0
        self._measured_at = float("-inf")
        self._weight = self._tokens = self._seconds = 0.0  # the last two are means
        self._squares = self._products = 0.0  # of deviations, weighted sums
        self._line = LinearTime(0.0, 0.0)

    def add(self, tokens: float, seconds: float, now: float) -> None:
        """Take a measured time. One that is far too long counts as a shorter one."""
        tokens = min(max(0.0, tokens), float(MOST_TOKENS))
        seconds = min(max(0.0, seconds), LONGEST_S)
        known = self._count >= FEWEST
        if known:
            seconds = min(seconds, _LEAP * self._line.seconds(tokens) + _LEAP_S)
        old = known and now > self._measured_at + STALE_S
        keep = 1 / _REMEMBERED if old else 1 - 1 / _REMEMBERED
        self._count += 1
        self._measured_at = now
        self._weight = keep * self._weight + 1
        before = tokens - self._tokens
        self._tokens += before / self._weight
        self._seconds += (seconds - self._seconds) / self._weight
        self._squares = keep * self._squares + before * (tokens - self._tokens)
        self._products = keep * self._products + before * (seconds - self._seconds)
        self._line = self._fitted()

    @property
    def until(self) -> float:
        """When it is not known any more, if nothing is measured; infinity if it is not known."""
        return self._measured_at + STALE_S if self._count >= FEWEST else inf

    def at(self, now: float) -> LinearTime | None:
        """Return the time as it is known; None if it is not."""
        known = self._count >= FEWEST and now <= self._measured_at + STALE_S
        return self._line if known else None

    def _fitted(self) -> LinearTime:
        whole = LinearTime(0.0, self._seconds / max(1.0, self._tokens))
        if self._squares <= self._weight * (1 + (_SPREAD * self._tokens) ** 2):
            return whole if self._by_length else LinearTime(self._seconds, 0.0)
        token_s = max(0.0, self._products / self._squares)
        fixed_s = self._seconds - token_s * self._tokens
        return LinearTime(fixed_s, token_s) if fixed_s >= 0 else whole


@dataclass
class _RankQueue:
    """The prompts of a rank: tokens that wait, tokens that are computed, and since when it works on
    the first of those that wait."""

    waiting: int = 0
    done: int = 0
    since: float = 0.0


class PromptTimer:
    """Measures the prompts of one engine. Not thread-safe."""

    def __init__(self) -> None:
        self._number = 0
        self._open: dict[int, StartedPrompt] = {}  # not computed yet
        self._queues: defaultdict[int, _RankQueue] = defaultdict(_RankQueue)
        self._unseen: list[tuple[float, int]] = []  # when they are expected to be computed
        self._compute = TimeFit(by_length=True)
        self._arrival: dict[str, TimeFit] = {}
        self._arrivals = TimeFit(by_length=False)  # of all modes, as if all had the same length
        self._shown: PromptTimes | None = None  # what at() returned; None: it has changed since
        self._shown_until = inf

    def begin(self, rank: int | None, tokens: int, now: float, *, seen: bool) -> StartedPrompt:
        """Add a prompt that the engine is to compute. ``seen``: :meth:`end` will be called when it
        is computed; else it counts as computed when that is expected."""
        self._expire(now)
        self._number, rank = self._number + 1, rank or 0
        queue = self._queues[rank]
        ahead = queue.waiting
        if not ahead:
            queue.since = now
        prompt = StartedPrompt(self._number, rank, tokens, ahead, now, queue.done)
        self._open[prompt.number] = prompt
        queue.waiting += tokens
        self._shown = None
        compute = self._compute.at(now)
        if compute is not None and not seen:
            heapq.heappush(self._unseen, (now + compute.seconds(ahead + tokens), prompt.number))
        return prompt

    def end(self, prompt: StartedPrompt, now: float, *, measured: bool) -> None:
        """Remove a prompt. ``measured``: it has just been computed."""
        self._expire(now)
        self._remove(prompt.number, now)
        if measured:
            self._compute.add(prompt.ahead + prompt.tokens, now - prompt.at, now)
            self._shown = None

    def starts_in_s(self, prompt: StartedPrompt, now: float) -> float:
        """Return the seconds until the engine is expected to begin with a prompt; 0 if that is not
        known. Prompts are taken to be computed one after the other."""
        compute, queue = self._compute.at(now), self._queues[prompt.rank]
        ahead = prompt.ahead - (queue.done - prompt.done)
        if compute is None or ahead <= 0:
            return 0.0
        return max(0.0, compute.token_s * ahead - (now - queue.since))

    def arrived(self, mode: str, tokens: int, seconds: float, now: float) -> None:
        """Take the seconds from the end of prefill to the first token."""
        fit = self._arrival.setdefault(mode, TimeFit(by_length=False))
        fit.add(tokens, seconds, now)
        self._arrivals.add(0, seconds, now)
        self._shown = None

    def at(self, now: float) -> PromptTimes:
        """Return what is known. What has not changed is the same object."""
        self._expire(now)
        if self._shown is None or now > self._shown_until:
            every = self._arrivals.at(now)
            arrival = {mode: line for mode, fit in self._arrival.items() if (line := fit.at(now))}
            waiting = {rank: queue.waiting for rank, queue in self._queues.items()}
            arrival_s = None if every is None else every.fixed_s
            self._shown = PromptTimes(self._compute.at(now), arrival, waiting, arrival_s)
            fits = (self._compute, self._arrivals, *self._arrival.values())
            self._shown_until = min((f.until for f in fits if f.until >= now), default=inf)
        return self._shown

    def _expire(self, now: float) -> None:
        while self._unseen and self._unseen[0][0] <= now:
            self._remove(heapq.heappop(self._unseen)[1], now)

    def _remove(self, number: int, now: float) -> None:
        prompt = self._open.pop(number, None)
        if prompt is not None:
            queue = self._queues[prompt.rank]
            queue.waiting -= prompt.tokens
            queue.done += prompt.tokens
            queue.since = now
            self._shown = None
