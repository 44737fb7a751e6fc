"""Which engines and ranks serve a request, and how they hand over. Pure: the same view, the same
choice.

Both legs are chosen together: only engines that can use each other's KV make a pair.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Literal, NamedTuple

from kvconnect.errors import KVConnectError, Refused
from kvconnect.router.apis import COMPLETIONS, Api
from kvconnect.router.body import Prompt
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.loads import Engine, FleetView, Role, Target, WorkerView
from kvconnect.router.policy.prefixes import CacheHit
from kvconnect.router.policy.ranking import (
    Candidate,
    Pick,
    RankingJob,
    RankingPolicy,
    RankingReason,
    pick,
)

Cause = Literal["unreachable", "error"]
"""Why a leg failed: no connection, or one that broke; or the engine answered with an error."""
_SHOWN = 200  # characters of what a client sent


class Mode(str, Enum):
    """How KV gets from prefill to decode."""

    PUSH = "push"  # both engines are asked at once
    PULL = "pull"  # decode is asked when prefill has answered
    BOOTSTRAP = "bootstrap"  # both at once; SGLang's engines meet by room
    PLAIN = "plain"  # decode does all of it


class RoutingReason(str, Enum):
    """Why a mode was taken."""

    DEFAULT = "default"
    FORCED = "forced"  # --pull
    SHORT = "short"  # under --push-min-tokens
    NO_STANDING_TICKET = "no_standing_ticket"  # the prefill engine has no standing offer (yet)
    CONNECTOR = "connector"  # the engines' connector knows no other
    MULTI = "multi"  # several prompts or answers: one transfer id names one prompt
    NO_TICKET = "no_ticket"  # the prefill engine offered nothing
    API = "api"  # nothing to hand over: it is not a completion


MODES: tuple[tuple[Mode, RoutingReason], ...] = (
    (Mode.PUSH, RoutingReason.DEFAULT),
    (Mode.PULL, RoutingReason.FORCED),
    (Mode.PULL, RoutingReason.SHORT),
    (Mode.PULL, RoutingReason.NO_STANDING_TICKET),
    (Mode.PULL, RoutingReason.CONNECTOR),
    (Mode.BOOTSTRAP, RoutingReason.DEFAULT),
    (Mode.PLAIN, RoutingReason.MULTI),
    (Mode.PLAIN, RoutingReason.NO_TICKET),
    (Mode.PLAIN, RoutingReason.API),
)
"""All that happens."""

CacheHits = Mapping[Role, Mapping[Target, CacheHit]]
"""What targets have cached of a prompt; a role is missing where nothing is known."""


class TargetChoice(NamedTuple):
    """Where a leg runs, and why there.

    Attributes:
        tokens: of the prompt that it has to compute or receive.
        hit: of the prompt that it is expected to have.
    """

    target: Target
    why: RankingReason
    tokens: int = 0
    hit: int = 0


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


@dataclass
class FailedTargets:
    """What one request's attempts have shown so far: engines not to try (again)."""

    prefill: set[int] = field(default_factory=set)
    decode: set[int] = field(default_factory=set)
    handoff_failed: bool = False

    def add_unserved(self, view: FleetView, choice: RoutingChoice) -> bool:
        """An engine has no such path; return whether it may be another's. Those with the same
        models have the same paths."""
        models = {w.index: w.models for w in view.decode}
        mine = models.get(choice.decode.target.worker)
        self.decode.update(index for index, theirs in models.items() if theirs == mine)
        return bool(models.keys() - self.decode)

    def add(self, choice: RoutingChoice, role: Role, cause: Cause) -> bool:
        """An attempt failed; return whether another may fare better.

        A decode engine that answers with an error may have lost its hand-off, so once another
        prefill engine is tried. The same error without a hand-off, or again, is the answer.
        """
        if role is Role.DECODE and cause == "unreachable":
            self.decode.add(choice.decode.target.worker)
            return True
        if choice.prefill is None:
            return False
        self.prefill.add(choice.prefill.target.worker)
        again = role is Role.PREFILL or not self.handoff_failed
        self.handoff_failed = self.handoff_failed or role is Role.DECODE
        return again


class RoutingRequest(NamedTuple):
    """One request, as far as it decides where it goes.

    Attributes:
        turn: counts requests, and attempts of one request.
        draw: a random number of at least 0 and less than 1.
        session: what the client calls a run of requests; empty if nothing.
        api: what it asks for.
        keep: the decode engine of an earlier attempt, to be taken again if it can be.
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
    """Return where the request goes; None if no engine is left of a role that it needs."""
    decode = _available(view.decode, failed.decode, request)
    if request.api.decode_only and decode:
        target_choice = _choose_target(options.decode_policy, decode, request, Role.DECODE, options)
        return RoutingChoice(Mode.PLAIN, RoutingReason.API, None, target_choice)
    decode_only = (
        [] if request.prompt.single else [w for w in decode if w.engine is not Engine.SGLANG]
    )
    if decode_only:
        target_choice = _choose_target(
            options.decode_policy, decode_only, request, Role.DECODE, options
        )
        return RoutingChoice(Mode.PLAIN, RoutingReason.MULTI, None, target_choice)
    if request.prompt.sampled or request.api.decode_only:
        return None
    group = _best_group(
        view, _available(view.prefill, failed.prefill, request), decode, request.turn
    )
    if group is None:
        return None
    kept = [worker for worker in group.decode if worker.index == request.keep]
    request = request._replace(turn=group.turn)
    prefill_choice = _choose_target(
        options.prefill_policy, group.prefill, request, Role.PREFILL, options
    )
    decode_choice = _choose_target(
        options.decode_policy, kept or group.decode, request, Role.DECODE, options
    )
    prefill = next(
        worker for worker in group.prefill if worker.index == prefill_choice.target.worker
    )
    standing_ticket = prefill.standing_ticket(prefill_choice.target.rank)
    mode, reason = _handover_mode(prefill.engine, standing_ticket, request.prompt, options)
    return RoutingChoice(
        mode,
        reason,
        prefill_choice,
        decode_choice,
        (standing_ticket or "") if mode is Mode.PUSH else "",
    )


class Unserved(KVConnectError):
    """Every engine has said what it serves, and none serves this."""


def explain_no_choice(view: FleetView, request: RoutingRequest) -> str:
    """Say why :func:`choose` found nothing at first.

    Raises:
        Unserved: no engine serves it, up or not.
        Refused: no engine that serves it could take it, up or not.
    """
    sides = {Role.PREFILL: view.prefill, Role.DECODE: view.decode}
    if request.api.decode_only:
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
    if request.prompt.sampled:
        if all(worker.engine is Engine.SGLANG for worker in _serving(view.decode, request)):
            fix = "send the request without n, once for each answer"
            raise Refused("n", f"SGLang hands over one answer to a prompt: {fix}")
        return "no decode engine of vLLM is up, and n needs one"
    return "no prefill and decode engine that are up can hand over: engine or version differ"


class _PairedEngines(NamedTuple):
    """Engines that all pair with one another, and the turn among them."""

    prefill: list[WorkerView]
    decode: list[WorkerView]
    turn: int


def _available(
    workers: Sequence[WorkerView], failed: Collection[int], request: RoutingRequest
) -> list[WorkerView]:
    found = [w for w in _serving(workers, request) if w.up and w.index not in failed]
    return [w for w in found if w.trusted] or found


def _serving(workers: Sequence[WorkerView], request: RoutingRequest) -> list[WorkerView]:
    """Return those that serve what is asked for, up or not."""
    found = [w for w in workers if w.serves(request.prompt.model)]
    return [w for w in found if w.engine in request.api.engines]


def _best_group(
    view: FleetView, prefill: list[WorkerView], decode: list[WorkerView], turn: int
) -> _PairedEngines | None:
    """Return engines that pair: if there are any, of those that probes have proven."""
    proven = [w for w in prefill if w.proven], [w for w in decode if w.proven]
    return (
        _group(*proven, view.broken, turn)
        or _group(prefill, decode, view.broken, turn)
        or _group(prefill, decode, (), turn)
    )


def _group(
    prefill: list[WorkerView],
    decode: list[WorkerView],
    broken: Collection[tuple[int, int]],
    turn: int,
) -> _PairedEngines | None:
    """Return engines that pair. While a fleet is upgraded, requests are shared between old and
    new ones in proportion to the smaller side of each."""
    if not prefill or not decode:
        return None
    first = prefill[0]
    if not broken and all(_identical(first, worker) for worker in (*prefill, *decode)):
        return _PairedEngines(prefill, decode, turn)
    groups: dict[tuple[int, ...], _PairedEngines] = {}
    for worker in prefill:
        partners = [
            other
            for other in decode
            if worker.pairs_with(other) and (worker.index, other.index) not in broken
        ]
        if partners:
            key = tuple(other.index for other in partners)
            groups.setdefault(key, _PairedEngines([], partners, 0)).prefill.append(worker)
    weights = [min(len(group.prefill), len(group.decode)) for group in groups.values()]
    if not weights:
        return None
    cycle, target_choice = divmod(turn, sum(weights))
    for group, weight in zip(groups.values(), weights, strict=True):
        if target_choice < weight:
            return group._replace(turn=cycle * weight + target_choice)
        target_choice -= weight
    raise AssertionError("a turn falls into one group")


def _identical(one: WorkerView, other: WorkerView) -> bool:
    return (
        one.engine is other.engine and one.version == other.version and one.models == other.models
    )


def _choose_target(
    policy: RankingPolicy,
    workers: Sequence[WorkerView],
    request: RoutingRequest,
    role: Role,
    options: RouterOptions,
) -> TargetChoice:
    """Return where one leg goes. Policies that do not look at loads choose an engine first."""
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
    if options.pull:
        return Mode.PULL, RoutingReason.FORCED
    if prompt.tokens < options.push_min_tokens:
        return Mode.PULL, RoutingReason.SHORT
    if standing_ticket is None:
        return Mode.PULL, RoutingReason.NO_STANDING_TICKET
    return Mode.PUSH, RoutingReason.DEFAULT
