"""The transfer backend ``kvconnect``: SGLang's prefill/decode hand-off over KVConnect's transports.

SGLang keeps the life cycle of requests, the consensus of ranks, and its bootstrap server, which
tells decode where prefill ranks are. The agent that also serves vLLM replaces ZeroMQ and SGLang's
transfer engines: authenticated connections, destinations resolved by the receiver, digests,
deadlines, and blocks that are reused only when nothing can be written to them any more. The
bootstrap server's ``rank_ip`` and ``rank_port`` are the agents' addresses.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from sglang.srt.disaggregation.base.conn import (
    KVArgs,
    KVPoll,
    KVTransferDestination,
    KVTransferMetric,
)
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.server_args import ServerArgs

from kvconnect.disaggregation.agent import start_agent
from kvconnect.engines.sglang import (
    direct_requests,
    layerwise,
    runtime_context,
    translate,
    weights,
)
from kvconnect.engines.sglang.bootstrap import (
    BootstrapAddresses,
    check_sizes,
    endpoint_of,
    forget_ranks,
)
from kvconnect.engines.sglang.claims import RoomClaims, RoomOwner, contains_errors
from kvconnect.engines.sglang.decode_rooms import DecodeRooms, RoomRequest
from kvconnect.engines.sglang.layerwise import EngineStreams
from kvconnect.engines.sglang.metrics_publisher import publish_regularly
from kvconnect.engines.sglang.prompts import AdapterContents
from kvconnect.engines.sglang.rooms import PrefillRooms, SendRoom
from kvconnect.engines.sglang.tracing import make_spans
from kvconnect.errors import ConfigError, Refused, refusing
from kvconnect.offload.streams import DeviceFence
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity
from kvconnect.settings import Settings
from kvconnect.settings.addresses import listen_address
from kvconnect.transport.base import Fence
from kvconnect.types import Span

logger = logging.getLogger(__name__)

_LAST_PORT = 0xFFFF

# SGLang raises these for a prefill server that does not fit, or whose answer is malformed.
_SGLANG_ERRORS = (
    *(RuntimeError, AssertionError, TypeError, ValueError, LookupError),
    *(AttributeError, ArithmeticError),
)


class FailedRecompute(NamedTuple):
    """A request of decode's whose prompt prefill did not compute again, and why."""

    receiver: KVConnectReceiver
    reason: str


class KVConnectManager(CommonKVManager):
    """One rank's hand-offs. For the scheduler's thread; the agent has threads of its own.

    Raises:
        ConfigError, Incompatible: settings or a model that cannot be served; this ends the
            engine's start.
    """

    supports_deferred_decode_kv_release = True
    overlaps = True  # SGLang makes the next batch while one runs; set at the first request
    compares_media = True  # of a prompt on both servers

    @refusing("this server")
    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:
        settings = runtime_context.own_settings({})
        runtime_context.check(server_args)
        # SGLang reuses the pages of a dropped transfer after a time; it must have ended before.
        limit = runtime_context.quiet_s() - runtime_context.SPARE_S
        settings = msgspec.structs.replace(
            settings,
            deadline_s=min(settings.deadline_s, limit),
            transport=runtime_context.transport(settings.transport, server_args),
        )
        model = runtime_context.model(args, server_args, bool(is_mla_backend))
        self._sends = disaggregation_mode == DisaggregationMode.PREFILL
        self.claims = RoomClaims()
        self.failed_recomputes: deque[FailedRecompute] = deque()
        address = _address(settings) if self._sends else None
        mixes = settings.mix_weights
        own = weights.identity(mixes=mixes)
        cache = translate.describe(args, model, own)
        patience = runtime_context.patience_s()
        self.spans = make_spans()
        traced = self.spans is not None
        self.agent = start_agent(
            settings,
            cache,
            address,
            patience,
            alone=True,
            traced=traced,
            port=runtime_context.PORT,
            reads=not self._sends,
        )
        weights.listen(lambda: self.agent.set_identity(weights.identity(mixes=mixes)))
        self.streams = EngineStreams(cache.device)
        self.adapters = AdapterContents()
        self.compares_media = runtime_context.compares_media(server_args)
        direct_requests.install(conn)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # SGLang's own frames have no authentication
        kinds = [(group.block_tokens, group.kv_heads) for group in cache.hello.groups]
        if self._sends:
            heads = [kv_heads for _, kv_heads in kinds]
            self.prefill_rooms = PrefillRooms(
                self.agent, model.rank, heads, self._on_ready, self._on_success, self._on_failure
            )
            names = translate.layer_names(cache, args)
            once = runtime_context.calls_layers_once(server_args)
            layerwise.follow_layers(self.agent, self.prefill_rooms, names, once)
        else:
            self.addresses = BootstrapAddresses(settings, self.local_ip)
            self.decode_rooms = DecodeRooms(
                self.agent, model.rank, kinds, patience, self._on_success, self._on_failure
            )
            self._start_heartbeat_checker_thread()
        publish_regularly(self.agent.take_stats)

    def register_to_bootstrap(self) -> None:
        """Tell the bootstrap server where this rank's agent listens."""
        assert self.agent.address is not None
        self.local_ip, self.rank_port = self.agent.address
        super().register_to_bootstrap()

    def poll_agent(self) -> None:
        """Process the agent's events; takes a few hundred nanoseconds if there are none."""
        if self._sends:
            self.prefill_rooms.settle(False)
        while self.failed_recomputes:
            self._end_recompute(self.failed_recomputes.popleft())
        if not self.agent.has_news:
            return
        finished, notices = self.agent.poll()
        if self.spans is not None:
            self.spans.take(finished, notices)
        if self._sends:
            self.prefill_rooms.take(notices)
        else:
            self.decode_rooms.take(finished)

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        **more: Any,
    ) -> None:
        """Offer a chunk: pages ``kv_indices`` (int32 [pages]) and, if it is the last, the rest.

        The forward that writes them is over, or SGLang passes the event that ends it. Neither holds
        for chunks before the last of a pipeline stage, which has several in flight: they are
        fenced here.
        """
        if more.get("indices_event") is not None:
            more["indices_event"].synchronize()  # still being copied from the device
        ids = _ids(kv_indices)
        rest: list[Span] = []
        if is_last_chunk:
            rest = self.rest(more.get("aux_index"), more.get("state_indices"))
        event = more.get("wait_event")
        fence: Fence | None = DeviceFence(event) if event is not None else None
        if fence is None and not (is_last_chunk or self.overlaps):
            fence = self.streams.mark()
        first = self.prefill_rooms.prefix(bootstrap_room) + index_slice.start
        self.prefill_rooms.send(bootstrap_room, first, ids, rest, fence)
        if is_last_chunk:
            self.prefill_rooms.complete(bootstrap_room)

    def rest(self, aux_index: int | None, state_indices: Sequence[Any] | None) -> list[Span]:
        """Return the spans of a request's row and of its state components."""
        spans = [] if aux_index is None else [Span(translate.AUX, 0, array("q", [aux_index]))]
        for number, indices in enumerate(state_indices or ()):
            ids = array("q") if indices is None else _ids(indices)
            if ids:
                ids = translate.items(self.kv_args.state_types[number].value, ids)
                spans.append(Span(translate.FIRST_STATE + number, 0, ids))
        return spans

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Fetch a prefill engine's description if its address is allowed. If it does not fit this
        engine, only the requests that name it fail."""
        if not self.addresses.allows(bootstrap_addr):
            return False
        try:
            found: bool = super().try_ensure_parallel_info(bootstrap_addr)
        except _SGLANG_ERRORS as error:
            self.addresses.refuse(bootstrap_addr, repr(error))
            return False
        return found

    def _resolve_rank_mapping(self, info: Any) -> None:
        check_sizes(info)
        super()._resolve_rank_mapping(info)

    def forget_ended(self) -> None:
        """Forget the prefill ranks to which a connection ended: they may have been restarted."""
        ended = self.agent.ended.take()
        if ended:
            with self.connection_lock:
                forget_ranks(ended, self.connection_pool, self.prefill_info_table)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:  # noqa: ARG002
        """Whether no page of an aborted room can be written any more."""
        self.poll_agent()
        return self.decode_rooms.is_over(bootstrap_room)

    def teardown(self) -> None:
        """Close every connection. Idempotent."""
        self.agent.close()

    def _on_ready(self, room: int) -> None:
        self.update_status(room, KVPoll.WaitingForInput)

    def _on_success(self, room: int) -> None:
        self.update_status(room, KVPoll.Success)

    def _on_failure(self, room: int, why: str) -> None:
        if self.request_status.get(room) not in (None, KVPoll.Success):
            self.fail(room, why)

    def fail(self, room: int | None, why: str) -> None:
        """Fail a room; the client sees the first reason."""
        with self.failure_lock:
            self.failure_records.setdefault(room, why)
        self.update_status(room, KVPoll.Failed)

    def take_reason(self, room: int) -> str:
        """Return why a room failed, and forget that; "" if it has not."""
        with self.failure_lock:
            why: str = self.failure_records.pop(room, "")
        return why

    def _fail_prefill_recompute(self, kv_receiver: KVConnectReceiver, reason: str) -> None:
        """Fail a request whose prompt prefill was to compute again. For a thread of SGLang's, which
        may come after the request's end: the scheduler's thread does it."""
        self.failed_recomputes.append(FailedRecompute(kv_receiver, reason))

    def _end_recompute(self, failed: FailedRecompute) -> None:
        room = failed.receiver.bootstrap_room
        if failed.receiver.owns_room and self.request_status.get(room) != KVPoll.Success:
            failed.receiver.abort()
            self.record_failure(room, failed.reason)


class KVConnectSender(RoomOwner, CommonKVSender):
    """One request on the prefill side. For the scheduler's thread. ``left``: the room that
    :meth:`settle` has let go of, until SGLang clears this sender."""

    left: SendRoom | None = None

    def __init__(
        self,
        mgr: KVConnectManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        mgr.poll_agent()
        previous = mgr.claims.owner(bootstrap_room)
        if isinstance(previous, KVConnectSender):
            previous.settle()
        room = self.claim(mgr, bootstrap_room)
        named = req_has_disagg_prefill_dp_rank or not self.owns_room
        super().__init__(mgr, bootstrap_addr, room, named)
        if not self.owns_room:
            self.conclude_state = KVPoll.Failed
            super().clear()

    def open(self, prompt: PromptIdentity) -> None:
        """Open the request's room for a reader with the same prompt."""
        if (
            self.owns_room
            and self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Bootstrapping
        ):
            self.kv_mgr.prefill_rooms.open(self.bootstrap_room, prompt)

    def settle(self) -> None:
        """Let go of the room if the hand-off is over, although SGLang has not polled it yet: a
        request that decode asks for again may come before that."""
        status = self.kv_mgr.request_status.get(self.bootstrap_room)
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
            # The hand-off may go on at other ranks, and all ranks must free the same pages at the
            # same point: frees are deferred as there, until SGLang clears this sender.
            self.left = self.kv_mgr.prefill_rooms.leave(self.bootstrap_room)
            self.clear()

    @contains_errors()
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)

    @contains_errors(0)
    def pop_decode_prefix_len(self) -> int:
        """Return how many tokens the decode engine already has."""
        if not self.owns_room:
            return 0
        pages = self.kv_mgr.prefill_rooms.tell_prefix(self.bootstrap_room)
        tokens: int = pages * self.kv_mgr.kv_args.page_size
        return tokens

    @contains_errors()
    def send(self, *args: Any, **kwargs: Any) -> None:
        if self.owns_room:
            super().send(*args, **kwargs)

    def poll(self) -> int:
        self.kv_mgr.poll_agent()
        return self._poll(super().poll)

    def poll_pp_consensus(self) -> int:
        self.kv_mgr.poll_agent()
        return self._poll(super().poll_pp_consensus)

    @contains_errors(KVPoll.Failed)
    def _poll(self, poll: Callable[[], int]) -> int:
        return poll()

    def get_transfer_metric(self) -> KVTransferMetric:
        """Return the bytes sent to readers, and the seconds that took."""
        return self._transfer_metric

    @contains_errors()
    def clear(self) -> None:
        if not self.owns_room:
            left, self.left = self.left, None
            for free in left.deferred_frees if left is not None else ():
                free()
            return
        moved = self.kv_mgr.prefill_rooms.moved(self.bootstrap_room)
        if moved is not None:
            self._transfer_metric.transfer_total_bytes = moved.nbytes
            self._transfer_metric.transfer_latency_s = moved.seconds
        self._close()
        super().clear()
        self.release()

    @contains_errors()
    def abort(self) -> None:
        """Fail the request and let go of its room: SGLang does not clear every aborted request."""
        if self.owns_room:
            super().abort()
        self.clear()
        self.conclude_state = KVPoll.Failed

    def _close(self) -> None:
        self.kv_mgr.prefill_rooms.close(self.bootstrap_room)
        if self.kv_mgr.spans is not None:
            self.kv_mgr.spans.end(self.bootstrap_room)


class KVConnectReceiver(RoomOwner, CommonKVReceiver):
    """One request on the decode side. For the scheduler's thread."""

    parent: Any = None  # context with the request's own span, if it has one
    prompt: PromptIdentity = NO_PROMPT
    bootstrap_infos: list[dict[str, Any]] | None = None  # not known before ``init``
    requested = False  # its pages

    def __init__(
        self, mgr: KVConnectManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        mgr.forget_ended()
        self._known_by = time.monotonic() + runtime_context.bootstrap_s()
        super().__init__(mgr, bootstrap_addr, self.claim(mgr, bootstrap_room))
        if not self.owns_room:
            self.conclude_state = KVPoll.Failed
            super().clear()
        mgr.addresses.allows(bootstrap_addr)  # starts resolving the name

    @contains_errors()
    def init(self, prefill_dp_rank: int) -> None:
        super().init(prefill_dp_rank)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        **more: Any,
    ) -> None:
        """Request pages into ``kv_indices`` (int32 [pages]), which follow the local prefix."""
        if destination != KVTransferDestination.DEVICE or more:
            raise NotImplementedError(f"kvconnect receives into device pools, not {destination}")
        if self.bootstrap_infos is None or not self.owns_room:
            return  # the request has failed already
        self._request_pages(kv_indices, aux_index, state_indices, decode_prefix_len or 0)
        self.init_time = time.time()  # SGLang's own limit for an answer runs from now

    @contains_errors()
    def _request_pages(
        self,
        kv_indices: Any,
        aux_index: int | None,
        state_indices: Sequence[Any] | None,
        prefix_tokens: int,
    ) -> None:
        info = self.prefill_info
        try:
            request = RoomRequest(
                first=prefix_tokens // self.kv_mgr.kv_args.page_size,
                ids=_ids(kv_indices),
                rest=tuple(self.kv_mgr.rest(aux_index, state_indices)),
                workers=tuple(endpoint_of(found) for found in self.bootstrap_infos or ()),
                tp=int(info.attn_tp_size),
                pp=int(info.pp_size),
                prompt=self.prompt,
            )
            self.requested = True
            with self.kv_mgr.streams.joined():
                self.kv_mgr.decode_rooms.request(self.bootstrap_room, request)
            if self.kv_mgr.spans is not None:
                name, blocks = "kvconnect.receive", len(request.ids)
                self.kv_mgr.spans.begin(name, self.bootstrap_room, self.parent, blocks)
        except (KeyError, TypeError, ValueError, Refused) as error:
            why = f"the bootstrap server's answer cannot be used ({type(error).__name__}: {error})"
            self.kv_mgr.fail(self.bootstrap_room, why)
            self._forget_prefill()

    def poll(self) -> int:
        self.kv_mgr.poll_agent()
        return self._poll_room()

    @contains_errors(KVPoll.Failed)
    def _poll_room(self) -> int:
        status: int = super().poll()
        if status == KVPoll.Bootstrapping:
            why = self.kv_mgr.addresses.refusal(self.bootstrap_addr) or self._overdue()
            if why:
                self.kv_mgr.fail(self.bootstrap_room, why)
                status = super().poll()
        return status

    def _overdue(self) -> str:
        """Return why the request waits no longer for a prefill rank; "" if it does. SGLang has no
        limit here, and the rank of a request that prefill refused is never known."""
        if time.monotonic() < self._known_by:
            return ""
        return (
            f"no rank of the prefill server at {self.bootstrap_addr} has taken up room "
            f"{self.bootstrap_room} in time ({runtime_context.BOOTSTRAP_LIMIT})"
        )

    @contains_errors()
    def clear(self) -> None:
        if self.owns_room:
            super().clear()
            self.release()

    def _clear(self) -> None:
        super()._clear()
        rooms = self.kv_mgr.addr_to_rooms_tracker
        if not rooms.get(self.bootstrap_addr):  # clients may name any number of addresses
            rooms.pop(self.bootstrap_addr, None)

    @contains_errors()
    def abort(self) -> None:
        if self.owns_room:
            super().abort()
        self.conclude_state = KVPoll.Failed

    @contains_errors()
    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        super().ensure_abort_notified(force_arm=force_arm)

    def _forget_prefill(self) -> None:
        """Make the next request ask the bootstrap server again, since its answer cannot be used.
        Servers that were lost are forgotten by :meth:`KVConnectManager.forget_ended`."""
        self.invalidate_cached_bootstrap_infos()
        with self.kv_mgr.connection_lock:
            self.kv_mgr.prefill_info_table.pop(self.bootstrap_addr, None)

    def _register_kv_args(self) -> bool:
        return True  # agents exchange this in their Hellos

    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> dict[str, Any] | None:
        found: dict[str, Any] | None = super()._get_bootstrap_info_from_server(
            prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank
        )
        if found is not None:
            found["tp_rank"] = target_tp_rank
        return found

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:  # noqa: ARG002
        if self.requested:
            self.kv_mgr.decode_rooms.drop(self.bootstrap_room)
            return
        workers, info = (
            [endpoint_of(found) for found in self.bootstrap_infos or ()],
            self.prefill_info,
        )
        tp, pp = int(info.attn_tp_size), int(info.pp_size)
        self.kv_mgr.decode_rooms.decline(self.bootstrap_room, workers, tp, pp)


class KVConnectBootstrapServer(CommonKVBootstrapServer):
    """SGLang's own bootstrap server, under this backend's name."""


CLASSES: dict[str, type] = {
    "MANAGER": KVConnectManager,
    "SENDER": KVConnectSender,
    "RECEIVER": KVConnectReceiver,
    "BOOTSTRAP_SERVER": KVConnectBootstrapServer,
}
"""Classes of this backend, by the name of SGLang's ``KVClassType``."""


def _address(settings: Settings) -> tuple[str, int]:
    """Return the address at which this rank listens; each rank has its own port."""
    address = listen_address(settings.listen)
    if address is None:
        raise ConfigError("listen", settings.listen, "a prefill engine must listen; set HOST:PORT")
    host, port = address
    if port:
        port += runtime_context.rank_number()
    if port > _LAST_PORT:
        fix = f"rank {runtime_context.rank_number()} would listen at port {port}; use a lower port"
        raise ConfigError("listen", settings.listen, fix)
    return host, port


def _ids(indices: Any) -> array[int]:
    """Return page or slot numbers, which SGLang gives as arrays, tensors or lists."""
    return array("q", indices if isinstance(indices, list) else indices.tolist())
