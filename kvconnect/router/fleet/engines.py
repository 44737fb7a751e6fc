"""State of the engines behind the router. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, Protocol

from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.router.connections.engine_connection import BaseUrl
from kvconnect.router.engine_spec import EngineSpec
from kvconnect.router.fleet.pairing import EnginePair, Pairing
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.choice import RoutingChoice
from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.fleet_view import EngineKind, EngineView, FleetView, Role
from kvconnect.router.policy.loads import Loads
from kvconnect.router.policy.prompt_times import NOTHING_KNOWN, PromptTimer
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests.engine_bodies import EngineTicket, TicketKind

logger = logging.getLogger(__name__)

STALE_REPORTS = 10  # intervals after which a load report is ignored
_LEAST_STALE_S = 5.0  # lower bound of that time: a busy engine may report late
FAILURES = 3  # failed requests in a row after which an engine only gets trials
PAUSE_MOST_S = 30.0  # longest pause between trials


def engine_breaker(since: float = 0.0) -> CircuitBreaker:
    """Return the breaker of an engine: its health check may pass while every request fails."""
    return CircuitBreaker(FAILURES, PAUSE_MOST_S, since=since)


@dataclass
class EngineInfo:
    """What an engine reports about itself; refreshed when it is back after it was down.

    Attributes:
        models: name -> entry of ``/v1/models``; kept while it is down.
        confirmed: it has told them since it came up.
        version: version of the engine; empty: unknown.
        engine_ids: rank -> engine id; MooncakeConnector only.
    """

    models: dict[str, Any] = field(default_factory=dict)
    confirmed: bool = False
    version: str = ""
    engine_ids: dict[int, str] = field(default_factory=dict)
    _names: tuple[dict[str, Any], frozenset[str]] | None = None  # of these models

    @property
    def names(self) -> frozenset[str]:
        """Names of the models. A change is a new mapping of them."""
        if self._names is None or self._names[0] is not self.models:
            self._names = self.models, frozenset(self.models)
        return self._names[1]


class _ValidTickets(NamedTuple):
    """The tickets of one kind that are valid, by rank, until one of them expires."""

    texts: tuple[str | None, ...]
    until: float


class Signals:
    """Events of one engine that background tasks wait for."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.down = asyncio.Event()
        self.suspected = asyncio.Event()
        self.down.set()


class Engine:
    """One engine. It is down until a probe passes. ``loads`` and ``timer`` are those of its server,
    which may be an engine of the other role too."""

    def __init__(
        self,
        role: Role,
        index: int,
        spec: EngineSpec,
        loads: Loads,
        changed: Callable[[Engine], None],
        timer: PromptTimer,
    ) -> None:
        self.role = role
        self.index = index
        self.spec = spec
        self.base = BaseUrl.of(spec.url)
        self.loads = loads
        self.timer = timer
        self.info = EngineInfo()
        self.draining = False
        self._told: set[Callable[[], None]] = set()
        self.open = 0  # requests in progress, or announced by awaited()
        self.breaker = engine_breaker()
        self.signals = Signals()
        # (kind, rank) -> text, expiry time
        self._tickets: dict[tuple[TicketKind, int], tuple[str, float]] = {}
        self._valid: dict[TicketKind, _ValidTickets] = {}  # until one is held or expires
        self._changed = changed
        self._view: EngineView | None = None
        self._viewed: tuple[object, ...] = ()  # what the view was made of

    @property
    def url(self) -> str:
        """Base URL, also the name of the engine."""
        return self.spec.url

    @property
    def native(self) -> bool:
        """Whether the engine is SGLang."""
        return self.spec.kind is EngineKind.SGLANG

    @property
    def up(self) -> bool:
        """Whether the engine answers."""
        return self.signals.up.is_set()

    def view(self, now: float, *, proven: bool, timed: bool = True) -> EngineView:
        """Return the engine as policies see it. A request needs all engines of a fleet, most of
        which have not changed since the last one. ``timed``: with what its prompts took, which few
        decisions depend on, and which changes with every prompt."""
        up, draining, ranks = self.up, self.draining, self.loads.at(now)
        standing = self._tickets_of(TicketKind.STANDING, len(ranks), now)
        share = self._tickets_of(TicketKind.SHARE, len(ranks), now)
        models, version = self.info.names, self.spec.version or self.info.version
        trusted = self.breaker.closed or self.breaker.allows(now)  # the latter takes a lock
        times = self.timer.at(now) if timed else NOTHING_KNOWN
        known = models, self.info.confirmed, version
        parts = (up, draining, ranks, standing, share, known, trusted, proven, times)
        if self._view is None or parts != self._viewed:
            self._viewed = parts
            self._view = EngineView(
                index=self.index,
                up=up and not draining,
                drained=up and draining,
                ranks=ranks,
                standing_tickets=standing,
                kind=self.spec.kind,
                models=models,
                version=version,
                name=self.url,
                trusted=trusted,
                proven=proven,
                share_tickets=share,
                times=times,
                confirmed=self.info.confirmed,
            )
        return self._view

    def mark(self, *, up: bool, forget_loads: bool = True) -> None:
        """Set whether the engine is up; drop what a restart invalidates."""
        if up == self.up:
            return
        logger.info("%s engine %s is %s", self.role.value, self.url, "up" if up else "down")
        if up:
            self.breaker = engine_breaker(time.monotonic())  # it may have restarted
            self.signals.down.clear()
            self.signals.up.set()
        else:
            self._tickets.clear()  # it may come back restarted
            # A new object, as one who asks now may still get the former server's answer.
            self.info = replace(self.info, confirmed=False, version="")
            if forget_loads:
                self.loads.forget()
            self.signals.up.clear()
            self.signals.down.set()
            self.suspect()
        self._changed(self)

    def drain(self) -> None:
        """Send no more requests to the engine, and tell those in :meth:`told_of_drain`."""
        if not self.draining:
            self.draining = True
            for tell in tuple(self._told):
                tell()

    @contextmanager
    def told_of_drain(self, tell: Callable[[], None]) -> Iterator[None]:
        """Have ``tell`` called if the engine is drained during the block, at once if it is."""
        self._told.add(tell)
        try:
            if self.draining:
                tell()
            yield
        finally:
            self._told.discard(tell)

    def suspect(self) -> None:
        """Have the engine's health probed at once."""
        self.signals.suspected.set()

    def began(self, chosen: TargetChoice, now: float) -> None:
        """Count a request that starts."""
        self.open += 1
        self.loads.begin(chosen.target.rank, chosen.load_tokens, now)
        self.breaker.begin(now)

    def computed(self, chosen: TargetChoice) -> None:
        """Count a request whose answer is on its way: its tokens are no load any more."""
        self.loads.end(chosen.target.rank, chosen.load_tokens)

    def ended(self, chosen: TargetChoice, *, computed: bool) -> None:
        """Count a request that ended. ``computed``: :meth:`computed` was called."""
        self.open -= 1
        if not computed:
            self.loads.end(chosen.target.rank, chosen.load_tokens)

    @contextmanager
    def awaited(self, chosen: TargetChoice | None = None) -> Iterator[None]:
        """Count a request that may be sent after the block, so the engine is not seen as idle.
        ``chosen``: it will be sent there, so it is a load already."""
        self.open += 1
        if chosen is not None:
            now = time.monotonic()
            self.loads.begin(chosen.target.rank, chosen.load_tokens, now)
            self.breaker.begin(now)
        try:
            yield
        finally:
            self.open -= 1
            if chosen is not None:
                self.loads.end(chosen.target.rank, chosen.load_tokens)

    def hold_ticket(self, kind: TicketKind, rank: int, ticket: EngineTicket, asked: float) -> None:
        """Keep a ticket requested at time ``asked``, unless the engine is down."""
        if self.up:
            self._tickets[kind, rank] = ticket.text, asked + ticket.lifetime_s
            self._valid.clear()

    def _tickets_of(self, kind: TicketKind, ranks: int, now: float) -> tuple[str | None, ...]:
        """Return the valid tickets by rank."""
        if not self._tickets:
            return ()
        valid = self._valid.get(kind)
        if valid is None or len(valid.texts) != ranks or now >= valid.until:
            held = [self._tickets.get((kind, rank), ("", 0.0)) for rank in range(ranks)]
            texts = tuple(text if now < ends else None for text, ends in held)
            until = min((ends for _, ends in held if now < ends), default=inf)
            valid = self._valid[kind] = _ValidTickets(texts, until)
        return valid.texts


class FleetObserver(Protocol):
    """Callbacks for changes in the fleet."""

    def up(self, engine: Engine) -> None:
        """An engine went up or down."""

    def add_engine(self, role: Role, url: str) -> None:
        """An engine was added."""

    def remove_engine(self, role: Role, url: str) -> None:
        """The last engine of a role at a URL was removed."""


class Fleet:
    """All engines of one router, by role and number. ``unified``: prefill engines have no use."""

    def __init__(self, options: RouterOptions, observer: FleetObserver) -> None:
        self._stale_s = max(_LEAST_STALE_S, STALE_REPORTS * options.intervals.load_s)
        self._observer = observer
        self.unified = options.handoff == "none"
        self._alone = options.disaggregate is not Disaggregate.ALWAYS
        self.pairing = Pairing(options.intervals.probe_s)
        self._numbers = dict.fromkeys(Role, 0)
        self._by_role: dict[Role, dict[int, Engine]] = {role: {} for role in Role}
        for role, specs in ((Role.PREFILL, options.prefill), (Role.DECODE, options.decode)):
            for spec in specs:
                self.add(role, spec)

    def add(self, role: Role, spec: EngineSpec) -> Engine:
        """Add an engine. Its number is never reused."""
        index = self._numbers[role]
        self._numbers[role] += 1
        same = next((other for other in self.all() if other.url == spec.url), None)
        loads = same.loads if same else Loads(self._stale_s)
        timer = same.timer if same else PromptTimer()
        engine = Engine(role, index, spec, loads, self._changed, timer)
        self._by_role[role][index] = engine
        self._observer.add_engine(role, spec.url)
        return engine

    def remove(self, engine: Engine) -> None:
        same = [other for other in self.all() if other.url == engine.url and other is not engine]
        engine.mark(up=False, forget_loads=not same)  # observers forget what it was sent
        self._by_role[engine.role].pop(engine.index, None)
        self.pairing.forget((engine.role, engine.index))
        successors = [other for other in same if other.role is engine.role]
        for other in successors:  # observers know engines by URL
            self._observer.up(other)
        if not successors:
            self._observer.remove_engine(engine.role, engine.url)

    def get(self, role: Role, index: int) -> Engine:
        """Return an engine by its number."""
        return self._by_role[role][index]

    def all(self, role: Role | None = None) -> list[Engine]:
        """Return the engines of a role, or of both."""
        roles = list(Role) if role is None else [role]
        return [engine for role in roles for engine in self._by_role[role].values()]

    def is_base(self, model: str) -> bool:
        """Return whether a model is a base model of an engine, not an adapter; true for ""."""
        entries = (engine.info.models.get(model) for engine in self.all())
        return not model or any(isinstance(m, dict) and not m.get("parent") for m in entries)

    def view(self, *, timed: bool = True) -> FleetView:
        """Return all engines as policies see them. ``timed``: as of :meth:`Engine.view`."""
        now = time.monotonic()
        prefill, decode = (
            tuple(
                engine.view(now, proven=self.pairing.proven((role, index)), timed=timed)
                for index, engine in self._by_role[role].items()
            )
            for role in Role
        )
        return FleetView(prefill, decode, self.pairing.broken, self.unified, self._alone)

    def broken(self, engine: Engine) -> dict[str, str]:
        """Return the partners with which an engine's last probe failed: URL -> error."""
        role, index = engine.role, engine.index
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        return {
            self.get(other, dict(pair.engines)[other]).url: why
            for pair, why in self.pairing.broken.items()
            if (role, index) in pair.engines
        }

    def failed_handoffs(self) -> list[dict[str, str]]:
        """Return the pairs of engines whose last probe failed: both URLs, and the error."""
        return [
            {
                **{role.value: self.get(role, index).url for role, index in pair.engines},
                "error": why,
            }
            for pair, why in self.pairing.broken.items()
        ]

    def recheck(self, choice: RoutingChoice) -> None:
        """Have the hand-off between the engines of a failed request probed soon."""
        if choice.prefill is not None and choice.prefill_role is Role.PREFILL:
            pair = EnginePair(choice.prefill.target.engine, choice.decode.target.engine)
            if all(number in self._by_role[role] for role, number in pair.engines):
                self.pairing.recheck(pair)

    def _changed(self, engine: Engine) -> None:
        if not engine.up:
            self.pairing.forget((engine.role, engine.index))
        self._observer.up(engine)
