"""Hands prompts from a prefill to a decode engine, and compares with computing them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median

from kvconnect.errors import Refused
from kvconnect.router.fleet import reports
from kvconnect.router.policy.choice import Mode
from kvconnect.router.requests import engine_bodies
from kvconnect.trial.counters import Change, named, settled
from kvconnect.trial.engine_api import AskedEngine, EngineClient, EngineName, TrialReply
from kvconnect.trial.http_client import HttpClient, TrialFailed
from kvconnect.trial.offload_trial import prompt_size
from kvconnect.trial.plain_words import PromptMaker
from kvconnect.trial.results import Measurement, NoGain, TrialResult
from kvconnect.trial.verdicts import DIFFERENT

Ask = Callable[[str], TrialReply]
_ROUTED = "kvconnect_router_requests_total"
_COUNT_S = 10.0
_COUNT_PAUSE_S = 0.1
_ROLES = "kv_role kv_producer for prefill and kv_consumer for decode"


@dataclass(frozen=True)
class HandoffWay:
    """How prompts are asked, with the words for three lines.

    Attributes:
        cold: asks a new prompt.
        cached: asks it again where it was computed.
        handed_off: asks it again, as a hand-off.
        control: asks another new prompt.
        words: of the three lines.
        info: of the engine that answers.
        handoffs: how many a number of rounds makes.
    """

    cold: Ask
    cached: Ask
    handed_off: Ask
    control: Ask
    words: tuple[str, str, str]
    info: AskedEngine
    handoffs: Callable[[int], int]


def run_pair(
    prefill: EngineClient, decode: EngineClient, maker: PromptMaker, tokens: int, rounds: int
) -> TrialResult:
    """Measure hand-offs from one engine to another, as a router asks for them.

    Raises:
        TrialFailed: an engine fails, or they cannot hand off to each other.
    """
    if prefill.info.name is not decode.info.name:
        raise TrialFailed("the prefill and the decode engine must both be vLLM, or both SGLang")
    if prefill.info.name is EngineName.SGLANG:
        path = _rooms(prefill, decode)
    else:
        path = _tickets(prefill, decode)
    engine, http = decode.info.name, decode.http
    before = settled(http, engine)
    result, size = _measure(path, maker, tokens, rounds)
    received = "handoff_received_requests_total"

    expected = path.handoffs(rounds)

    def answered(change: Change) -> bool:
        return sum(change.by(received, "outcome").values()) >= expected

    change = Change(before, settled(http, engine, lambda now: answered(Change(before, now))))
    problem = None if result.outputs_equal else DIFFERENT
    return replace(
        result,
        problem=problem or _problem_of_pair(change, expected),
        figures={
            **_figures(size, rounds),
            "received": change.by(received, "outcome"),
            "refused": change.by("handoff_refused_total", "field"),
        },
    )


def run_router(router: EngineClient, maker: PromptMaker, tokens: int, rounds: int) -> TrialResult:
    """Measure hand-offs of the engines behind a router.

    Raises:
        TrialFailed: the router fails.
    """
    words = (
        "new prompts of {tokens} tokens through the router, median of {rounds}",
        "the same for the third time",
        "other new prompts of that length",
    )
    path = _one_way(router.ask, words, router.info)
    before = _routed(router.http)
    result, size = _measure(path, maker, tokens, rounds)
    problem = None if result.outputs_equal else DIFFERENT
    modes: dict[str, float] = {}
    if before is not None:
        modes = _await_routed(router.http, before, path.handoffs(rounds))
        if not problem and sum(n for mode, n in modes.items() if mode != Mode.PLAIN.value) < 1:
            problem = NoGain(
                "the router handed off no prompt: a decode engine answered alone",
                "look for engines that are down in the router's log, and at --push-min-tokens",
            )
    good = f"prompts were handed off: {named(modes)}" if modes else "prompts were answered"
    return replace(
        result, problem=problem, good=good, figures={**_figures(size, rounds), "modes": modes}
    )


def _measure(
    path: HandoffWay, maker: PromptMaker, tokens: int, rounds: int
) -> tuple[TrialResult, int]:
    """Return times and whether tokens are equal, and the tokens of a prompt."""
    size = prompt_size(path.cold, path.info, maker, tokens)
    cold, loaded, control, equal = [], [], [], True
    for _ in range(rounds):
        prompt = maker.new(size)
        cold.append(path.cold(prompt))
        answers = cold[-1].output, path.cached(prompt).output
        loaded.append(path.handed_off(prompt))
        equal = equal and loaded[-1].output in answers
        control.append(path.control(maker.new(size)))
    times = [[reply.first_s for reply in replies] for replies in (cold, loaded, control)]
    counted = max(reply.prompt_tokens for reply in cold)
    words = [text.format(tokens=counted or size, rounds=rounds) for text in path.words]
    ratio = median(times[2]) / median(times[1])
    result = TrialResult(
        path.info,
        (
            Measurement("cold", times[0], words[0]),
            Measurement("loaded", times[1], words[1]),
            Measurement("control", times[2], words[2]),
        ),
        equal,
        None,
        f"prompts were handed off, {ratio:.1f} times as fast as control",
    )
    return result, counted or size


def _tickets(prefill: EngineClient, decode: EngineClient) -> HandoffWay:
    """vLLM: the prefill engine answers with a ticket, which the decode engine gets."""

    def handed_off(prompt: str) -> TrialReply:
        asked = engine_bodies.prefill_body(prefill.body(prompt), secrets.token_hex(16))
        try:
            ticket = engine_bodies.ticket_of(prefill.http.post("/v1/completions", asked))
        except Refused as error:
            raise TrialFailed(f"the prefill engine's answer is not usable: {error}") from error
        if ticket is None:
            raise TrialFailed(
                "the prefill engine offers no hand-off: make KVConnect its KV connector, with "
                + _ROLES
            )
        body = engine_bodies.pull_body(decode.body(prompt), ticket)
        return decode.stream(body)

    words = (
        "new prompts of {tokens} tokens, computed by the prefill engine, median of {rounds}",
        "the same, received by the decode engine",
        "other new prompts of that length, computed by the decode engine",
    )
    return HandoffWay(
        cold=prefill.ask,
        cached=prefill.ask,
        handed_off=handed_off,
        control=decode.ask,
        words=words,
        info=decode.info,
        handoffs=lambda rounds: rounds,
    )


def _rooms(prefill: EngineClient, decode: EngineClient) -> HandoffWay:
    """SGLang: both servers get the prompt at once, with the room where they meet."""
    for role, client in (("prefill", prefill), ("decode", decode)):
        if client.info.half != role:
            raise TrialFailed(
                f"--{role} names a server that is no such half of a hand-off: start it with "
                f"--disaggregation-mode {role} --disaggregation-transfer-backend kvconnect"
            )
    port = prefill.info.bootstrap_port

    def ask(prompt: str) -> TrialReply:
        room = secrets.randbelow(engine_bodies.ROOMS)
        meeting = engine_bodies.BootstrapRoom(prefill.http.host, port, room, None)
        with ThreadPoolExecutor(1) as pool:
            body = engine_bodies.bootstrap_body(prefill.body(prompt), meeting, None)
            first = pool.submit(prefill.stream, body)
            reply = decode.stream(engine_bodies.bootstrap_body(decode.body(prompt), meeting, None))
            first.result()
            return reply

    words = (
        "new prompts of {tokens} tokens through both servers, median of {rounds}",
        "the same for the third time: the prefill server has them cached",
        "other new prompts of that length",
    )
    return _one_way(ask, words, decode.info)


def _problem_of_pair(change: Change, expected: int) -> NoGain | None:
    """Return why prompts were not handed off, as the decode engine's metrics tell it."""
    if change.after.missing:
        return NoGain(
            "the decode engine's metrics cannot be read, so nobody knows whether it computed",
            "make /metrics reachable (SGLang: --enable-metrics) and try again",
        )
    if not change.after.of_kvconnect:
        return NoGain(
            "the decode engine runs without KVConnect: its metrics have none of KVConnect's",
            f"make KVConnect its KV connector, with {_ROLES}",
        )
    done = change.by("handoff_received_requests_total", "outcome").get("done", 0.0)
    if done >= expected:
        return None
    refused = change.by("handoff_refused_total", "field")
    failed = change.by("handoff_failures_total", "cause")
    why = named({**refused, **failed}) or "the engine counts no reason"
    return NoGain(
        f"the decode engine received {done:.0f} of {expected} prompts: {why}",
        "its log has both sides' values; docs/failures.md explains each name",
    )


def _one_way(ask: Ask, words: tuple[str, str, str], info: AskedEngine) -> HandoffWay:
    """Return the way of servers that hand off every prompt: four a round, and the counted one."""
    return HandoffWay(
        cold=ask,
        cached=ask,
        handed_off=ask,
        control=ask,
        words=words,
        info=info,
        handoffs=lambda rounds: 4 * rounds + 1,
    )


def _figures(size: int, rounds: int) -> dict[str, object]:
    return {"what": "hand-off", "rounds": rounds, "prompt_tokens": size}


def _routed(http: HttpClient) -> dict[str, float] | None:
    """Return a router's requests by mode; None if it is not KVConnect's, or tells none."""
    try:
        text = http.get("/metrics").decode("utf-8", "replace")
    except TrialFailed:
        return None
    found: dict[str, float] = {}
    for _, labels, value in reports.samples(text, (_ROUTED,)):
        mode = labels.get("mode", "")
        found[mode] = found.get(mode, 0.0) + value
    return found or None


def _await_routed(http: HttpClient, before: dict[str, float], count: int) -> dict[str, float]:
    """Return the requests since ``before`` by mode, once they are counted."""
    deadline = time.monotonic() + _COUNT_S
    while True:
        now = _routed(http) or {}
        rose = {mode: n - before.get(mode, 0.0) for mode, n in now.items()}
        rose = {mode: n for mode, n in rose.items() if n > 0}
        if sum(rose.values()) >= count or time.monotonic() > deadline:
            return rose
        time.sleep(_COUNT_PAUSE_S)
