"""Chooses the engines and ranks of a request, and how KV is handed over. Pure.

Prefill and decode are chosen together: only engines that can use each other's KV make a pair.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple

from kvconnect.router.policy.block_sources import source_ticket
from kvconnect.router.policy.expected_ttft import (
    Disaggregate,
    ExpectedTtft,
    HandoffDecision,
    HandoffReason,
    PromptHandoff,
    WaitingPrompt,
    expected_ttft,
)
from kvconnect.router.policy.fleet_view import EngineKind, EngineView, FleetView, Role, Target
from kvconnect.router.policy.paired_engines import PairedEngines, best_group
from kvconnect.router.policy.prefixes import CacheHit, CacheHits
from kvconnect.router.policy.ranking import (
    Candidate,
    RankingJob,
    RankingPolicy,
    RankingReason,
    candidates_of,
    pick,
)
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.policy.serving import available
from kvconnect.router.policy.target_choice import TargetChoice

Cause = Literal["unreachable", "lost", "error"]
"""Why a request to an engine failed: no connection or a broken one, or an error response."""


class Mode(StrEnum):
    """How KV gets from prefill to decode."""

    PUSH = "push"  # both engines get the request at once
    PULL = "pull"  # decode gets the request after prefill has answered
    BOOTSTRAP = "bootstrap"  # both at once; SGLang engines find each other by room
    PLAIN = "plain"  # decode serves the request alone


class RoutingReason(StrEnum):
    """Why a mode was chosen."""

    DEFAULT = "default"
    FORCED = "forced"  # --pull
    SHORT = "short"  # under --push-min-tokens
    NO_STANDING_TICKET = "no_standing_ticket"  # the prefill engine has no valid standing ticket
    CONNECTOR = "connector"  # the engines' connector supports no other mode
    PUSH_FAILED = "push_failed"  # decode failed in push mode: the prompts may differ
    MULTI = "multi"  # several prompts or answers, or log probabilities of the prompt
    NO_TICKET = "no_ticket"  # the prefill engine offered no hand-off
    API = "api"  # not a completion: there is nothing to hand over
    UNIFIED = "unified"  # --unified
    ALONE = "alone"  # --disaggregate, or the client, says that nothing is handed off
    SOONER = "sooner"  # decode alone is expected to be sooner
    NO_HANDOFF = "no_handoff"  # no pair of engines is left that can hand off
    DRAINED = "drained"  # a stream leaves an engine that is drained, or stays as it must


MODES: tuple[tuple[Mode, RoutingReason], ...] = (
    (Mode.PUSH, RoutingReason.DEFAULT),
    (Mode.PULL, RoutingReason.FORCED),
    (Mode.PULL, RoutingReason.SHORT),
    (Mode.PULL, RoutingReason.NO_STANDING_TICKET),
    (Mode.PULL, RoutingReason.CONNECTOR),
    (Mode.PULL, RoutingReason.PUSH_FAILED),
    (Mode.PULL, RoutingReason.DRAINED),
    (Mode.BOOTSTRAP, RoutingReason.DEFAULT),
    (Mode.PLAIN, RoutingReason.MULTI),
    (Mode.PLAIN, RoutingReason.NO_TICKET),
    (Mode.PLAIN, RoutingReason.API),
    (Mode.PLAIN, RoutingReason.UNIFIED),
    (Mode.PLAIN, RoutingReason.ALONE),
    (Mode.PLAIN, RoutingReason.SOONER),
    (Mode.PLAIN, RoutingReason.NO_HANDOFF),
    (Mode.PLAIN, RoutingReason.DRAINED),
)
"""Every (mode, reason) pair that the router can report."""


class RoutingChoice(NamedTuple):
    """Where both requests go, and how KV gets from one engine to the other.

    Attributes:
        prefill: None for a request that the decode engine serves alone.
        standing_ticket: the prefill engine's; empty unless the mode is push.
        handoff: whether the prompt is handed off, and why; None: it never could be.
        prefill_role: whose numbers ``prefill`` has: decode's if a drained engine hands off.
    """

    mode: Mode
    reason: RoutingReason
    prefill: TargetChoice | None
    decode: TargetChoice
    standing_ticket: str = ""
    handoff: HandoffDecision | None = None
    prefill_role: Role = Role.PREFILL

    @property
    def targets(self) -> dict[Role, Target]:
        """The chosen targets, by the role whose numbers they have."""
        prefill = {} if self.prefill is None else {self.prefill_role: self.prefill.target}
        return {**prefill, Role.DECODE: self.decode.target}


@dataclass
class FailedTargets:
    """Engines that a request's next attempts avoid, by number. ``pushed``: prefill engine of a push
    or bootstrap that failed. The next attempt is no push, and takes it if no other is left."""

    prefill: set[int] = field(default_factory=set)
    decode: set[int] = field(default_factory=set)
    handoff_failed: bool = False
    pushed: int | None = None

    def add_unserved(self, view: FleetView, choice: RoutingChoice) -> bool:
        """Exclude all decode engines with the models of one that lacks the path; return whether
        others are left."""
        models = {engine.index: engine.models for engine in view.decode}
        mine = models.get(choice.decode.target.engine)
        self.decode.update(index for index, theirs in models.items() if theirs == mine)
        return bool(models.keys() - self.decode)

    def add(self, choice: RoutingChoice, role: Role, cause: Cause) -> bool:
        """Record a failed attempt; return whether another attempt may succeed.

        A decode engine's error may come from its hand-off: one more is tried, after push by pull.
        The same error again, or without a hand-off, is final. SGLang's prefill server reports the
        end of its decode server as an error, too.
        """
        if role is Role.DECODE and cause in ("unreachable", "lost"):
            self.decode.add(choice.decode.target.engine)
            return True
        if choice.prefill is None:
            return False
        handoff = role is Role.DECODE or (choice.mode is Mode.BOOTSTRAP and cause == "error")
        if handoff and choice.mode is not Mode.PULL and not self.handoff_failed:
            self.pushed = choice.prefill.target.engine
        else:
            self.prefill.add(choice.prefill.target.engine)
        again = role is Role.PREFILL or not self.handoff_failed
        self.handoff_failed = self.handoff_failed or handoff
        return again


class RoutedRequest(NamedTuple):
    """A request as policies see it.

    Attributes:
        turn: number of the request, plus its attempts so far.
        tokens: length of all its prompts together.
        model: name of the model; empty: any.
        single: one prompt with one answer and no log probabilities of the prompt.
        sampled: several answers per prompt; SGLang has only one room for all of them.
        kinds: kinds of engines that can serve it.
        decode_only: one decode engine serves it alone, without a hand-off.
        draw: a random number, at least 0 and less than 1.
        session: the client's name for a series of requests; may be empty.
        hits: cached prompt tokens by role and target.
        keep, warm: decode and prefill engine of an earlier attempt, preferred if available.
        disaggregate: what the client may ask for, and has; None: the operator's rule.
    """

    turn: int
    tokens: int = 0
    model: str = ""
    single: bool = True
    sampled: bool = False
    kinds: Collection[EngineKind] = tuple(EngineKind)
    decode_only: bool = False
    draw: float = 0.0
    session: str = ""
    hits: CacheHits = MappingProxyType({})
    keep: int | None = None
    disaggregate: Disaggregate | None = None
    warm: int | None = None


def choose(
    view: FleetView, request: RoutedRequest, failed: FailedTargets, rules: RoutingRules
) -> RoutingChoice | None:
    """Return where the request goes; None if a role that it needs has no engine left."""
    decode = available(view.decode, failed.decode, request.model, request.kinds)
    alone = request.decode_only or view.unified
    if alone and decode:
        reason = RoutingReason.API if request.decode_only else RoutingReason.UNIFIED
        found = choose_target(decode, request, Role.DECODE, rules)
        found = _with_source(view, request, failed, Role.DECODE, found)
        return RoutingChoice(Mode.PLAIN, reason, None, found)
    several = [] if request.single else [e for e in decode if e.kind is not EngineKind.SGLANG]
    if several:
        found = choose_target(several, request, Role.DECODE, rules)
        return RoutingChoice(Mode.PLAIN, RoutingReason.MULTI, None, found)
    if alone or request.sampled:
        return None
    prefill = available(view.prefill, failed.prefill, request.model, request.kinds)
    others = prefill if failed.pushed is None else [e for e in prefill if e.index != failed.pushed]
    group = best_group(view, others, decode, request.turn)
    group = group or best_group(view, prefill, decode, request.turn)
    pair = None if group is None else _choose_pair(group, request, failed, rules)
    if pair is not None and pair.prefill is not None:
        computing = _with_source(view, request, failed, Role.PREFILL, pair.prefill)
        pair = pair._replace(prefill=computing)
    return _choose_way(view, request, failed, rules, decode, pair)


def _choose_way(
    view: FleetView,
    request: RoutedRequest,
    failed: FailedTargets,
    rules: RoutingRules,
    decode: Sequence[EngineView],
    pair: RoutingChoice | None,
) -> RoutingChoice | None:
    """Return the pair, or decode alone. ``decode``: the engines that could serve alone."""
    rule = rules.disaggregation(request.disaggregate)
    why = HandoffReason.RULE if request.disaggregate is None else HandoffReason.ASKED
    if rule is not Disaggregate.ALWAYS:
        decode = [engine for engine in decode if engine.kind is not EngineKind.SGLANG]
        if not decode:
            rule, why = Disaggregate.ALWAYS, HandoffReason.ENGINE
    if rule is Disaggregate.ALWAYS:
        return pair and pair._replace(handoff=HandoffDecision(True, why))
    kept = [engine for engine in decode if engine.index == request.keep]
    found = choose_target(kept or decode, request, Role.DECODE, rules)
    found = _with_source(view, request, failed, Role.DECODE, found)
    alone = RoutingChoice(Mode.PLAIN, RoutingReason.ALONE, None, found)
    if rule is Disaggregate.NEVER:
        return alone._replace(handoff=HandoffDecision(False, why))
    engines = None if failed.handoff_failed else _proper_pair(view, pair)
    if pair is None or engines is None:
        made = HandoffDecision(False, HandoffReason.NO_HANDOFF)
        return alone._replace(reason=RoutingReason.NO_HANDOFF, handoff=made)
    expected = _expected(view, pair, engines, found)
    if expected is None:
        return pair._replace(handoff=HandoffDecision(True, HandoffReason.NO_DATA))
    made = HandoffDecision(not expected.alone, HandoffReason.SOONER, expected)
    if expected.alone:
        return alone._replace(reason=RoutingReason.SOONER, handoff=made)
    return pair._replace(handoff=made)


def _proper_pair(
    view: FleetView, pair: RoutingChoice | None
) -> tuple[EngineView, EngineView] | None:
    """Return both engines of a pair; None if they are one server, or their last probe failed: such
    two are chosen only where there are no others."""
    if pair is None or pair.prefill is None:
        return None
    places = pair.prefill.target.engine, pair.decode.target.engine
    prefill = next(engine for engine in view.prefill if engine.index == places[0])
    decode = next(engine for engine in view.decode if engine.index == places[1])
    return None if prefill.is_same(decode) or places in view.broken else (prefill, decode)


def _expected(
    view: FleetView,
    pair: RoutingChoice,
    engines: tuple[EngineView, EngineView],
    alone: TargetChoice,
) -> ExpectedTtft | None:
    assert pair.prefill is not None, "a hand-off has a prefill engine"
    prefill, decode = engines
    times = decode.times
    handoff = PromptHandoff(
        _waiting(prefill, pair.prefill),
        times.compute,
        times.waiting(pair.decode.target.rank),
        times.arrival.get(pair.mode),
        pair.decode.tokens,
    )
    by_index = {engine.index: engine for engine in view.decode}
    return expected_ttft(handoff, _waiting(by_index[alone.target.engine], alone))


def _waiting(engine: EngineView, chosen: TargetChoice) -> WaitingPrompt:
    waiting = engine.times.waiting(chosen.target.rank)
    return WaitingPrompt(engine.times.compute, waiting, chosen.work_tokens)


def _choose_pair(
    group: PairedEngines, request: RoutedRequest, failed: FailedTargets, rules: RoutingRules
) -> RoutingChoice:
    """Return the choice among engines that all pair with one another."""
    kept = [] if request.keep is None else [e for e in group.decode if e.index == request.keep]
    if kept:
        others = [engine for engine in group.prefill if not engine.is_same(kept[0])]
        group = group._replace(prefill=others or group.prefill)
    if group.turn != request.turn:  # there are several groups
        request = request._replace(turn=group.turn)
    warm = [] if request.warm is None else [e for e in group.prefill if e.index == request.warm]
    prefill = choose_target(warm or group.prefill, request, Role.PREFILL, rules)
    engine = next(e for e in group.prefill if e.index == prefill.target.engine)
    partners = [e for e in kept or group.decode if not engine.is_same(e)] or group.decode
    decode = choose_target(partners, request, Role.DECODE, rules)
    standing_ticket = engine.standing_ticket(prefill.target.rank)
    mode, reason = _handover_mode(engine.kind, standing_ticket, request.tokens, rules)
    if mode is Mode.PUSH and failed.pushed is not None:
        mode, reason = Mode.PULL, RoutingReason.PUSH_FAILED
    ticket = (standing_ticket or "") if mode is Mode.PUSH else ""
    return RoutingChoice(mode, reason, prefill, decode, ticket)


def choose_target(
    engines: Sequence[EngineView], request: RoutedRequest, role: Role, rules: RoutingRules
) -> TargetChoice:
    """Return the target for one role. Policies that ignore loads choose an engine first."""
    hits = request.hits.get(role, {})
    if len(engines) == 1 and len(engines[0].targets) == 1 and not hits:
        return TargetChoice(engines[0].targets[0][0], RankingReason.ONLY, request.tokens)
    policy = rules.ranking(role)
    draw = request.draw if role is Role.PREFILL else request.draw * 2**20 % 1.0
    job = RankingJob(request.tokens, request.turn, draw, request.session)
    if policy in (RankingPolicy.ROUND_ROBIN, RankingPolicy.RANDOM):
        places = [Candidate(Target(at), engine.ranks[0]) for at, engine in enumerate(engines)]
        picked = pick(policy, places, job)
        engine = engines[picked.candidate.target.engine]
        job = job._replace(turn=job.turn // len(engines))
        found = pick(rules.within, candidates_of([engine], hits), job)._replace(why=picked.why)
    else:
        found = pick(policy, candidates_of(engines, hits), job)
    target = found.candidate.target
    hit = hits.get(target, CacheHit())
    tokens, loading = max(0, request.tokens - hit.tokens), round(hit.tokens - hit.worth)
    return TargetChoice(target, found.why, tokens, hit.tokens, loading=loading)


def _with_source(
    view: FleetView,
    request: RoutedRequest,
    failed: FailedTargets,
    role: Role,
    chosen: TargetChoice,
) -> TargetChoice:
    """Return the choice with the engine to read the prompt's blocks from, if there is one."""
    engines_of_role = view.prefill if role is Role.PREFILL else view.decode
    own = next(e for e in engines_of_role if e.index == chosen.target.engine)
    if own.share_ticket(chosen.target.rank) is None or not any(request.hits.values()):
        return chosen  # an engine without a ticket reads from none
    engines = {
        Role.PREFILL: available(view.prefill, failed.prefill, request.model, request.kinds),
        Role.DECODE: available(view.decode, failed.decode, request.model, request.kinds),
    }
    return chosen._replace(source=source_ticket(engines, request.hits, own, chosen.hit))


def _handover_mode(
    kind: EngineKind, standing_ticket: str | None, tokens: int, rules: RoutingRules
) -> tuple[Mode, RoutingReason]:
    if kind is EngineKind.SGLANG:
        return Mode.BOOTSTRAP, RoutingReason.DEFAULT
    if kind is not EngineKind.VLLM:
        return Mode.PULL, RoutingReason.CONNECTOR
    if rules.pull:
        return Mode.PULL, RoutingReason.FORCED
    if tokens < rules.push_min_tokens:
        return Mode.PULL, RoutingReason.SHORT
    if standing_ticket is None:
        return Mode.PULL, RoutingReason.NO_STANDING_TICKET
    return Mode.PUSH, RoutingReason.DEFAULT
