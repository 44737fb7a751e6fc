"""A prefill and a decode engine, the requests that they share, and what must be true of them.

What a request ends with: the tokens that follow its prompt, or a failure that something explains
(it was aborted, or its room was not its own). What is left when all have ended: nothing.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tests.sglang.schedulers.engine import Engine
from tests.sglang.schedulers.http_stubs import GenerateServer, Recompute
from tests.sglang.schedulers.model import continuation

Half = Literal["prefill", "decode"]
HALVES: tuple[Half, Half] = ("prefill", "decode")

STUCK_S = 20.0
"""Both loops run, nothing changes: what still waits then waits for a limit of minutes."""
_numbers = itertools.count(1)  # rooms and names are not used twice
_TICK_S = 0.001  # leaves the agents' threads a core


class Fault(AssertionError):
    """A wrong token, an unexplained failure, a hang or a leak."""


@dataclass
class Request:
    """One request. ``explained`` says why it may fail; "" means that it may not."""

    rid: str
    room: int
    prompt: list[int]
    new: int
    explained: str = ""
    sent: set[Half] = field(default_factory=set)
    ended: dict[Half, str] = field(default_factory=dict)
    got: dict[Half, list[int]] = field(default_factory=lambda: {"prefill": [], "decode": []})

    def __post_init__(self) -> None:
        self.expected = continuation(self.prompt, self.new)

    @property
    def is_open(self) -> bool:
        return any(half not in self.ended for half in self.sent)


class Pair:
    """Two engines that are up, and their requests; use as a context manager. For one thread.

    ``seen`` counts what happened. ``spoilt``: something went wrong, or is not over.
    """

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.engines: dict[Half, Engine] = {"prefill": prefill, "decode": decode}
        self.requests: dict[str, Request] = {}
        self.seen: Counter[str] = Counter()
        self.spoilt = False
        self._recomputes: dict[str, Recompute] = {}  # that prefill computes
        self._generate = GenerateServer(prefill.port)

    def __enter__(self) -> Self:
        self._generate.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._generate.__exit__(*error)

    def request(self, prompt: Sequence[int], new: int, room: int | None = None) -> Request:
        """Make a request with a room of its own, or this one; nobody hears of it yet."""
        number = next(_numbers)
        found = Request(f"r{number}", number if room is None else room, list(prompt), new)
        self.requests[found.rid] = found
        return found

    def send(self, request: Request, *halves: Half, port: int = 0) -> None:
        """Give a request to engines, both if none is named. ``port``: where decode is told that
        prefill's bootstrap server is, if not where it is."""
        for half in halves or HALVES:
            self.send_together([request], half, port)

    def send_together(self, requests: Sequence[Request], half: Half, port: int = 0) -> None:
        """Give requests to an engine in one iteration, as SGLang does with a prompt's samples."""
        for request in requests:
            request.sent.add(half)
        port = port or self.engines["prefill"].bootstrap_port
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
        bodies = [
            {"rid": r.rid, "prompt": r.prompt, "new": r.new, "bootstrap_room": r.room, **where}
            for r in requests
        ]
        self.step(half, *({"kind": "generate", **body} for body in bodies))

    def retract(self) -> None:
        """Have decode give up the KV of all that it computes; :meth:`resume` lets it go on."""
        self.seen["pauses"] += 1
        self.step("decode", {"kind": "PauseGenerationReqInput", "mode": "retract"})

    def resume(self) -> None:
        """Let decode go on: prefill computes again what was given up."""
        self.step("decode", {"kind": "ContinueGenerationReqInput", "torch_empty_cache": False})

    def abort(self, request: Request, *halves: Half) -> None:
        """Abort a request at engines, at both if none is named."""
        for half in halves or HALVES:
            request.explained = request.explained or f"aborted at {half}"
            self.seen[f"aborts at {half}"] += 1
            self.step(half, {"kind": "AbortReq", "rid": request.rid})

    def break_(self, half: Half, what: str) -> None:
        """Break something of an engine (``breakages``) until :meth:`mend`."""
        self.step(half, {"kind": "break", "what": what})

    def mend(self, half: Half) -> None:
        """Undo :meth:`break_`."""
        self.step(half, {"kind": "mend"})

    def step(self, half: Half, *messages: dict[str, Any]) -> None:
        """Run one iteration of an engine's loop, and check what it put out."""
        self.spoilt = True  # until it is finished
        engine = self.engines[half]
        outputs = engine.step(*messages)
        for output in outputs:
            self._take(half, output)
        faults, engine.faults = engine.faults, []
        if faults:
            raise Fault(f"{half} read KV that is not its request's: {faults}")
        for name, length in engine.ranks[0].state["queues"].items():
            self.seen[f"most {name}"] = max(self.seen[f"most {name}"], length)

    def both(self) -> None:
        """Run one iteration of each loop."""
        self._recompute()
        for half in HALVES:
            self.step(half)
        time.sleep(_TICK_S)

    def until(self, true: Callable[[], bool], what: str, alone: Half | None = None) -> None:
        """Run both loops, or one ``alone``, until something holds.

        Raises:
            Fault: nothing changes any more.
        """
        last, since = self._picture(), time.monotonic()
        while not true():
            if alone:
                self.step(alone)
                time.sleep(_TICK_S)
            else:
                self.both()
            now = self._picture()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                open_ = [request for request in self.requests.values() if request.is_open]
                raise Fault(f"{what}: nothing changes any more; {self._states()}; open: {open_}")

    def finish(self) -> None:
        """Run until every request has ended; then nothing may be left of any.

        Raises:
            Fault: a hang or a leak.
        """
        self.spoilt = True
        self.until(lambda: not any(r.is_open for r in self.requests.values()), "requests wait")
        self.until(self._at_rest, "something is left")
        for half in HALVES:
            self.step(half, {"kind": "FlushCacheReqInput"})
        self.until(self._is_empty, "memory is left")
        self.requests.clear()
        self.spoilt = False

    def _recompute(self) -> None:
        """Give prefill what decode asks it to compute again, unless it still has it: a server
        would refuse a second request of that name."""
        for _ in range(self._generate.waiting.qsize()):
            recompute = self._generate.waiting.get()
            request = self.requests.get(recompute.body["rid"])
            if request is None:  # it was aborted meanwhile
                recompute.succeeded.set_result(False)
            elif request.rid in self._recomputes or "prefill" not in request.ended:
                self._generate.waiting.put(recompute)
            else:
                self.seen["recomputed"] += 1
                self._recomputes[request.rid] = recompute
                names = ("rid", "bootstrap_host", "bootstrap_port", "bootstrap_room")
                body = {name: recompute.body[name] for name in names}
                prompt = recompute.body["input_ids"]
                self.step("prefill", {"kind": "generate", "prompt": prompt, "new": 1, **body})

    def _at_rest(self) -> bool:
        return all(
            state["idle"] and state["rooms"] == [0, 0]
            for states in self._states().values()
            for state in states
        )

    def _is_empty(self) -> bool:
        return all(
            state["free"] == self.engines[half].shape.tokens and not state["cached"]
            for half, states in self._states().items()
            for state in states
        )

    def _states(self) -> dict[Half, list[dict[str, Any]]]:
        """Return what each rank has reported last."""
        return {half: [rank.state for rank in e.ranks] for half, e in self.engines.items()}

    def _picture(self) -> object:
        tokens = [len(r.got["decode"]) + len(r.ended) for r in self.requests.values()]
        return tokens, repr(self._states())

    def _take(self, half: Half, output: dict[str, Any]) -> None:
        request = self.requests.get(output["rid"])
        recompute = self._recomputes.get(output["rid"]) if half == "prefill" else None
        if recompute is not None:
            if output["end"] is not None:
                del self._recomputes[output["rid"]]
                recompute.succeeded.set_result(output["end"]["type"] != "abort")
            return
        if request is None or half in request.ended:
            return
        got = request.got[half]
        got += output["ids"]
        if got != request.expected[: len(got)]:
            raise Fault(f"{half}: wrong tokens {got}, not {request.expected}: {request}")
        end = output["end"]
        if end is None:
            return
        self.seen[f"{half} {end['type']}"] += 1
        self.seen[f"{half} cached"] += bool(output.get("cached"))
        self.seen["retracted"] += bool(output.get("retracted"))
        request.ended[half] = end["type"]
        if end["type"] == "abort":
            if not request.explained:
                raise Fault(f"{half}: a request failed for no reason: {end} {request}")
        elif half == "decode" and len(got) != request.new:
            raise Fault(f"decode: {len(got)} tokens, not {request.new}: {request}")
