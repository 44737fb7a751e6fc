"""Random runs: what is sent, aborted and held up follows from one number."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.sglang.schedulers.model import VOCAB
from tests.sglang.schedulers.pair import HALVES, Half, Pair, Request

_PREFIXES = 3


@dataclass(frozen=True)
class Rates:
    """How often something happens, as a share of requests or of ticks."""

    aborts: float = 0.06
    """Of the ticks."""
    one_sided: float = 0.5
    """Of the aborts: at one engine only."""
    samples: float = 0.0
    """Of the requests: two samples of one prompt, in one room."""
    repeats: float = 0.3
    """Of the requests: a prompt that was sent before."""
    retracts: float = 0.0
    """Of the ticks: decode gives up all KV, as for new weights, and has it computed again."""
    held_up: float = 0.1
    """Of the ticks: one engine stands still for a while."""
    most_open: int = 7
    most_new: int = 24


class Run:
    """One random run of a pair, from a seed."""

    def __init__(self, pair: Pair, seed: int, rates: Rates) -> None:
        self.pair = pair
        self.rates = rates
        self.random = random.Random(seed)
        draw = self.random.randrange
        self._prefixes = [[draw(VOCAB) for _ in range(draw(4, 40))] for _ in range(_PREFIXES)]
        self._prompts: list[list[int]] = []
        self._halves: list[tuple[list[Request], Half]] = []  # not sent yet

    def go(self, ticks: int) -> None:
        """Run so many ticks, then to the end of all requests."""
        for _ in range(ticks):
            self._tick()
        while self._halves:
            self._send_half()
        self.pair.finish()

    def _tick(self) -> None:
        luck = self.random.random
        live = [r for r in self.pair.requests.values() if r.is_open]
        if len(live) < self.rates.most_open and luck() < 0.3:
            self._arrive()
        if self._halves and luck() < 0.5:
            self._send_half()
        if live and luck() < self.rates.aborts:
            # The youngest as often as all others: prefill is done with a request in a few ticks.
            self._abort(live[-1] if luck() < 0.5 else self.random.choice(live))
        if luck() < self.rates.held_up:
            half = self.random.choice(HALVES)
            for _ in range(self.random.randrange(1, 12)):
                self.pair.step(half)
        if luck() < self.rates.retracts:
            self._retract()
        self.pair.both()

    def _retract(self) -> None:
        """Have decode give up its KV and go on; prefill may stand still meanwhile."""
        alone = self.random.random() < 0.5
        for act in (self.pair.retract, self.pair.resume, lambda: None):
            for _ in range(self.random.randrange(8)):
                if alone:
                    self.pair.step("decode")
                else:
                    self.pair.both()
            act()

    def _arrive(self) -> None:
        prompt = self._prompt()
        samples = 2 if self.random.random() < self.rates.samples else 1
        new = self.random.randrange(1, self.rates.most_new)
        first = self.pair.request(prompt, new)
        requests = [first]
        for _ in range(samples - 1):
            requests.append(self.pair.request(prompt, new, first.room))
        self._halves += [(requests, half) for half in self.random.sample(HALVES, 2)]
        for request in requests if samples > 1 else ():
            request.explained = "its room is another sample's too"
        self.pair.seen["samples"] += samples - 1

    def _prompt(self) -> list[int]:
        if self._prompts and self.random.random() < self.rates.repeats:
            return self.random.choice(self._prompts)
        draw = self.random.randrange
        prompt = self.random.choice(self._prefixes) + [draw(VOCAB) for _ in range(draw(1, 40))]
        if self.random.random() < 0.5:
            prompt = prompt[: max(4, len(prompt) // 4 * 4)]  # whole pages
        self._prompts.append(prompt)
        return prompt

    def _send_half(self) -> None:
        requests, half = self._halves.pop(0)
        if requests:
            self.pair.send_together(requests, half)

    def _abort(self, request: Request) -> None:
        """Abort a request where it has been sent; elsewhere it is not sent any more."""
        sent = sorted(request.sent)
        if len(sent) == 2 and self.random.random() < self.rates.one_sided:
            sent = [self.random.choice(sent)]
        for requests, _ in self._halves:
            if request in requests:
                requests.remove(request)
        self.pair.abort(request, *sent)
