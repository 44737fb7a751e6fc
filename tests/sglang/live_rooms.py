"""SGLang's own room states, senders and receivers around real agents, without servers."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn

from kvconnect.engines.sglang.backend import KVConnectManager, KVConnectReceiver, KVConnectSender
from kvconnect.engines.sglang.bootstrap import BootstrapAddresses
from kvconnect.engines.sglang.claims import RoomClaims
from kvconnect.engines.sglang.decode_rooms import DecodeRooms
from kvconnect.engines.sglang.rooms import PrefillRooms
from kvconnect.protocol.prompts import NO_PROMPT
from kvconnect.settings import Settings
from tests.unit.engines.sglang_ranks import TOKENS, Decode, Prefill

SERVER = "127.0.0.1:80"


def _manager(rank: Prefill | Decode, sends: bool) -> Any:
    made: Any = object.__new__(KVConnectManager)
    made.streams = SimpleNamespace(joined=nullcontext, forward=None, mark=lambda: None)
    made.agent, made.spans, made._sends = rank.agent, None, sends
    made.claims, made.failed_recomputes = RoomClaims(), deque()
    made.kv_args = SimpleNamespace(page_size=TOKENS, state_types=[])
    made.failure_lock, made.connection_lock = threading.Lock(), threading.Lock()
    made.failure_records, made.request_status = {}, {}
    made.deferred_bootstrap, made.defer_decode_allocation = None, False
    made._deferred_ack_targets, made._deferred_ack_poisoned_rooms = {}, set()
    made._staging_outstanding, made._staging_ctx = defaultdict(int), None
    return made


def prefill_manager(rank: Prefill) -> Any:
    """Return the manager of a prefill rank."""
    made = _manager(rank, sends=True)
    made.is_dummy_cp_rank, made.sender_trace_module = False, None
    made.bootstrap_timeout, made.attn_dp_rank = 300, 0
    made.req_to_decode_prefix_len, made.transfer_infos = {}, {}
    made._maybe_ack_drained_abort = lambda _room: None
    made.reports_transfer_latency = False
    heads = [group.kv_heads for group in rank.cache.hello.groups]
    ended = made._on_ready, made._on_success, made._on_failure
    rank.prefill_rooms = made.prefill_rooms = PrefillRooms(rank.agent, rank.rank, heads, *ended)
    return made


def decode_manager(rank: Decode) -> Any:
    """Return the manager of a decode rank."""
    made = _manager(rank, sends=False)
    made.addresses = BootstrapAddresses(Settings(), "127.0.0.1")
    made.connection_pool, made.prefill_info_table = {}, {}
    made.addr_to_rooms_tracker, made.prefill_response_tracker = defaultdict(set), {}
    made.required_prefill_response_num_table = {}
    made.enable_deferred_decode_kv_release, made.waiting_timeout = True, 300
    kinds = [(group.block_tokens, group.kv_heads) for group in rank.cache.hello.groups]
    made.decode_rooms = DecodeRooms(
        rank.agent, rank.rank, kinds, 20.0, made._on_success, made._on_failure
    )
    return made


def sender(manager: Any, room: Any) -> KVConnectSender:
    """Return a new request's sender; there is one data-parallel rank."""
    conn.get_parallel = lambda: SimpleNamespace(num_dp_ranks=1)
    made = KVConnectSender(manager, SERVER, room)
    made.open(NO_PROMPT)
    return made


def receiver(manager: Any, sources: list[Prefill], room: Any, known: bool = True) -> Any:
    """Return a new request's receiver. ``known``: the bootstrap server has answered."""
    made: Any = KVConnectReceiver(manager, SERVER, room)
    if known and made.owns_room:
        rank = sources[0].rank
        made.prefill_info = SimpleNamespace(attn_tp_size=rank.tp, pp_size=rank.pp)
        made.bootstrap_infos = [
            {"tp_rank": e.tp_rank, "pp_rank": e.pp_rank, "rank_ip": e.host, "rank_port": e.port}
            for e in (source.endpoint for source in sources)
        ]
        manager.update_status(room, KVPoll.WaitingForInput)
    return made


def ask(made: Any, pages: list[int], row: int = 4, prefix: int = 0) -> None:
    """Publish the pages of a receiver's request, as SGLang does."""
    made.send_metadata(np.array(pages, np.int32), row, None, prefix * TOKENS)
