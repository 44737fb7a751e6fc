"""Hand-offs in vLLM's scheduler: tickets, leases of offered blocks, and receives."""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvconnect.cache.groups import CacheGroup
from kvconnect.disaggregation.leases import Leases
from kvconnect.disaggregation.limits import HandoffLimits
from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    PrefillSource,
    ReceiveReport,
    TransferEvent,
)
from kvconnect.disaggregation.receives import Receives, SettledReceive
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.adapters import Adapters
from kvconnect.engines.vllm.messages import WorkerHello, endpoints_of
from kvconnect.engines.vllm.shares import ShareTickets
from kvconnect.engines.vllm.states import asks_one_token, drop_last_token
from kvconnect.engines.vllm.tickets import TicketIssuer
from kvconnect.errors import Refused
from kvconnect.protocol.handoff_request import (
    STANDING_TICKET_KEY,
    TICKET_KEY,
    HandoffRequest,
    parse_request,
)
from kvconnect.protocol.options import IF_ABLE, OPTIONS_KEY
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport.security import Keys, NoLocalKey, read_key
from kvconnect.types import NULL_BLOCK, Span, TransferId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class DisaggregationScheduler:
    """The scheduler's part of both roles. Owned by the scheduler's thread.

    Prefill: a request with ``do_remote_decode`` offers its blocks while it computes. They are held
    after its end until a decode engine has them or the lease expires. Decode: a request with
    ``do_remote_prefill`` and a valid ticket waits until its blocks have arrived. Addresses come
    from tickets only, never from other fields of ``kv_transfer_params``.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: Settings,
        groups: Sequence[CacheGroup],
        stats: OffloadingConnectorStats,
        adapters: Adapters,
        numbers: Iterator[int],
    ) -> None:
        self._adapters = adapters
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        self._groups = groups
        self.stats = stats
        self.stands = False  # the engine was paused after its last step
        self._sends: bool = transfer.is_kv_producer and settings.listen != "off"
        self._receives: bool = transfer.is_kv_consumer
        self.greeted = False
        self.alone = False  # no other connector of this engine hands off; set by greet
        # A standing ticket names one engine's workers, but vLLM may route to another engine.
        alone = translate.engines_beside(parallel) == 1 or parallel.data_parallel_external_lb
        try:
            keys = Keys(read_key(settings), settings.key_file)
        except NoLocalKey:
            if transfer.kv_role != "kv_both":
                raise
            keys, self._sends, self._receives = Keys(), False, False  # the workers say why
        self.tickets = TicketIssuer(
            keys,
            -1 if alone else parallel.data_parallel_index,
            settings.lease_s,
            PrefillSource(
                engine_id=transfer.engine_id,
                epoch=secrets.randbits(62),
                endpoints=(),  # known once the workers have reported them
                tp=parallel.tensor_parallel_size,
                pp=parallel.pipeline_parallel_size,
            ),
            ShareTickets(keys, stats),
        )
        limits = HandoffLimits(
            workers=parallel.world_size,
            lease_s=settings.lease_s,
            deadline_s=settings.deadline_s,
        )
        self.leases = Leases(groups, stats, limits)
        self.receives = Receives(groups, stats, limits, numbers)
        # Live requests whose hand-off failed. If one loads again, vLLM 0.32 wants as many free
        # blocks beside its own as the failed load returned; until then all other requests wait.
        self.failed: set[str] = set()
        self._requests: dict[str, Request] = {}  # live ones that offer or receive blocks

    @property
    def epoch(self) -> int:
        """The number of this incarnation of the engine, in tickets and Hellos."""
        return self.tickets.source.epoch

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping: for a hand-off, or until its workers have reported
        their addresses."""
        return self.leases.busy or self.receives.busy or not self.greeted

    def gauges(self, now: float) -> Iterator[tuple[str, float, str | None]]:
        """Yield gauges as (name, value, label)."""
        yield from self.leases.gauges(now)
        yield from self.receives.gauges(now)

    def greet(self, hellos: Mapping[tuple[int, int], WorkerHello], alone: bool) -> None:
        """Take the workers' addresses. ``alone``: this is the engine's only connector."""
        self.greeted, self.alone = True, alone
        endpoints = endpoints_of({place: hello.address for place, hello in hellos.items()})
        self.tickets.source = replace(self.tickets.source, endpoints=endpoints)
        self.tickets.shares.greet(hellos, self.tickets.source)
        self._sends = self._sends and bool(endpoints)
        self._receives = self._receives and all(hello.receives for hello in hellos.values())

    def add_request(self, request: Request, now: float) -> TransferId | None:
        """Handle a new request's ``kv_transfer_params``; return the transfer that it offers to
        other engines, if any."""
        params = request.kv_transfer_params or {}
        self.tickets.shares.add_request(request.request_id, params)
        # Without a key of KVConnect, the parameters may be for another connector.
        ours = self.alone or TICKET_KEY in params or STANDING_TICKET_KEY in params
        try:
            asked = parse_request(params)
            if asked.role == "send" and (self._sends or not _if_able(params)):
                return self._open_lease(request, asked, now)
            if asked.role == "recv" and ours:
                self._open_receive(request, asked)
        except Refused as error:
            if not ours:
                return None
            if request.num_prompt_tokens < 2:
                return None  # a request that vLLM rejected; its hand-off was refused before
            logger.warning("request %s: hand-off refused: %s", request.request_id, error)
            if self._receives and (params.get("do_remote_prefill") or TICKET_KEY in params):
                self.receives.refuse(request.request_id, error.field)
            else:  # an ordinary request
                self.stats.count("handoff_refused", label=error.field)
        return None

    def match(self, request: Request, local_tokens: int) -> int | None:
        """Return how many tokens a hand-off brings beyond ``local_tokens``; None if none is
        pending. The last token is always computed here, to sample from it."""
        if not self.receives.pending(request.request_id):
            return None
        tokens: int = request.num_prompt_tokens - 1 - local_tokens
        if tokens > 0:
            return tokens
        self.decline(request.request_id)
        return None

    def decline(self, req_id: str) -> None:
        """Give up a request's pending hand-off, and tell the prefill engine."""
        if self.receives.pending(req_id):
            self.receives.decline(req_id)

    def after_alloc(
        self, request: Request, blocks: KVCacheBlocks, local_tokens: int, num_external: int
    ) -> None:
        """Plan the receive into the blocks that the engine has allocated."""
        total = local_tokens + num_external
        spans = tuple(
            span
            for number, (group, table) in enumerate(
                zip(self._groups, blocks.get_block_ids(), strict=True)
            )
            if (span := _span(number, group, table, local_tokens, total)) is not None
        )
        self.receives.plan(request.request_id, spans, local_tokens, total, time.monotonic())

    def offer(self, output: SchedulerOutput, now: float) -> list[int]:
        """Offer what this step computes; return blocks to hold from now on."""
        stands, self.stands = self.stands and not output.num_scheduled_tokens, False
        if not self.leases:
            return []
        self.leases.stepped(stands or bool(output.num_scheduled_tokens))
        if stands:
            self.leases.preempted(None, now)
        for req_id in output.preempted_req_ids or ():
            self.leases.preempted(req_id, now)
        state, held = output.kv_connector_block_state, []
        assert state is not None
        for req_id, computed in translate.computed_tokens(output):
            request = self._requests.get(req_id)
            if request is not None:
                table, cached = state.resolve_block_ids(req_id), translate.cached_tokens(request)
                held += self.leases.offer(req_id, computed, table, cached)
        return held

    def take(self, now: float) -> DisaggregationInstructions:
        """Return this step's instructions for the workers."""
        self.leases.tick(now)
        self.receives.tick(now)
        offers, withdrawals = self.leases.take()
        receives, drops, keeps = self.receives.take()
        return DisaggregationInstructions(offers, withdrawals, receives, drops, keeps)

    def on_reports(
        self, reports: Iterable[ReceiveReport], notices: Iterable[TransferEvent], now: float
    ) -> tuple[list[int], list[SettledReceive]]:
        """Take the workers' reports; return the blocks to release, and the receives that ended."""
        ended = []
        for report in reports:
            settled = self.receives.on_report(report, now)
            if settled is None or settled.dropped:
                continue
            if settled.cause is not None:
                self.failed.add(settled.req_id)
            request = self._requests.get(settled.req_id)
            if request is not None and settled.cached is not None:
                translate.report_cached_tokens(request, settled.cached)
            ended.append(settled)
        for notice in notices:
            self.leases.on_notice(notice, now)
        return self.leases.take_released(), ended

    def finish(self, request: Request, now: float) -> dict[str, Any] | None:
        """End a request; return the ``kv_transfer_params`` of its response."""
        req_id = request.request_id
        self.receives.finish(req_id)
        self.failed.discard(req_id)
        self._requests.pop(req_id, None)
        transfer = self.leases.finish(req_id, translate.ended_well(request), now)
        # With states, the prompt has lost its last token already.
        tokens = request.num_prompt_tokens - (not _has_states(self._groups))
        answer = self.tickets.answer(req_id, transfer, tokens, self.alone)
        return self.tickets.shares.finish(req_id, answer)

    def _open_lease(self, request: Request, asked: HandoffRequest, now: float) -> TransferId | None:
        if not self._sends:
            raise Refused(
                "params",
                "this engine does not send: set kv_role to kv_producer or kv_both, or look "
                "into its log for what it lacks",
            )
        if asked.wants_standing_ticket:
            self.tickets.request_standing_ticket(request.request_id, asked.rank)
            return None
        prompt = self._adapters.prompt_identity(request)
        transfer = asked.transfer_id or TransferId(secrets.token_bytes(16))
        tokens = request.num_prompt_tokens - 1  # the decode engine computes the last one
        if tokens and _has_states(self._groups) and not asks_one_token(request):
            raise Refused("params", "this model's states are handed off with max_tokens 1 only")
        if tokens and not self.leases.open(request.request_id, transfer, tokens, now, prompt):
            raise Refused("params", "a live request has the same transfer_id")
        self._requests[request.request_id] = request
        if tokens and _has_states(self._groups):
            drop_last_token(request)
        return transfer if tokens else None

    def _open_receive(self, request: Request, asked: HandoffRequest) -> None:
        if not self._receives:
            raise Refused(
                "params",
                "this engine does not receive: set kv_role to kv_consumer or kv_both, or "
                "look into its log for what it lacks",
            )
        prompt = self._adapters.prompt_identity(request)
        admitted = self.tickets.admit(asked)
        opened = self.receives.open(
            request.request_id, admitted.transfer, admitted.source, admitted.early, prompt
        )
        self._requests[request.request_id] = request
        if opened and request.num_prompt_tokens < 2:  # or rejected by vLLM's front end
            self.decline(request.request_id)


def _if_able(params: Mapping[str, Any]) -> bool:
    """Return whether a request shall be computed as any other one if the engine does not send."""
    options = params.get(OPTIONS_KEY)
    return isinstance(options, dict) and options.get(IF_ABLE) is True


def _has_states(groups: Sequence[CacheGroup]) -> bool:
    return any(group.states for group in groups)


def _span(
    number: int, group: CacheGroup, table: Sequence[int], local_tokens: int, total: int
) -> Span | None:
    """Return the blocks of one group that tokens [local, total) need; None if there are none. The
    state after ``total`` tokens is block 0 of its group."""
    if group.states is not None:
        return Span(number, 0, array("q", [table[group.first_block(total)]]))
    first = max(group.first_block(total), local_tokens // group.block_tokens)
    end = -(-total // group.block_tokens)
    while first < end and table[first] == NULL_BLOCK:
        first += 1
    return Span(number, first, array("q", table[first:end])) if first < end else None
