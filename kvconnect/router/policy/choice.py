"""Chooses the engines and ranks of a request, and how KV is handed over. Pure.

Prefill and decode are chosen together: only engines that can use each other's KV make a pair.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Literal, NamedTuple

from kvconnect.errors import KVConnectError, Refused
from kvconnect.protocol.options import SOURCE
from kvconnect.router.apis import COMPLETIONS, Api
from kvconnect.router.body import Prompt
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.fleet_view import Engine, FleetView, Role, Target, WorkerView
from kvconnect.router.policy.paired_engines import best_group
from kvconnect.router.policy.prefixes import CacheHit, CacheHits
from kvconnect.router.policy.ranking import (
    Candidate,
    Pick,
    RankingJob,
    RankingPolicy,
    RankingReason,
    pick,
)

Cause = Literal["unreachable", "lost", "error"]
"""Why a request to an engine failed: no connection or a broken one, or an error response."""
SOURCE_MIN_TOKENS = 256
"""More tokens that a source must have than the chosen target: asking it takes a step of the engine,
in which fewer are computed."""
_SHOWN = 200  # characters of a client's input that are shown


class Mode(str, Enum):
    """How KV gets from prefill to decode."""

    PUSH = "push"  # both engines get the request at once
    PULL = "pull"  # decode gets the request after prefill has answered
    BOOTSTRAP = "bootstrap"  # both at once; SGLang engines find each other by room
    PLAIN = "plain"  # decode serves the request alone


class RoutingReason(str, Enum):
    """Why a mode was chosen."""

    DEFAULT = "default"
    FORCED = "forced"  # --pull
    SHORT = "short"  # under --push-min-tokens
    NO_STANDING_TICKET = "no_standing_ticket"  # the prefill engine has no valid standing ticket
    CONNECTOR = "connector"  # the engines' connector supports no other mode
    PUSH_FAILED = "push_failed"  # decode failed in push mode: the prompts may differ
    MULTI = "multi"  # several prompts or answers; a transfer id names one prompt
    NO_TICKET = "no_ticket"  # the prefill engine offered no hand-off
    API = "api"  # not a completion: there is nothing to hand over
    UNIFIED = "unified"  # --unified


MODES: tuple[tuple[Mode, RoutingReason], ...] = (
    (Mode.PUSH, RoutingReason.DEFAULT),
    (Mode.PULL, RoutingReason.FORCED),
    (Mode.PULL, RoutingReason.SHORT),
    (Mode.PULL, RoutingReason.NO_STANDING_TICKET),
    (Mode.PULL, RoutingReason.CONNECTOR),
    (Mode.PULL, RoutingReason.PUSH_FAILED),
    (Mode.BOOTSTRAP, RoutingReason.DEFAULT),
    (Mode.PLAIN, RoutingReason.MULTI),
    (Mode.PLAIN, RoutingReason.NO_TICKET),
    (Mode.PLAIN, RoutingReason.API),
    (Mode.PLAIN, RoutingReason.UNIFIED),
)
"""Every (mode, reason) pair that the router can report."""


class TargetChoice(NamedTuple):
    """The target of a request to an engine, and the reason.

    Attributes:
        tokens: prompt tokens that the target has to compute or receive.
        hit: prompt tokens that the target is expected to have cached.
        source: share ticket of an engine that has clearly more of them; may be empty.
    """

    target: Target
    why: RankingReason
    tokens: int = 0
    hit: int = 0
    source: str = ""

    @property
    def options(self) -> dict[str, str]:
        """What the request says of its prompt's blocks."""
        return {SOURCE: self.source} if self.source else {}


class RoutingChoice(NamedTuple):
    """Where both requests go, and how KV gets from one engine to the other.

    Attributes:
        prefill: None for a request that the decode engine serves alone.
        standing_ticket: the prefill engine's; empty unless the mode is push.
    """

    mode: Mode
    reason: RoutingReason
    prefill: TargetChoice | None
    decode: TargetChoice
    standing_ticket: str = ""

    @property
    def targets(self) -> dict[Role, Target]:
        """The chosen target of each role."""
        prefill = {} if self.prefill is None else {Role.PREFILL: self.prefill.target}
        return {**prefill, Role.DECODE: self.decode.target}


@dataclass
class FailedTargets:
    """Engines that a request's next attempts avoid, by number. ``pushed``: prefill engine whose
    push failed at decode. The next attempt is by pull, and takes it if no other is left."""

    prefill: set[int] = field(default_factory=set)
    decode: set[int] = field(default_factory=set)
    handoff_failed: bool = False
    pushed: int | None = None

    def add_unserved(self, view: FleetView, choice: RoutingChoice) -> bool:
        """Exclude all decode engines with the models of one that lacks the path; return whether
        others are left."""
        models = {w.index: w.models for w in view.decode}
        mine = models.get(choice.decode.target.worker)
        self.decode.update(index for index, theirs in models.items() if theirs == mine)
        return bool(models.keys() - self.decode)

    def add(self, choice: RoutingChoice, role: Role, cause: Cause) -> bool:
        """Record a failed attempt; return whether another attempt may succeed.

        A decode engine's error may come from its hand-off: one more is tried, after push by pull.
        The same error again, or without a hand-off, is final.
        """
        if role is Role.DECODE and cause in ("unreachable", "lost"):
            self.decode.add(choice.decode.target.worker)
            return True
        if choice.prefill is None:
            return False
        if role is Role.DECODE and choice.mode is Mode.PUSH and not self.handoff_failed:
            self.pushed = choice.prefill.target.worker
        else:
            self.prefill.add(choice.prefill.target.worker)
        again = role is Role.PREFILL or not self.handoff_failed
        self.handoff_failed = self.handoff_failed or role is Role.DECODE
        return again


class RoutingRequest(NamedTuple):
    """The inputs of a routing decision that come from the request.

    Attributes:
        turn: number of the request, plus its attempts so far.
        draw: a random number, at least 0 and less than 1.
        session: the client's name for a series of requests; may be empty.
        hits: cached prompt tokens by role and target.
        keep: decode engine of an earlier attempt, preferred if it is available.
    """

    prompt: Prompt
    turn: int
    draw: float = 0.0
    session: str = ""
    api: Api = COMPLETIONS
    hits: CacheHits = MappingProxyType({})
    keep: int | None = None


def choose(
    view: FleetView, request: RoutingRequest, failed: FailedTargets, options: RouterOptions
) -> RoutingChoice | None:
    """Return where the request goes; None if a role that it needs has no engine left."""
    decode = _available(view.decode, failed.decode, request)
    alone = request.api.decode_only or view.unified
    if alone and decode:
        reason = RoutingReason.API if request.api.decode_only else RoutingReason.UNIFIED
        target_choice = _choose_target(options.decode_policy, decode, request, Role.DECODE, options)
        target_choice = _with_source(target_choice, decode, request.hits.get(Role.DECODE, {}))
        return RoutingChoice(Mode.PLAIN, reason, None, target_choice)
    decode_only = (
        [] if request.prompt.single else [w for w in decode if w.engine is not Engine.SGLANG]
    )
    if decode_only:
        target_choice = _choose_target(
            options.decode_policy, decode_only, request, Role.DECODE, options
        )
        return RoutingChoice(Mode.PLAIN, RoutingReason.MULTI, None, target_choice)
    if alone or request.prompt.sampled:
        return None
    prefill = _available(view.prefill, failed.prefill, request)
    others = [worker for worker in prefill if worker.index != failed.pushed]
    group = best_group(view, others, decode, request.turn)
    group = group or best_group(view, prefill, decode, request.turn)
    if group is None:
        return None
    kept = [worker for worker in group.decode if worker.index == request.keep]
    request = request._replace(turn=group.turn)
    prefill_choice = _choose_target(
        options.prefill_policy, group.prefill, request, Role.PREFILL, options
    )
    hits = request.hits.get(Role.PREFILL, {})
    prefill_choice = _with_source(prefill_choice, group.prefill, hits)
    decode_choice = _choose_target(
        options.decode_policy, kept or group.decode, request, Role.DECODE, options
    )
    chosen = next(w for w in group.prefill if w.index == prefill_choice.target.worker)
    standing_ticket = chosen.standing_ticket(prefill_choice.target.rank)
    mode, reason = _handover_mode(chosen.engine, standing_ticket, request.prompt, options)
    if mode is Mode.PUSH and failed.pushed is not None:
        mode, reason = Mode.PULL, RoutingReason.PUSH_FAILED
    ticket = (standing_ticket or "") if mode is Mode.PUSH else ""
    return RoutingChoice(mode, reason, prefill_choice, decode_choice, ticket)


class Unserved(KVConnectError):
    """No engine serves the model or the path of a request."""


def explain_no_choice(view: FleetView, request: RoutingRequest) -> str:
    """Return why :func:`choose` found no engines at the first attempt.

    Raises:
        Unserved: no engine serves it, even among those that are down.
        Refused: no engine can take a request of this form.
    """
    sides = {Role.PREFILL: view.prefill, Role.DECODE: view.decode}
    if request.api.decode_only or view.unified:
        del sides[Role.PREFILL]
    if any(workers and not _serving(workers, request) for workers in sides.values()):
        model = request.prompt.model[:_SHOWN]
        named = any(w.engine in request.api.engines for workers in sides.values() for w in workers)
        what = (
            f"The model `{model}` does not exist." if named else "No engine here serves this path."
        )
        raise Unserved(what)
    missing = [role.value for role in view.missing() if role in sides]
    if missing:
        return f"no {' and no '.join(missing)} engine is up"
    if not all(_available(workers, (), request) for workers in sides.values()):
        return f"no engine that is up serves the model {request.prompt.model[:_SHOWN]!r}"
    if request.prompt.sampled and not view.unified:
        if all(worker.engine is Engine.SGLANG for worker in _serving(view.decode, request)):
            fix = "send the request without n, once for each answer"
            raise Refused("n", f"SGLang hands over one answer to a prompt: {fix}")
        return "no decode engine of vLLM is up, and n needs one"
    return "no prefill and decode engine that are up can hand over: engine or version differ"


def _available(
    workers: Sequence[WorkerView], failed: Collection[int], request: RoutingRequest
) -> list[WorkerView]:
    found = [w for w in _serving(workers, request) if w.up and w.index not in failed]
    return [w for w in found if w.trusted] or found


def _serving(workers: Sequence[WorkerView], request: RoutingRequest) -> list[WorkerView]:
    """Return the engines that serve the request's model and path, up or not."""
    found = [w for w in workers if w.serves(request.prompt.model)]
    return [w for w in found if w.engine in request.api.engines]


def _choose_target(
    policy: RankingPolicy,
    workers: Sequence[WorkerView],
    request: RoutingRequest,
    role: Role,
    options: RouterOptions,
) -> TargetChoice:
    """Return the target for one role. Policies that ignore loads choose an engine first."""
    draw = request.draw if role is Role.PREFILL else request.draw * 2**20 % 1.0
    hits = request.hits.get(role, {})
    job = RankingJob(request.prompt.tokens, request.turn, draw, request.session)
    if policy in (RankingPolicy.ROUND_ROBIN, RankingPolicy.RANDOM):
        engines = [
            Candidate(Target(target_choice), worker.ranks[0])
            for target_choice, worker in enumerate(workers)
        ]
        chosen = pick(policy, engines, job)
        worker = workers[chosen.candidate.target.worker]
        within = (
            RankingPolicy.LEAST_TOKENS if options.dp_minimum_tokens else RankingPolicy.ROUND_ROBIN
        )
        turn = job.turn // len(workers)
        found = pick(within, _candidates([worker], hits), job._replace(turn=turn))
        found = Pick(found.candidate, chosen.why)
    else:
        found = pick(policy, _candidates(workers, hits), job)
    hit = hits.get(found.candidate.target, CacheHit()).tokens
    return TargetChoice(found.candidate.target, found.why, max(0, request.prompt.tokens - hit), hit)


def _with_source(
    chosen: TargetChoice, workers: Sequence[WorkerView], hits: Mapping[Target, CacheHit]
) -> TargetChoice:
    """Return the choice with the share ticket of the target that has the most of the prompt, if
    that is clearly more than the chosen one has. An engine without a ticket reads from none."""
    tickets = {
        target: (hits.get(target, CacheHit()).readable, -load.own, ticket)
        for worker in workers
        for target, load in worker.targets()
        if (ticket := worker.share_ticket(target.rank))
    }
    if chosen.target not in tickets:
        return chosen
    readable, _, ticket = max(tickets.values())
    more = readable - chosen.hit >= SOURCE_MIN_TOKENS
    return chosen._replace(source=ticket) if more else chosen


def _candidates(workers: Sequence[WorkerView], hits: Mapping[Target, CacheHit]) -> list[Candidate]:
    return [
        Candidate(target, load, worker.name, hits[target].worth if target in hits else 0.0)
        for worker in workers
        for target, load in worker.targets()
    ]


def _handover_mode(
    engine: Engine, standing_ticket: str | None, prompt: Prompt, options: RouterOptions
) -> tuple[Mode, RoutingReason]:
    if engine is Engine.SGLANG:
        return Mode.BOOTSTRAP, RoutingReason.DEFAULT
    if engine is not Engine.VLLM:
        return Mode.PULL, RoutingReason.CONNECTOR
    if options.handoff == "pull":
        return Mode.PULL, RoutingReason.FORCED
    if prompt.tokens < options.push_min_tokens:
        return Mode.PULL, RoutingReason.SHORT
    if standing_ticket is None:
        return Mode.PULL, RoutingReason.NO_STANDING_TICKET
    return Mode.PUSH, RoutingReason.DEFAULT
