"""Tracing only observes: a hand-off is the same without spans, with them, and when they fail."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn

from kvconnect.engines.sglang import hooks
from kvconnect.engines.sglang.backend import KVConnectSender
from kvconnect.engines.sglang.prompts import AdapterContents
from kvconnect.engines.sglang.tracing import RoomSpans
from tests.sglang.live_rooms import SERVER, ask, decode_manager, prefill_manager, receiver
from tests.unit.engines.sglang_ranks import ROOM, TOKENS, engines

WAIT_S = 20.0
PAGES = [5, 6]


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a tracer that is broken")


class Recorder:
    """What a maker of spans calls; ``broken`` names the call that fails."""

    def __init__(self, broken: str) -> None:
        self.broken = broken
        self.calls: list[str] = []

    def call(self, name: str) -> Any:
        def called(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            if name == self.broken:
                fails()
            return SimpleNamespace(set_attribute=self.call("attribute"), end=self.call("end"))

        return called

    def spans(self) -> RoomSpans:
        made: Any = object.__new__(RoomSpans)
        made._otel = SimpleNamespace(INTERNAL=0)
        made._tracer = SimpleNamespace(start=self.call("start"))
        made._transfer_spans = SimpleNamespace(
            end_job=self.call("end_job"), record_send=self.call("record_send")
        )
        made._open, made._served = {}, set()
        spans: RoomSpans = made
        return spans


class Request(SimpleNamespace):
    """A request of SGLang's, as far as the hooks look at it. ``stats``: its ``time_stats``."""

    def __init__(self, stats: Any) -> None:
        super().__init__(
            bootstrap_room=ROOM,
            origin_input_ids=range(len(PAGES) * TOKENS),
            time_stats=stats,
            lora_id=None,
            extra_key=None,
            cache_salt=None,
            multimodal_inputs=None,
        )


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conn, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=1))


def handed_over(recorder: Recorder | None, stats: Any) -> tuple[KVPoll, KVPoll, bytes]:
    """How both sides of a hand-off end, and the pages that arrived."""
    scheduler = SimpleNamespace(forward_stream=None, enable_overlap=False)
    with ExitStack() as closing:
        (source,), (reader,) = engines(closing, (1, 1), 4)
        prefill, decode = prefill_manager(source), decode_manager(reader)
        for manager in (prefill, decode):
            manager.spans = recorder.spans() if recorder else None
            manager.adapters = AdapterContents()
        sending = KVConnectSender(prefill, SERVER, ROOM)
        req = Request(stats)
        req.disagg_kv_sender = sending
        hooks.after_sender(True, SimpleNamespace(kv_manager=prefill, scheduler=scheduler), req)
        receiving = receiver(decode, [source], ROOM)
        made = SimpleNamespace(kv_receiver=receiving, req=req)
        hooks.after_receiver(made, SimpleNamespace(kv_manager=decode, scheduler=scheduler))
        ask(receiving, PAGES)
        deadline = time.monotonic() + WAIT_S
        sent = False
        ends: tuple[KVPoll, KVPoll] = (KVPoll.Bootstrapping, KVPoll.Bootstrapping)
        while not all(end in (KVPoll.Success, KVPoll.Failed) for end in ends):
            assert time.monotonic() < deadline, ends
            ends = (sending.poll(), receiving.poll())
            if ends[0] == KVPoll.WaitingForInput and not sent:
                sent = True
                prefill.add_transfer_request(
                    ROOM, np.array(PAGES, np.int32), slice(0, len(PAGES)), True, aux_index=4
                )
        pages = b"".join(reader.page(0, page).numpy().tobytes() for page in PAGES)
        sending.clear()
        return *ends, pages


TRACED = SimpleNamespace(trace_ctx=SimpleNamespace(root_span_context=object()))


@pytest.mark.parametrize("broken", ["", "start", "attribute", "end", "end_job"])
def test_hand_offs_are_the_same_with_spans_and_without(broken: str) -> None:
    recorder = Recorder(broken)
    found = handed_over(recorder, TRACED)
    assert found == handed_over(None, TRACED)
    assert found[:2] == (KVPoll.Success, KVPoll.Success) and any(found[2])
    assert (broken or "end") in recorder.calls  # control: it was called


def test_a_request_without_sglang_s_times_is_handed_over_too() -> None:
    for recorder in (None, Recorder("")):
        assert handed_over(recorder, None)[:2] == (KVPoll.Success, KVPoll.Success)
