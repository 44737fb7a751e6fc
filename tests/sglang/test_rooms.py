"""Rooms as SGLang's scheduler uses them: one request each, on every stage, whatever goes wrong."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.disaggregation import decode as sglang_decode
from sglang.srt.disaggregation import utils as sglang_utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.decode import (
    DecodePreallocQueue,
    DecodeRequest,
    DecodeTransferQueue,
)
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry

from kvconnect.engines.sglang import backend, hooks
from kvconnect.engines.sglang.backend import KVConnectReceiver, KVConnectSender
from kvconnect.engines.sglang.claims import RoomClaims
from kvconnect.engines.sglang.decode_rooms import DecodeRooms
from kvconnect.engines.sglang.prompts import AdapterContents
from kvconnect.engines.sglang.rooms import PrefillRooms
from kvconnect.types import Rank
from tests.sglang.live_rooms import SERVER, ask, decode_manager, prefill_manager, receiver, sender
from tests.unit.engines.sglang_ranks import ROOM, TOKENS, Decode, Prefill, engines

WAIT_S = 20.0


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def until(over: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not over():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def pair(closing: ExitStack) -> tuple[Any, Prefill, Any, Decode]:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    return prefill_manager(source), source, decode_manager(reader), reader


# Several requests of one room ---------------------------------------------------------------------


def request(name: str) -> Any:
    times = SimpleNamespace(
        set_bootstrap_done_time=lambda: None,
        trace_ctx=SimpleNamespace(abort=lambda **_: None),
    )
    return SimpleNamespace(
        rid=name,
        bootstrap_room=ROOM,
        bootstrap_host="127.0.0.1",
        bootstrap_port=80,
        return_logprob=False,
        finished_reason=None,
        to_finish=None,
        time_stats=times,
    )


class DecodeQueues:
    """SGLang's queues of a decode engine with one rank: what its event loop does with them."""

    def __init__(self, patch: pytest.MonkeyPatch, first: Any, second: Any) -> None:
        same = lambda flags, group=None, op=None: flags  # noqa: E731
        patch.setattr(sglang_utils, "all_reduce_flags", same)
        patch.setattr(sglang_decode, "all_reduce_flags", same)
        reporter = SimpleNamespace(enable_metrics=False)
        self.prealloc: Any = object.__new__(DecodePreallocQueue)
        self.prealloc.queue = [DecodeRequest(req=request("second"), kv_receiver=second)]
        self.prealloc.pp_size, self.prealloc.tp_rank, self.prealloc.gloo_group = 1, 0, None
        self.prealloc.scheduler = SimpleNamespace(metrics_reporter=reporter)
        self.transfer: Any = object.__new__(DecodeTransferQueue)
        receiving: Any = DecodeRequest(req=request("first"), kv_receiver=first)
        receiving.metadata_buffer_index = 0
        self.transfer.queue, self.transfer._deferred_releases = [receiving], []
        self.transfer.tp_rank, self.transfer.gloo_group = 0, None
        self.transfer.enable_staging = self.transfer.enable_host_receive = False
        self.transfer.enable_deferred_kv_release = True
        self.transfer.deferred_kv_release_timeout = 30.0
        self.transfer.scheduler = SimpleNamespace(
            enable_decode_hicache=False,
            output_streamer=SimpleNamespace(stream_output=lambda *_: None),
            metrics_reporter=reporter,
        )
        rows = torch.zeros((8, 8), dtype=torch.uint64)
        rows[0, 0] = ROOM
        self.transfer.metadata_buffers = SimpleNamespace(
            bootstrap_room=rows, clear_slot=lambda _: None
        )
        self.transfer.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=lambda _: None)
        self.transfer._clean_hicache_prefetch_resources = lambda _: None
        self.committed: list[str] = []

        def commit(decode_req: Any) -> None:
            self.committed.append(decode_req.req.rid)
            decode_req.kv_receiver.clear()

        self.transfer._commit_transfer_to_req = commit
        self.failed: list[str] = []

    def turn(self) -> None:
        self.prealloc._update_handshake_waiters()
        for waiting in self.prealloc.queue:
            if waiting.req.finished_reason is not None:
                self.failed.append(waiting.req.finished_reason.message)
        self.prealloc.queue = [d for d in self.prealloc.queue if d.req.finished_reason is None]
        self.transfer.pop_transferred()


@pytest.mark.parametrize("success", [True, False])
def test_a_second_request_of_a_live_room_fails_alone_in_decode(
    success: bool, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, source, decode, reader = pair(closing)
    sending = sender(prefill, ROOM)
    first = receiver(decode, [source], ROOM)
    ask(first, [7])
    queues = DecodeQueues(monkeypatch, first, receiver(decode, [source], ROOM))
    until(lambda: sending.poll() == KVPoll.WaitingForInput)
    if success:
        source.send_all([3], chunks=1)
    else:
        prefill.prefill_rooms.give_up(ROOM, "prefill has failed")

    def ended() -> bool:
        queues.turn()
        sending.poll()
        return not (queues.prealloc.queue or queues.transfer.queue)

    until(ended)
    assert len(queues.failed) == 1 and "n > 1" in queues.failed[0]
    assert queues.committed == (["first"] if success else [])
    assert reader.page(0, 7).any() == success
    until(lambda: decode.is_abort_release_safe(ROOM, 1))
    assert not decode.request_status and not decode.failure_records
    third = receiver(decode, [source], ROOM)  # the room is free again
    assert third.poll() == KVPoll.WaitingForInput


def test_without_claims_a_second_request_ends_the_scheduler(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    prefill, source, decode, _ = pair(closing)
    sending = sender(prefill, ROOM)
    first = receiver(decode, [source], ROOM)
    ask(first, [7])
    monkeypatch.setattr(RoomClaims, "refusal", lambda *_: "")
    queues = DecodeQueues(monkeypatch, first, receiver(decode, [source], ROOM))
    until(lambda: sending.poll() == KVPoll.WaitingForInput)
    source.send_all([3], chunks=1)
    until(lambda: decode.agent.has_news)
    with pytest.raises((ValueError, KeyError)):
        until(lambda: queues.turn() or not queues.prealloc.queue)


def test_a_second_request_of_a_live_room_fails_alone_in_prefill(closing: ExitStack) -> None:
    prefill, source, decode, reader = pair(closing)
    first, second = sender(prefill, ROOM), sender(prefill, ROOM)
    assert (first.owns_room, second.owns_room) == (True, False)
    assert second.poll() == KVPoll.Failed
    asking = receiver(decode, [source], ROOM)
    ask(asking, [7])
    until(lambda: first.poll() == KVPoll.WaitingForInput)
    second.abort()
    second.clear()
    with pytest.raises(Exception, match="n > 1"):
        second.failure_exception()
    source.send_all([3], chunks=1)
    until(lambda: first.poll() == KVPoll.Success and asking.poll() == KVPoll.Success)
    first.clear()
    assert reader.page(0, 7).any()
    assert not prefill.request_status and not prefill.failure_records


@pytest.mark.parametrize("settled", [True, False])
def test_a_room_is_used_again_before_sglang_has_polled_its_first_request(
    settled: bool, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode has lost the pages and lets them be computed once more. What the first request frees
    late is freed when SGLang clears it, which is at the same point on every rank."""
    prefill, source, decode, reader = pair(closing)
    first = sender(prefill, ROOM)
    asking = receiver(decode, [source], ROOM)
    ask(asking, [7])
    until(lambda: first.poll() == KVPoll.WaitingForInput)
    source.send_all([3], chunks=1)
    freed: list[int] = []
    room = prefill.prefill_rooms.find(ROOM)
    room.keep([lambda: {3}], [lambda: freed.append(3)])
    until(lambda: asking.poll() == KVPoll.Success)
    asking.clear()
    again = receiver(decode, [source], ROOM)
    ask(again, [8])
    planner = source.agent._sending._sender
    until(lambda: planner._parked and source.agent.has_news)
    if not settled:  # the control: the room is still the first one's
        monkeypatch.setattr(KVConnectSender, "settle", lambda _: None)
        assert sender(prefill, ROOM).poll() == KVPoll.Failed
        return
    second = sender(prefill, ROOM)
    until(lambda: second.poll() == KVPoll.WaitingForInput)
    assert first.poll() == KVPoll.Success and freed == []
    first.clear()
    assert freed == [3]
    source.send_all([4], chunks=1)
    until(lambda: second.poll() == KVPoll.Success and again.poll() == KVPoll.Success)
    assert reader.page(0, 7).any() and reader.page(0, 8).any()
    first.clear()
    second.clear()
    assert freed == [3] and not prefill.request_status


@pytest.mark.parametrize("late", [True, False])
def test_a_prompt_that_is_not_computed_again_fails_its_request_and_no_other(
    late: bool, closing: ExitStack
) -> None:
    """Prefill's answer comes to a thread of SGLang's, perhaps after the request has ended."""
    _, source, decode, _ = pair(closing)
    asking = receiver(decode, [source], ROOM)
    if late:
        asking.clear()
        following = receiver(decode, [source], ROOM)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(decode._fail_prefill_recompute, asking, "prefill is busy").result()
    assert not decode.failure_records  # that thread touches nothing
    if late:
        assert following.poll() != KVPoll.Failed and not decode.failure_records
        return
    assert asking.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="prefill is busy"):
        asking.failure_exception()
    assert not decode.failure_records


def test_a_receiver_that_knows_no_server_yet_cannot_be_asked_for_pages(closing: ExitStack) -> None:
    _, source, decode, _ = pair(closing)
    waiting = receiver(decode, [source], ROOM, known=False)
    ask(waiting, [7])
    assert waiting.poll() == KVPoll.Bootstrapping


@pytest.mark.parametrize("known", [True, False])
def test_a_request_whose_prefill_rank_is_never_known_fails_in_time(
    known: bool, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where prefill refused it. Once a rank is known, other limits are asked (control)."""
    _, source, decode, _ = pair(closing)
    waiting = receiver(decode, [source], ROOM, known=known)
    state = KVPoll.WaitingForInput if known else KVPoll.Bootstrapping
    assert waiting.poll() == state
    later = time.monotonic() + envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get() - 60
    clock = SimpleNamespace(monotonic=lambda: later, time=time.time)
    monkeypatch.setattr(backend, "time", clock)
    assert waiting.poll() == state
    later += 60
    assert waiting.poll() == (state if known else KVPoll.Failed)
    if not known:
        with pytest.raises(KVTransferError, match=r"taken up room .*_BOOTSTRAP_TIMEOUT"):
            waiting.failure_exception()
        assert not decode.request_status and not decode.failure_records
    waiting.abort()
    waiting.clear()


@pytest.mark.parametrize("told", [True, False])
def test_prefill_hears_of_a_request_that_leaves_before_it_asked(
    told: bool, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, source, decode, _ = pair(closing)
    declined: list[int] = []
    decline = DecodeRooms.decline

    def follow(rooms: DecodeRooms, room: int, *workers: Any) -> None:
        declined.append(room)
        if told:
            decline(rooms, room, *workers)

    monkeypatch.setattr(DecodeRooms, "decline", follow)
    sending, leaving = sender(prefill, ROOM), receiver(decode, [source], ROOM)
    leaving.abort()
    assert declined == [ROOM]
    if told:
        until(lambda: sending.poll() == KVPoll.WaitingForInput)
    else:  # control: it would wait until SGLang's own limit
        assert sending.poll() == KVPoll.Bootstrapping


def test_only_an_answer_that_cannot_be_used_is_asked_for_again(closing: ExitStack) -> None:
    """Servers that were lost are forgotten where the connection ended."""
    (source,), (reader,) = engines(closing, (1, 1), 4)
    manager = decode_manager(reader)
    manager.prefill_info_table[SERVER] = known = object()
    left = receiver(manager, [source], ROOM)
    ask(left, [7])
    left.abort()
    assert left.poll() == KVPoll.Failed
    assert manager.prefill_info_table == {SERVER: known}
    broken = receiver(manager, [source], ROOM - 1)
    broken.bootstrap_infos = [{}]
    ask(broken, [8])
    assert broken.poll() == KVPoll.Failed
    assert manager.prefill_info_table == {}


@pytest.mark.parametrize("room", [0, -1, 2**63, None, "7", True, [1]])
def test_what_is_no_room_fails_one_request_on_both_sides(room: Any, closing: ExitStack) -> None:
    prefill, source, decode, _ = pair(closing)
    for made in (sender(prefill, room), receiver(decode, [source], room)):
        assert made.poll() == KVPoll.Failed
        with pytest.raises(Exception, match="bootstrap_room="):
            made.failure_exception()
    assert not prefill.request_status and not decode.request_status


def test_aborted_requests_leave_nothing(closing: ExitStack) -> None:
    """SGLang aborts some requests of a prefill engine and never clears them."""
    prefill, source, decode, _ = pair(closing)
    for room in range(1, 201):
        sending = sender(prefill, room)
        sending.abort()
        assert sending.poll() == KVPoll.Failed
        receiving = receiver(decode, [source], room)
        receiving.abort()
        receiving.clear()
    assert not prefill.request_status and not prefill.failure_records
    assert not decode.request_status and not decode.failure_records
    assert sender(prefill, 7).poll() == KVPoll.Bootstrapping  # the room can be used again
    # Nor does one that SGLang drops without a call.
    dropped: Any = receiver(decode, [source], 9)
    del dropped
    gc.collect()
    assert receiver(decode, [source], 9).poll() == KVPoll.WaitingForInput


# Pipeline stages ----------------------------------------------------------------------------------


class Status(dict[int, Any]):
    """Plays SGLang's ``PPConsensusStore`` between the stages of one process."""

    stages: list[Status]

    def collect(self, room: int) -> list[Any]:
        return [stage.get(room) for stage in self.stages]


def stage_queue(manager: Any, number: int, stages: int, sent: list[Any]) -> Any:
    """Return SGLang's queue of new requests on one pipeline stage, with one request in it."""
    queue: Any = object.__new__(PrefillBootstrapQueue)
    queue.kv_manager, queue.pp_rank, queue.pp_size = manager, number, stages
    queue.pp_poll_sync_work_list, queue.scheduler_stage_metrics = [], None
    queue.scheduler = SimpleNamespace(
        attn_cp_cpu_group=None, attn_tp_cpu_group=None, pp_group=sent, processed_tokens_counter=0
    )
    queue.finalize_bootstrap = lambda _req: True
    req = SimpleNamespace(
        rid="a",
        disagg_kv_sender=sender(manager, ROOM),
        is_retracted=True,
        time_stats=SimpleNamespace(set_wait_queue_entry_time=lambda: None),
    )
    queue.queue = [req]
    return queue


@pytest.mark.parametrize("hooked", [True, False])
def test_every_stage_of_a_prefill_engine_hears_of_its_reader(
    hooked: bool, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang polls on the first stage alone; without the hook, later ones never hear of it."""
    sent: list[Any] = []

    def sync(polls: Any, group: Any, rank: int, *_: Any) -> Any:
        if rank == 0:
            group[:] = polls
        return list(group)

    monkeypatch.setattr(sglang_utils, "_all_reduce_polls", lambda polls, _group: polls)
    monkeypatch.setattr(sglang_utils, "pp_sync_polls", sync)
    stages = [Prefill(Rank(0, 1, n, 2), 4) for n in range(2)]
    reader = Decode(Rank(0, 1, 0, 1), 4)
    for rank in (*stages, reader):
        closing.callback(rank.agent.close)
    managers = [prefill_manager(stage) for stage in stages]
    for manager in managers:
        manager.request_status = Status()
    Status.stages = [manager.request_status for manager in managers]
    queues = [stage_queue(manager, n, 2, sent) for n, manager in enumerate(managers)]
    asking = receiver(decode_manager(reader), stages, ROOM)
    ask(asking, [7])
    until(lambda: all(stage.agent.has_news for stage in stages))
    popped: list[Any] = []
    for _ in range(3):
        for queue in queues:
            if hooked:
                hooks.before_pop(queue)
            popped += queue.pop_bootstrapped()
    assert len(popped) == (2 if hooked else 0)


def test_the_hooks_are_set_where_sglang_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, hook, kind: registered.update({target: hook})
    )
    importlib.import_module("sglang.srt.managers.scheduler")  # as in a scheduler's process
    hooks.watch()
    assert registered == {
        hooks.SEND: hooks.after_sender,
        hooks.POP: hooks.before_pop,
        hooks.RECEIVE: hooks.after_receiver,
        hooks.RANKS: hooks.around_ranks,
        hooks.ATTACH: hooks.around_attach,
        hooks.CHECKPOINT: hooks.around_checkpoint,
    }
    for target in registered:
        module, owner, name = target.rsplit(".", 2)
        assert callable(getattr(getattr(importlib.import_module(module), owner), name))


def test_bootstrap_servers_are_forgotten_with_the_requests_that_named_them(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request may name another one. What a waiting request has asked for is kept (control)."""
    monkeypatch.setattr(CommonKVManager, "try_ensure_parallel_info", lambda *_: False)
    _, _, decode, _ = pair(closing)
    decode.adapters = AdapterContents()
    queue: Any = object.__new__(DecodePreallocQueue)
    queue.kv_manager, queue.scheduler = decode, SimpleNamespace(forward_stream=None)
    queue._ensure_retry_count, queue._ensure_last_attempt_time = {}, {}
    queue._ensure_retry_interval, queue._max_ensure_retries = 0.0, 15
    queue.pending_reqs = []

    def wait_for(address: str, room: int) -> Any:
        made = KVConnectReceiver(decode, address, room)
        req = SimpleNamespace(
            **vars(request("one")),
            origin_input_ids=range(TOKENS),
            lora_id=None,
            extra_key=None,
            cache_salt=None,
            multimodal_inputs=None,
        )
        waiting = DecodeRequest(req=req, kv_receiver=made)
        hooks.after_receiver(waiting, queue)
        queue.pending_reqs.append(waiting)
        queue._ensure_prefill_info({address: [waiting]})
        return made

    kept = wait_for(SERVER, ROOM)
    for number in range(1, 20):
        made = wait_for(f"10.0.0.{number}:80", number)
        assert made.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match="not allowed"):
            made.failure_exception()
        queue.pending_reqs.pop()
        assert queue._ensure_last_attempt_time.keys() == {SERVER, f"10.0.0.{number}:80"}
    assert queue._ensure_retry_count == {SERVER: 1, "10.0.0.19:80": 1}
    assert decode.addr_to_rooms_tracker == {SERVER: {ROOM}}
    kept.abort()
    kept.clear()
    assert not decode.addr_to_rooms_tracker


# Errors that nobody expects -----------------------------------------------------------------------

SENDER_CALLS: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "poll": (CommonKVSender, "poll", lambda made: made.poll()),
    "poll_pp_consensus": (
        CommonKVSender,
        "poll_pp_consensus",
        lambda made: made.poll_pp_consensus(),
    ),
    "init": (CommonKVSender, "init", lambda made: made.init(1, 0)),
    "pop_decode_prefix_len": (
        PrefillRooms,
        "tell_prefix",
        lambda made: made.pop_decode_prefix_len(),
    ),
    "send": (CommonKVSender, "send", lambda made: made.send([3])),
    "clear": (PrefillRooms, "moved", lambda made: made.clear()),
    "abort": (PrefillRooms, "close", lambda made: made.abort()),
}
RECEIVER_CALLS: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "poll": (CommonKVReceiver, "poll", lambda made: made.poll()),
    "init": (CommonKVReceiver, "init", lambda made: made.init(0)),
    "send_metadata": (DecodeRooms, "request", lambda made: ask(made, [7])),
    "clear": (CommonKVReceiver, "clear", lambda made: made.clear()),
    "abort": (CommonKVReceiver, "abort", lambda made: made.abort()),
    "ensure_abort_notified": (DecodeRooms, "decline", lambda made: made.ensure_abort_notified()),
}


def breaks(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("nobody has thought of this")


CALLS: dict[type, dict[str, tuple[type, str, Callable[[Any], Any]]]] = {
    KVConnectSender: SENDER_CALLS,
    KVConnectReceiver: RECEIVER_CALLS,
}
PLAIN = {"open", "settle", "get_transfer_metric", "failure_exception"}
"""Of KVConnect's own hooks, and what does no work."""


@pytest.mark.parametrize("kind", CALLS)
def test_every_method_that_sglang_calls_is_broken_below(kind: type) -> None:
    methods = {name for name, made in vars(kind).items() if callable(made) and name[0] != "_"}
    assert methods - PLAIN == {*CALLS[kind]}


@pytest.mark.parametrize(
    ("kind", "call"), [(kind, call) for kind, calls in CALLS.items() for call in calls]
)
def test_no_error_reaches_the_scheduler_s_thread(
    kind: type, call: str, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends = kind is KVConnectSender
    owner, name, run = CALLS[kind][call]
    prefill, source, decode, _ = pair(closing)
    made = sender(prefill, ROOM) if sends else receiver(decode, [source], ROOM)
    other = sender(prefill, 5) if sends else receiver(decode, [source], 5)
    broken = Mock(side_effect=breaks)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        run(made)
    broken.assert_called()
    assert made.poll() == KVPoll.Failed
    with pytest.raises(Exception, match=r"nobody has thought of this|Aborted"):
        made.failure_exception()
    assert other.poll() in (KVPoll.Bootstrapping, KVPoll.WaitingForInput)


def test_an_error_in_a_notice_ends_at_most_one_room(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, source, decode, _ = pair(closing)
    bad, good = sender(prefill, ROOM), sender(prefill, 5)
    asking, other = receiver(decode, [source], ROOM), receiver(decode, [source], 5)
    with monkeypatch.context() as patch:
        patch.setattr(PrefillRooms, "_join", breaks)
        ask(asking, [7])
        until(lambda: bad.poll() == KVPoll.Failed)
    ask(other, [8], row=3)
    until(lambda: good.poll() == KVPoll.WaitingForInput)
