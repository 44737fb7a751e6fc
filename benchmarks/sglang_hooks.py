"""What the hooks of layer-wise push cost SGLang's scheduler thread: a part of sglang_handoff.

A prefill and a decode worker live in this process, with caches of 32 layers, joined by the TCP
transport. The decode side asks for a chunk of 512 tokens; then a forward that computes nothing,
but sleeps 1 ms per layer, runs with the hooks around it and its attention layers, and once without.
Pages really leave. What counts is the time spent in the hooks.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import timed
from benchmarks.settings import chosen
from kvconnect.disaggregation.agent import HandoffAgent, start_agent
from kvconnect.engines.sglang import layerwise, translate
from kvconnect.engines.sglang.decode_rooms import DecodeRooms, RoomRequest
from kvconnect.engines.sglang.rooms import PrefillRooms
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.settings import Settings
from kvconnect.types import Endpoint, Rank

SAME = Identity(weights=Weights(version="of this benchmark"))
LAYERS, HEADS, WIDTH, PAGE = 32, 8, 128, 16  # of a model of 8 billion weights
CHUNK = 512  # tokens
PAGES = CHUNK // PAGE
LAYER_S = 0.001  # of computing, which leaves the interpreter to other threads
TIMEOUT_S = 30.0
ALONE = Rank(0, 1, 0, 1)


class Side:
    """One worker: its KV cache, in bfloat16, and its agent."""

    def __init__(self, address: tuple[str, int] | None) -> None:
        shape = (2 * LAYERS, PAGES, PAGE * HEADS * WIDTH)
        self.tensors = list(torch.zeros(shape, dtype=torch.bfloat16))
        model = translate.Model(
            "hooks", "bfloat16", ALONE, HEADS, (0, LAYERS), is_mla=False, device=-1
        )
        args = _arguments(self.tensors)
        self.cache = translate.describe(args, model, SAME)
        self.names = translate.layer_names(self.cache, args)
        settings = Settings(**chosen("sglang_hooks", transport="tcp"))
        self.agent = start_agent(settings, self.cache, address, TIMEOUT_S)


def _arguments(tensors: list[torch.Tensor]) -> Any:
    return SimpleNamespace(
        kv_data_ptrs=[tensor.data_ptr() for tensor in tensors],
        kv_data_lens=[tensor.nbytes for tensor in tensors],
        kv_item_lens=[tensor[0].nbytes for tensor in tensors],
        kv_layer_ids=[],
        kv_cache_dtype_str="bfloat16",
        aux_data_ptrs=[],
        aux_data_lens=[],
        aux_item_lens=[],
        state_types=[],
        state_data_ptrs=[],
        state_data_lens=[],
        state_item_lens=[],
        state_layer_ids=[],
        page_size=PAGE,
    )


def hook_us(rounds: int) -> float:
    """Return the microseconds that the hooks add to one layer of one forward, the median over
    forwards, with the work around the batch spread over its layers."""
    with ExitStack() as stack:
        source = Side(("127.0.0.1", 0))
        stack.callback(source.agent.close)
        target = Side(None)
        stack.callback(target.agent.close)
        return _measure(source, target, rounds)


def _measure(source: Side, target: Side, rounds: int) -> float:
    ready, served, arrived = set[int](), set[int](), set[int]()
    prefill_rooms = PrefillRooms(source.agent, ALONE, [HEADS], ready.add, served.add, _fail)
    decode_rooms = DecodeRooms(target.agent, ALONE, [(PAGE, HEADS)], TIMEOUT_S, arrived.add, _fail)
    assert source.agent.address is not None
    peer = (Endpoint(0, 0, *source.agent.address),)
    pages = array("q", range(PAGES))
    layerwise.follow_layers(source.agent, prefill_rooms, source.names, once=True)
    hooked, plain = [], []
    for room in range(1, rounds + 1):
        prefill_rooms.open(room)
        decode_rooms.request(room, RoomRequest(0, pages, (), peer, 1, 1))
        _until(lambda room=room: room in ready, source.agent, prefill_rooms.take)
        scheduler, batch = _scheduler(), _batch(room)
        hooked.append(_forward(scheduler, batch, layerwise))
        plain.append(_forward(scheduler, batch, _NoHooks))
        prefill_rooms.complete(room)
        _until(lambda room=room: room in arrived, target.agent, decode_rooms.take, finished=True)
        prefill_rooms.close(room)
    return (statistics.median(hooked) - statistics.median(plain)) / LAYERS * 1e6


class _NoHooks:
    """Calls what the hooks are around."""

    @staticmethod
    def around_run_batch(original: Callable[..., Any], *args: Any) -> Any:
        return original(*args)

    around_attention = around_run_batch


def _forward(scheduler: Any, batch: Any, hooks: Any) -> float:
    """Return the seconds that one forward spends in hooks and in calling what they are around."""
    layers = [SimpleNamespace(layer_id=number) for number in range(LAYERS)]
    inside = spent = 0.0

    def layer_of(layer: Any) -> None:
        hooks.around_attention(_nothing, None, None, None, None, layer)

    def run(*_: Any) -> None:
        nonlocal inside, spent
        started = time.perf_counter()
        for layer in layers:
            time.sleep(LAYER_S)
            spent += timed(lambda layer=layer: layer_of(layer))
        inside = time.perf_counter() - started

    return timed(lambda: hooks.around_run_batch(run, scheduler, batch)) - inside + spent


def _nothing(*_: Any) -> None:
    return None


def _fail(room: int, why: str) -> None:
    raise SystemExit(f"hand-off {room} failed: {why}")


def _scheduler() -> Any:
    allocator = SimpleNamespace(
        page_size=PAGE, translate_kv_indices_for_transfer=lambda slots: slots
    )
    table = torch.arange(CHUNK, dtype=torch.int32).view(1, CHUNK)
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        enable_overlap=False,
    )


def _batch(room: int) -> Any:
    request = SimpleNamespace(
        pending_bootstrap=False,
        disagg_kv_sender=SimpleNamespace(owns_room=True),
        bootstrap_room=room,
        extend_end=CHUNK,
        origin_input_ids=range(CHUNK),
        kv=SimpleNamespace(req_pool_idx=0),
    )
    return SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True), reqs=[request])


def _until(
    done: Callable[[], bool],
    agent: HandoffAgent,
    take: Callable[..., None],
    finished: bool = False,
) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("the hand-off did not come about")
        time.sleep(0.001)
        reports, notices = agent.poll()
        take(reports if finished else notices)
