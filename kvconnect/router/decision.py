"""What the router decides about one request, apart from HTTP: where each attempt goes, what both
engines are asked, and whether another attempt follows a failed one. Pure: any front can use it.

A front makes a :class:`Decision` of a request it has read. For each attempt it takes the engines of
:meth:`Decision.choose`, sends them what :class:`Legs` say, and tells how the attempt failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvconnect.protocol.options import IF_ABLE, RECEIPT
from kvconnect.router.engine_spec import EngineSpec
from kvconnect.router.policy.choice import (
    Cause,
    FailedTargets,
    Mode,
    RoutedRequest,
    RoutingChoice,
    RoutingReason,
    choose,
)
from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.fleet_view import EngineKind, FleetView, Role
from kvconnect.router.policy.leaving import LeftEngine, choose_next, stays
from kvconnect.router.policy.no_choice import explain_no_choice
from kvconnect.router.policy.prefixes import CacheHits
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.apis import Api
from kvconnect.router.requests.body import Body, Prompt, raw_of
from kvconnect.router.requests.engine_bodies import EngineRequest
from kvconnect.router.requests.fields import Permissions, permitted
from kvconnect.router.requests.limits import refuse_beyond_limits
from kvconnect.router.requests.logprobs import (
    needs_own_prompt,
    wants_prompt_logprobs,
    with_prompt_logprobs,
)
from kvconnect.router.requests.request_ids import ClientIds, client_ids, with_request_id
from kvconnect.router.requests.retries import Retries, Withheld, digest_of

NewId = Callable[[], str]
"""Returns 32 hex digits that nobody can guess, others each time."""

_NO_PATH = (404, 405)  # status of an engine that does not serve the path
_UNSET = (b"", b"null", b"false")


class ClientRequest(NamedTuple):
    """One client's request, as a front has read it.

    Attributes:
        turn: number of the request at this router.
        draw: a random number, at least 0 and less than 1.
        session: the client's name for a series of requests; may be empty.
        hits: cached tokens of its prompt, by role and target.
        headers: those of the client that engines get.
        permissions: which of its fields engines get.
        hints: on the prompt's blocks, for engines.
        disaggregate: what the client may ask for, and has; None: the operator's rule.
    """

    api: Api
    body: Body
    prompt: Prompt
    turn: int
    draw: float = 0.0
    session: str = ""
    hits: CacheHits = MappingProxyType({})
    headers: Mapping[str, str] = {}
    permissions: Permissions = Permissions()
    hints: Mapping[str, float] = {}
    disaggregate: Disaggregate | None = None


class ChosenEngines(NamedTuple):
    """The engines of a choice. ``engine_ids``: of prefill by rank; MooncakeConnector only."""

    decode: EngineSpec
    prefill: EngineSpec | None = None
    engine_ids: Mapping[int, str] = {}


class Retry(NamedTuple):
    """Whether another attempt follows; ``withheld``: why a possible one does not."""

    follows: bool
    withheld: Withheld | None = None


class Decision:
    """Decides about one request. Not thread-safe."""

    def __init__(
        self, request: ClientRequest, rules: RoutingRules, retries: Retries, new_id: NewId
    ) -> None:
        self._request, self._rules, self._retries, self._new_id = request, rules, retries, new_id
        self._client_request = request
        self._routed = _routed(request)
        self._failed = FailedTargets()
        self._losses = 0
        self._left: LeftEngine | None = None  # a drained one, until another stream goes on

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream."""
        return self._request.prompt.streamed

    @property
    def streams_receipt(self) -> bool:
        """Whether the answer is a stream that can have a receipt."""
        api, prompt = self._request.api, self._request.prompt
        openai = not (api.decode_only or api.named_events)
        return openai and prompt.streamed and prompt.single

    @property
    def by_times(self) -> bool:
        """Whether :meth:`choose` depends on what prompts took, which the view then has to tell."""
        rule = self._rules.disaggregation(self._routed.disaggregate)
        return rule is Disaggregate.AUTO

    def refused(self, now: float) -> bool:
        """Return whether the request may reach no engine for a while: it has crashed two."""
        return self._retries.refuses(self._digest, now)

    def choose(self, view: FleetView) -> RoutingChoice | None:
        """Return where the next attempt goes; None if a role that it needs has no engine left."""
        if self._left is not None:
            return choose_next(view, self._left, self._routed, self._failed, self._rules)
        return choose(view, self._routed, self._failed, self._rules)

    def explain(self, view: FleetView) -> str:
        """Return why :meth:`choose` found no engines at the first attempt.

        Raises:
            Unserved: no engine serves it, even among those that are down.
            Refused: no engine can take a request of this form.
        """
        return explain_no_choice(view, self._routed)

    def legs(self, choice: RoutingChoice, engines: ChosenEngines) -> Legs:
        """Return what an attempt asks of its engines.

        Raises:
            Refused: a field of the client's may not reach them.
        """
        return Legs(self._request, choice, engines, self._new_id)

    def rejected(self, view: FleetView, choice: RoutingChoice, status: int) -> bool:
        """Note that an engine rejected the request; return whether another one may serve it: with
        other models, an engine may have paths that this one does not have."""
        if self._left is not None:
            return self._left.failed(choice)
        elsewhere = self._request.api.decode_only and status in _NO_PATH
        return elsewhere and self._failed.add_unserved(view, choice)

    def failed(
        self, choice: RoutingChoice, role: Role, cause: Cause, *, crashed: str, now: float
    ) -> Retry:
        """Note how an attempt failed. ``crashed``: URL of an engine that ended by itself, or ""."""
        if cause == "lost":
            self._losses += 1
            if crashed:
                self.crashed(crashed, now)
            withheld = self._retries.again(self._losses, self._digest, now)
            if withheld is not None:
                return Retry(False, withheld)
        left = self._left
        if left is not None and choice.reason is RoutingReason.DRAINED:
            if role is Role.DECODE and cause != "error":
                self._failed.decode.add(choice.decode.target.engine)
            return Retry(left.failed(choice))
        if not self._failed.add(choice, role, cause):
            return Retry(left is not None and left.failed(choice))
        kept = role is Role.PREFILL and (choice.mode is not Mode.BOOTSTRAP or cause != "error")
        keep = choice.decode.target.engine if kept else None
        self._routed = self._routed._replace(turn=self._routed.turn + 1, keep=keep)
        return Retry(True)

    def crashed(self, engine: str, now: float) -> None:
        """Note that an engine ended by itself while it worked on the request."""
        self._retries.crashed(self._digest(), engine, now)

    def cut(self, choice: RoutingChoice, *, further: bool, now: float) -> Retry:
        """Note that the decode engine was lost in mid-stream. ``further``: the client has got more
        of its answer from it. Further attempts count as those of another request then."""
        if further:
            self._losses = 0
        return self.failed(choice, Role.DECODE, "lost", crashed="", now=now)

    def go_on(self, request: ClientRequest, choice: RoutingChoice, *, drained: bool) -> None:
        """Have the next attempts answer ``request``, the rest of a stream. They prefer the prefill
        engine of a choice, which has the prompt. ``drained``: its decode engine was not lost, but
        is drained, and may hand the stream off."""
        turn, warm = self._routed.turn, self._routed.warm
        if choice.prefill_role is Role.PREFILL:
            warm = None if choice.prefill is None else choice.prefill.target.engine
        self._request, self._routed = request, _routed(request)._replace(turn=turn, warm=warm)
        self._left = LeftEngine(choice.decode.target) if drained else None

    def may_leave(self, view: FleetView, choice: RoutingChoice, request: ClientRequest) -> bool:
        """Return whether the rest of a stream may go on elsewhere than at the decode engine of a
        choice, which is drained. ``request``: as of :meth:`go_on`, or one that is as long."""
        left = LeftEngine(choice.decode.target)
        found = choose_next(view, left, _routed(request), self._failed, self._rules)
        return found is not None and not stays(found)

    def _digest(self) -> bytes:
        return digest_of(self._client_request.api.path, self._client_request.body)


def _routed(request: ClientRequest) -> RoutedRequest:
    api, prompt = request.api, request.prompt
    return RoutedRequest(
        request.turn,
        prompt.tokens,
        prompt.model,
        single=prompt.single and not needs_own_prompt(request.body),
        sampled=prompt.sampled,
        kinds=api.kinds,
        decode_only=api.decode_only,
        draw=request.draw,
        session=request.session,
        hits=request.hits,
        disaggregate=request.disaggregate,
    )


class Legs:
    """What one attempt asks of its engines: :meth:`prefill` if one takes part, and :meth:`decode`.

    In pull mode, prefill's answer goes to :meth:`prefilled` before decode is asked.

    Attributes:
        choice: where the requests go; without a hand-off once prefill has offered none.
        client_ids: what shows the client the ids that it chose; None: it chose none.
        dropped: names of the client's fields that engines do not get.
        merges: the answer needs prefill's too, see :meth:`merged`.
    """

    def __init__(
        self, request: ClientRequest, choice: RoutingChoice, engines: ChosenEngines, new_id: NewId
    ) -> None:
        self.choice = choice
        self.client_ids: ClientIds | None = None
        self._request, self._engines = request, engines
        kind, api = engines.decode.kind, request.api
        body, self.dropped = permitted(kind, api.path, request.body, request.permissions)
        bootstraps, named = choice.mode is Mode.BOOTSTRAP, request.permissions.named
        refuse_beyond_limits(kind, api.path, body, named, handed_over=bootstraps)
        if kind is EngineKind.SGLANG and api.sglang_id:
            # Another id each time: the server may not yet have noticed the end of an attempt.
            made = new_id()
            self.client_ids = client_ids(request.body, api.sglang_id, made)
            body = with_request_id(body, api.sglang_id, made)
        self._prefill_body: Body = {}
        self.merges = False
        if engines.prefill is not None:
            bodies = handoff_bodies(choice, engines.prefill, body, new_id, api.one_token)
            self._prefill_body, body = bodies
            self.merges = bootstraps and wants_prompt_logprobs(api.path, body)
        self._decode_body = body
        self._prefilled = b""

    def prefill(self) -> EngineRequest:
        """Return the request to the prefill engine of the choice."""
        chosen, spec = self.choice.prefill, self._engines.prefill
        assert chosen is not None and spec is not None, "a prefill engine takes part"
        body = self._with_options(spec.kind, self._prefill_body, chosen, receipt=False)
        if self.choice.prefill_role is Role.DECODE:  # nobody has named it for prefill
            body = engine_bodies.options_body(body, {**self._request.hints, IF_ABLE: True})
        if self.choice.mode is Mode.PULL and self._passes_ids():
            body = engine_bodies.token_ids_too(body)
        return self._to(chosen, body)

    def prefilled(self, answer: bytes | None) -> None:
        """Take prefill's whole answer; None: it was a stream, which has no ticket. In pull mode,
        decode then gets the ticket; without one, decode serves the request alone.

        Raises:
            Refused: the answer is not what engines answer.
        """
        chosen, spec = self.choice.prefill, self._engines.prefill
        assert chosen is not None and spec is not None, "a prefill engine takes part"
        ticket = None
        if spec.kind is EngineKind.SGLANG:  # its answer may be a list, and has no ticket
            self._prefilled = answer or b""
        elif answer is not None:
            ticket = engine_bodies.ticket_of(answer, ids=self._passes_ids())
        if self.choice.mode is not Mode.PULL:
            return
        engine_id = self._engines.engine_ids.get(chosen.target.rank or 0)
        ticket = ticket or mooncake_ticket(spec, engine_id, self._prefill_body)
        if ticket is None:
            self.choice = self.choice._replace(mode=Mode.PLAIN, reason=RoutingReason.NO_TICKET)
        else:
            self._decode_body = engine_bodies.pull_body(self._decode_body, ticket)

    def _passes_ids(self) -> bool:
        """Return whether decode gets the prompt's token ids: of these, it has no text to return."""
        wants_text = raw_of(self._prefill_body, "return_prompt_text") not in _UNSET
        return self._request.api.takes_token_ids and not wants_text

    def decode(self, receipt: bool | str, *, ids: bool = False) -> EngineRequest:
        """Return the request to the decode engine. ``receipt``: the response shall say where the
        prompt's KV came from, or the engine's KV events, under this nonce. ``ids``: the response
        shall have token ids."""
        chosen, kind = self.choice.decode, self._engines.decode.kind
        body = engine_bodies.token_ids_too(self._decode_body) if ids else self._decode_body
        return self._to(chosen, self._with_options(kind, body, chosen, receipt=receipt))

    def merged(self, answer: bytes) -> bytes:
        """Return decode's whole answer with what only prefill's has.

        Raises:
            Refused: an answer is not what SGLang answers.
        """
        return with_prompt_logprobs(answer, self._prefilled)

    def _with_options(
        self, kind: EngineKind, body: Body, chosen: TargetChoice, *, receipt: bool | str
    ) -> Body:
        """Return a body for an engine with hints on its prompt's blocks and their source, and the
        wish for a receipt, where the engine takes them."""
        api = self._request.api
        if kind is EngineKind.VLLM and not api.decode_only:
            options = {**self._request.hints, **chosen.options}
            return engine_bodies.options_body(
                body, {**options, RECEIPT: receipt} if receipt else options
            )
        if kind is EngineKind.SGLANG and receipt and api.cached_details:
            return engine_bodies.cached_details_body(body)
        return body

    def _to(self, chosen: TargetChoice, body: Body) -> EngineRequest:
        headers = dict(self._request.headers)
        if chosen.target.rank is not None:
            headers[engine_bodies.RANK_HEADER] = str(chosen.target.rank)
        api = self._request.api
        raw = engine_bodies.encoded(body) if api.method == "POST" else None
        return EngineRequest(api.method, api.path, headers, raw)


def handoff_bodies(
    choice: RoutingChoice,
    prefill: EngineSpec,
    body: Body,
    new_id: NewId,
    one_token: Mapping[str, Any] = engine_bodies.ONE_TOKEN,
) -> tuple[Body, Body]:
    """Return the bodies for prefill and decode; in pull mode, decode's still lacks the ticket."""
    assert choice.prefill is not None, "a hand-off has a prefill engine"
    if choice.mode is Mode.BOOTSTRAP:
        rank, room = choice.prefill.target.rank, int(new_id(), 16) % engine_bodies.ROOMS
        meeting = engine_bodies.BootstrapRoom(prefill.host, prefill.bootstrap, room, rank)
        return (
            engine_bodies.bootstrap_body(body, meeting, rank),
            engine_bodies.bootstrap_body(body, meeting, choice.decode.target.rank),
        )
    transfer = new_id()
    asked = engine_bodies.prefill_body(body, transfer, one_token)
    if choice.mode is Mode.PUSH:
        return asked, engine_bodies.push_body(body, transfer, choice.standing_ticket)
    return asked, body


def mooncake_ticket(
    prefill: EngineSpec, engine_id: str | None, asked: Body
) -> dict[str, Any] | None:
    """Return the ticket of vLLM's MooncakeConnector, whose responses have none; else None."""
    if prefill.kind is not EngineKind.MOONCAKE or engine_id is None:
        return None
    transfer = engine_bodies.transfer_of(asked)
    return engine_bodies.mooncake_ticket(transfer, engine_id, prefill.bootstrap_url)
