"""Prefill and decode ranks with SGLang's buffers and real agents, without SGLang."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from kvconnect.disaggregation.agent import start_agent
from kvconnect.engines.sglang import translate
from kvconnect.engines.sglang.decode_rooms import DecodeRooms, RoomRequest
from kvconnect.engines.sglang.rooms import PrefillRooms
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity
from kvconnect.protocol.topology import head_range
from kvconnect.settings import Settings
from kvconnect.types import Endpoint, Rank, Span

PAGES, TOKENS, LAYERS, WIDTH, ROWS = 24, 4, 3, 8, 6
HYBRID = 1  # the layer that has states beside its KV
PATIENCE_S = 20.0
SAME = Identity(weights=Weights(files="same"))
ROOM = 2**63 - 9


class Rank1:
    """One rank's pools as SGLang's ``KVArgs`` describe them, and its agent."""

    def __init__(self, rank: Rank, kv_heads: int, sends: bool, state: bool = False) -> None:
        self.rank, self.kv_heads = rank, kv_heads
        first, end = head_range(rank.tp_rank, rank.tp, kv_heads)
        self.first, heads = first, end - first
        shape = (PAGES * TOKENS, heads, WIDTH)
        kinds = 1 if kv_heads == 1 else 2
        self.kv = [torch.zeros(shape) for _ in range(LAYERS * kinds)]
        self.aux = [torch.zeros(ROWS, 16, dtype=torch.int32), torch.zeros(ROWS, 40)]
        self.state = [torch.zeros(ROWS, 5, 7) for _ in range(2)] if state else []
        model = translate.Model("m", "float32", rank, kv_heads, (0, LAYERS), kv_heads == 1, -1)
        self.cache = translate.describe(self.args(), model, SAME)
        address = ("127.0.0.1", 0) if sends else None
        settings = Settings(transport="tcp")
        self.agent = start_agent(settings, self.cache, address, PATIENCE_S, True)
        self.ready: list[int] = []
        self.done: list[int] = []
        self.failed: list[str] = []

    def args(self) -> Any:
        def lists(tensors: Sequence[torch.Tensor], item: int) -> tuple[list[int], ...]:
            return (
                [tensor.data_ptr() for tensor in tensors],
                [tensor.nbytes for tensor in tensors],
                [tensor[:item].nbytes for tensor in tensors],
            )

        kv, aux, state = lists(self.kv, TOKENS), lists(self.aux, 1), lists(self.state, 1)
        kinds = [SimpleNamespace(value="mamba")] if self.state else []
        return SimpleNamespace(
            kv_data_ptrs=kv[0],
            kv_data_lens=kv[1],
            kv_item_lens=kv[2],
            kv_layer_ids=[],
            kv_cache_dtype_str="float32",
            page_size=TOKENS,
            aux_data_ptrs=aux[0],
            aux_data_lens=aux[1],
            aux_item_lens=aux[2],
            state_types=kinds,
            state_data_ptrs=[state[0]],
            state_data_lens=[state[1]],
            state_item_lens=[state[2]],
            state_layer_ids=[[HYBRID] * len(self.state)] if self.state else [],
        )

    def page(self, layer: int, page: int) -> torch.Tensor:
        return self.kv[layer][page * TOKENS : (page + 1) * TOKENS]


class Prefill(Rank1):
    def __init__(self, rank: Rank, kv_heads: int, state: bool = False) -> None:
        super().__init__(rank, kv_heads, True, state)
        for number, tensor in enumerate(self.kv):
            heads = torch.arange(self.first, self.first + tensor.shape[1])
            tensor.copy_(
                torch.arange(PAGES * TOKENS).view(-1, 1, 1) * 1000.0
                + heads.view(1, -1, 1) * 10
                + torch.arange(WIDTH) / 16
                + number * 0.001
            )
        for tensor in (*self.aux, *self.state):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
        self.names = translate.layer_names(self.cache, self.args())
        heads_by_group = [group.kv_heads for group in self.cache.hello.groups]
        self.prefill_rooms = PrefillRooms(
            self.agent,
            rank,
            heads_by_group,
            self.ready.append,
            self.done.append,
            lambda _, why: self.failed.append(why),
        )

    @property
    def endpoint(self) -> Endpoint:
        assert self.agent.address is not None
        return Endpoint(self.rank.tp_rank, self.rank.pp_rank, *self.agent.address)

    def poll_agent(self) -> None:
        self.prefill_rooms.take(self.agent.poll()[1])

    def send_all(self, pages: Sequence[int], prefix: int = 0, chunks: int = 2) -> None:
        """Send the pages after ``prefix`` in chunks, as SGLang does; the last one with the rest."""
        todo = list(pages)[prefix:]
        cut = max(1, -(-len(todo) // chunks))
        starts = list(range(0, len(todo), cut)) or [0]
        for start in starts:
            last = start == starts[-1]
            rest = [Span(translate.AUX, 0, array("q", [2]))] if last else []
            if last and self.state:
                rest.append(Span(translate.FIRST_STATE, 0, array("q", [3])))
            ids = array("q", todo[start : start + cut])
            self.prefill_rooms.send(ROOM, prefix + start, ids, rest, None)
        self.prefill_rooms.complete(ROOM)


class Decode(Rank1):
    def __init__(self, rank: Rank, kv_heads: int, state: bool = False) -> None:
        super().__init__(rank, kv_heads, False, state)
        kinds = [(group.block_tokens, group.kv_heads) for group in self.cache.hello.groups]
        self.decode_rooms = DecodeRooms(
            self.agent,
            rank,
            kinds,
            PATIENCE_S,
            self.done.append,
            lambda _, why: self.failed.append(why),
        )

    def poll_agent(self) -> None:
        self.decode_rooms.take(self.agent.poll()[0])

    def ask(
        self,
        pages: Sequence[int],
        sources: Sequence[Prefill],
        prefix: int = 0,
        prompt: PromptIdentity = NO_PROMPT,
    ) -> None:
        rest = [Span(translate.AUX, 0, array("q", [4]))]
        if self.state:
            rest.append(Span(translate.FIRST_STATE, 0, array("q", [1])))
        tp, pp = sources[0].rank.tp, sources[0].rank.pp
        mine, ids = tuple(source.endpoint for source in sources), array("q", pages[prefix:])
        request = RoomRequest(prefix, ids, tuple(rest), mine, tp, pp, prompt)
        self.decode_rooms.request(ROOM, request)


def engines(
    closing: ExitStack, sizes: tuple[int, int], kv_heads: int, state: bool = False
) -> tuple[list[Prefill], list[Decode]]:
    prefill = [Prefill(Rank(n, sizes[0], 0, 1), kv_heads, state) for n in range(sizes[0])]
    decode = [Decode(Rank(n, sizes[1], 0, 1), kv_heads, state) for n in range(sizes[1])]
    for each in (*prefill, *decode):
        closing.callback(each.agent.close)
    return prefill, decode


def until(ranks: Sequence[Rank1], over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not over():
        assert time.monotonic() < deadline, [(r.ready, r.done, r.failed) for r in ranks]
        for rank in ranks:
            rank.agent.news.wait(0.003)
            rank.poll_agent()  # type: ignore[attr-defined]


def paired(decode: Decode, prefill: Sequence[Prefill], sizes: tuple[int, int]) -> list[Prefill]:
    """Return the prefill ranks that SGLang pairs a decode rank with."""
    if sizes[0] <= sizes[1]:
        return [prefill[decode.rank.tp_rank // (sizes[1] // sizes[0])]]
    share = sizes[0] // sizes[1]
    return list(prefill[decode.rank.tp_rank * share : (decode.rank.tp_rank + 1) * share])


def expected(decode: Decode, layer: int, page: int) -> torch.Tensor:
    """Return what a source with all heads has in a page, cut to this rank's heads."""
    tokens = torch.arange(page * TOKENS, (page + 1) * TOKENS).view(-1, 1, 1) * 1000.0
    count = decode.kv[layer].shape[1]
    heads = torch.arange(decode.first, decode.first + count).view(1, -1, 1) * 10
    return tokens + heads + torch.arange(WIDTH) / 16 + layer * 0.001
