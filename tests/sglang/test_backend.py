"""What SGLang's scheduler calls of the transfer backend, without a server around it."""

from __future__ import annotations

import re
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    PrefillServerInfo,
)
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
)

from kvconnect.engines.sglang import backend, direct_requests, hooks, runtime_context
from kvconnect.engines.sglang.backend import KVConnectManager, KVConnectReceiver
from kvconnect.engines.sglang.bootstrap import BootstrapAddresses
from kvconnect.engines.sglang.claims import RoomClaims
from kvconnect.engines.sglang.prompts import AdapterContents, prompt_identity
from kvconnect.engines.sglang.rooms import SendRoom
from kvconnect.errors import ConfigError
from kvconnect.protocol.prompts import PromptIdentity, difference
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Endpoint

ROOM, PAGE = 5, 16


class Streams:
    """Stands in for SGLang's two; ``inside``: what is done comes after both."""

    def __init__(self) -> None:
        self.inside = False
        self.forward: Any = None

    @contextmanager
    def joined(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def mark(self) -> str:
        return "after both"


class Agent:
    def __init__(self) -> None:
        self.counted = OffloadingConnectorStats()

    @contextmanager
    def stats(self) -> Iterator[OffloadingConnectorStats]:
        yield self.counted


def manager(**parts: Any) -> Any:
    made = object.__new__(KVConnectManager)
    made.streams, made.agent, made.spans = Streams(), Agent(), None  # type: ignore[assignment]
    made.kv_args, made.claims = SimpleNamespace(page_size=PAGE), RoomClaims()
    made.failed_recomputes = deque()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def receiver(ask: Any, infos: list[dict[str, Any]]) -> tuple[Any, list[str]]:
    failed: list[str] = []
    made = object.__new__(KVConnectReceiver)
    made.kv_mgr = manager(
        decode_rooms=SimpleNamespace(request=ask), fail=lambda _room, why: failed.append(why)
    )
    made.bootstrap_room, made.bootstrap_infos, made.owns_room = ROOM, infos, True
    made._forget_prefill = lambda: None
    made.prefill_info = SimpleNamespace(attn_tp_size=1, pp_size=1)
    return made, failed


GOOD = {"tp_rank": 0, "pp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": 1}


def test_pages_are_asked_for_after_the_forward_that_may_still_write_them() -> None:
    seen: list[tuple[bool, Any]] = []
    made, failed = receiver(
        lambda _room, wanted: seen.append((made.kv_mgr.streams.inside, wanted)), [GOOD]
    )
    made.send_metadata(np.array([3, 4], np.int32), aux_index=1, decode_prefix_len=2 * PAGE)
    ((inside, wanted),) = seen
    assert inside and not failed
    assert (wanted.first, list(wanted.ids)) == (2, [3, 4])


@pytest.mark.parametrize(
    "info",
    [
        *({}, {**GOOD, "rank_port": "x"}, {**GOOD, "tp_rank": None}, {**GOOD, "rank_port": 0}),
        *({**GOOD, "rank_port": 70_000}, {**GOOD, "rank_port": -1}, {**GOOD, "rank_ip": "0.0.0.0"}),
        {**GOOD, "rank_ip": "somewhere"},
    ],
)
def test_what_a_bootstrap_server_says_fails_one_request(info: dict[str, Any]) -> None:
    made, failed = receiver(lambda *_: None, [info])
    made.send_metadata([3])
    assert len(failed) == 1 and "cannot be used" in failed[0]


def test_a_rank_s_port_above_the_last_one_is_an_error_of_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(listen="127.0.0.1:65530")
    monkeypatch.setattr(runtime_context, "rank_number", lambda: 5)
    assert backend._address(settings) == ("127.0.0.1", 65535)
    monkeypatch.setattr(runtime_context, "rank_number", lambda: 6)
    with pytest.raises(ConfigError, match="rank 6 would listen at port 65536"):
        backend._address(settings)


def test_an_error_that_nobody_expects_fails_one_request() -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError("who would have thought")

    made, failed = receiver(breaks, [GOOD])
    made.send_metadata([3])
    assert failed == ["ZeroDivisionError: who would have thought"]
    assert made.kv_mgr.agent.counted.data["counters"]["handoff_refused"] == {"other": 1}


@pytest.mark.parametrize(
    ("overlaps", "last", "fence"),
    [(True, False, None), (True, True, None), (False, True, None), (False, False, "after both")],
)
def test_a_chunk_of_a_pipeline_stage_waits_for_its_forward(
    overlaps: bool, last: bool, fence: str | None
) -> None:
    """Stages have several batches on their way, and send a chunk when the next one is made."""
    sent: list[Any] = []
    prefill_rooms = SimpleNamespace(
        prefix=lambda _: 1, send=lambda *args: sent.append(args), complete=lambda _: None
    )
    made = manager(prefill_rooms=prefill_rooms, overlaps=overlaps)
    made.add_transfer_request(ROOM, [7, 8], slice(2, 4), last, aux_index=0)
    ((room, first, ids, _rest, found),) = sent
    assert (room, first, list(ids), found) == (ROOM, 3, [7, 8], fence)


@pytest.mark.parametrize("error", [RuntimeError, TypeError, KeyError, ZeroDivisionError])
def test_a_server_that_says_what_nobody_expects_is_not_asked_for_a_while(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def answers(*_: Any) -> bool:
        raise error("attn_tp_size")

    monkeypatch.setattr(CommonKVManager, "try_ensure_parallel_info", answers)
    made = manager(addresses=BootstrapAddresses(Settings(), "192.0.2.9"))
    assert not made.try_ensure_parallel_info("127.0.0.1:1")
    assert "attn_tp_size" in made.addresses.refusal("127.0.0.1:1")


@pytest.mark.parametrize(("ended", "known"), [([], 2), ([9], 2), ([1], 1), ([1, 2, 3], 0)])
def test_a_request_looks_up_a_server_to_which_a_connection_ended(
    ended: list[int], known: int
) -> None:
    """It may be another server's address by now: nothing of it is sent there."""
    pool = {
        "127.0.0.1:80_0_0_0": [{**GOOD, "rank_port": 1}],
        "127.0.0.1:80_1_0_0": [{**GOOD, "rank_port": 1}],
        "10.0.0.1:80_0_0_None": [{}, {**GOOD, "rank_port": "2"}],  # a server may say anything
    }
    made = manager(
        connection_pool=pool,
        prefill_info_table={"127.0.0.1:80": "an engine", "10.0.0.1:80": "another"},
        connection_lock=threading.Lock(),
        addresses=BootstrapAddresses(Settings(), "192.0.2.9"),
        defer_decode_allocation=False,
        addr_to_rooms_tracker=defaultdict(set),
        prefill_response_tracker={},
        request_status={},
        update_status=lambda *_: None,
    )
    lost = [Endpoint(0, 0, "127.0.0.1", port) for port in ended]
    made.agent.ended = SimpleNamespace(take=lambda: lost)
    KVConnectReceiver(made, "127.0.0.1:80", ROOM)
    assert len(made.prefill_info_table) == known
    assert {key.rsplit("_", 3)[0] for key in pool} == set(made.prefill_info_table)


def test_what_is_known_of_a_request_from_its_queue() -> None:
    room = SendRoom()
    prefill_rooms = SimpleNamespace(find=lambda number: room if number == ROOM else None)
    scheduler = SimpleNamespace(forward_stream="forward", enable_overlap=False)
    made = manager(prefill_rooms=prefill_rooms, adapters=AdapterContents())
    queue = SimpleNamespace(kv_manager=made, scheduler=scheduler)
    opened: list[PromptIdentity] = []
    req = SimpleNamespace(
        bootstrap_room=ROOM,
        disagg_kv_sender=SimpleNamespace(open=opened.append, owns_room=True, give_up=None),
        origin_input_ids=range(3 * PAGE + 1),
        lora_id=None,
        extra_key=None,
        cache_salt=None,
        multimodal_inputs=None,
    )
    hooks.after_sender(True, queue, req, 4)
    assert room.prompt_blocks == 3
    assert [prompt.tokens for prompt in opened] == [3 * PAGE + 1]
    assert (queue.kv_manager.streams.forward, queue.kv_manager.overlaps) == ("forward", False)
    stock = SimpleNamespace(kv_manager=SimpleNamespace(), scheduler=scheduler)
    hooks.after_sender(True, stock, req, 4)  # SGLang's own backends are left alone


@pytest.mark.parametrize("compares", [True, False])
def test_media_of_an_encoder_server_have_other_hashes(compares: bool) -> None:
    """Of one image, prefill has embeddings, and decode has pixels."""

    def prompt(content: int) -> PromptIdentity:
        item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(1, 6)])
        item.set_hash(content)
        req = SimpleNamespace(
            origin_input_ids=array("q", [7, *item.padding_sequence(6), 8]),
            lora_id=None,
            extra_key=None,
            cache_salt=None,
            multimodal_inputs=MultimodalInputs([item]),
        )
        return prompt_identity(req, None, AdapterContents(), compares_media=compares)

    assert difference(prompt(5), prompt(5)) == ""
    assert bool(difference(prompt(5), prompt(6))) == compares


def described(**sizes: int) -> Any:
    """What a bootstrap server says of its prefill engine."""
    known = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, **sizes}
    return PrefillServerInfo(
        **known, page_size=PAGE, kv_cache_dtype=None, follow_bootstrap_room=True
    )


@pytest.mark.parametrize("name", ["attn_tp_size", "attn_cp_size", "dp_size", "pp_size"])
@pytest.mark.parametrize("size", [0, -1, 10**9])
def test_sizes_that_no_engine_has_are_refused(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's scheduler would divide by them, or list as many ranks."""
    mapped: list[Any] = []
    monkeypatch.setattr(
        CommonKVManager, "_resolve_rank_mapping", lambda _self, info: mapped.append(info)
    )
    with pytest.raises(ValueError, match=f"{name} is {size}"):
        manager()._resolve_rank_mapping(described(**{name: size}))
    assert mapped == []
    manager()._resolve_rank_mapping(described(dp_size=8))
    assert len(mapped) == 1


@pytest.mark.parametrize("rank", ["x", None, -1, 1e3, True, 10**9])
def test_ranks_that_are_none_are_left_out(rank: Any) -> None:
    assert hooks.around_ranks(lambda *_: {"5": 3, "6": rank}, "127.0.0.1:80", [5, 6]) == {"5": 3}


@pytest.mark.parametrize("answer", [[], "x", 7, None])
def test_an_answer_about_ranks_that_is_no_object_names_none(answer: Any) -> None:
    assert hooks.around_ranks(lambda *_: answer, "127.0.0.1:80", [5]) == {}


def test_receivers_of_sglang_s_own_are_left_alone() -> None:
    """Those of warm-up requests, beside this backend's."""
    scheduler = SimpleNamespace(forward_stream="forward")
    queue = SimpleNamespace(kv_manager=manager(decode_rooms=object()), scheduler=scheduler)
    hooks.after_receiver(SimpleNamespace(kv_receiver=FakeKVReceiver.__new__(FakeKVReceiver)), queue)
    assert queue.kv_manager.streams.forward != "forward"


def test_sglang_uses_what_follows_no_redirect() -> None:
    """All that the module of its clients takes from ``requests`` is there in its place."""
    used = {*re.findall(r"\brequests\.(\w+)", Path(conn.__file__).read_text())}
    module: Any = SimpleNamespace()
    direct_requests.install(module)
    assert used <= {*vars(module.requests)}
    assert {"get", "Session"} <= used, "the control"
