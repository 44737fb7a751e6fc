"""SGLang's buffers handed from prefill ranks to decode ranks by real agents, without SGLang."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch

from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.disaggregation.messages import DisaggregationInstructions, OfferBlocks
from kvconnect.engines.sglang import bootstrap, translate
from kvconnect.engines.sglang.bootstrap import BootstrapAddresses
from kvconnect.engines.sglang.layerwise import DeferredFrees, LayerwisePush, deferring_frees
from kvconnect.engines.sglang.rooms import SendRoom, is_room, room_of, transfer_of
from kvconnect.errors import Incompatible
from kvconnect.protocol.prompts import difference, identify
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Rank, Span
from tests.unit.engines.sglang_ranks import (
    HYBRID,
    LAYERS,
    PATIENCE_S,
    ROOM,
    SAME,
    TOKENS,
    Decode,
    Prefill,
    engines,
    expected,
    paired,
    until,
)
from tests.unit.engines.sglang_scheduler import (
    Allocator,
    Scheduler,
    batch_of,
    request_of,
    slots_of,
)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


AUX_ROW = Span(translate.AUX, 0, array("q", [2]))
SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (1, 4), (8, 1), (2, 8)]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"tp{sizes[0]}-tp{sizes[1]}")
@pytest.mark.parametrize("kv_heads", [1, 4], ids=["mla", "gqa4"])
def test_every_rank_gets_its_heads(
    closing: ExitStack, sizes: tuple[int, int], kv_heads: int
) -> None:
    prefill, decode = engines(closing, sizes, kv_heads)
    here, there = [3, 9, 4, 11, 5], [7, 2, 13, 1, 20]
    for source in prefill:
        source.prefill_rooms.open(ROOM)
    for reader in decode:
        reader.ask(there, paired(reader, prefill, sizes))
    until([*prefill, *decode], lambda: all(source.ready for source in prefill))
    assert not any(source.done for source in prefill)
    for source in prefill:
        source.send_all(here)
    everyone = [*prefill, *decode]
    until(everyone, lambda: all(rank.done == [ROOM] for rank in everyone))
    assert not [why for rank in everyone for why in rank.failed]
    for reader in decode:
        assert reader.decode_rooms.is_over(ROOM)
        for layer in range(len(reader.kv)):
            for ours, theirs in zip(there, here, strict=True):
                got, want = reader.page(layer, ours), expected(reader, layer, theirs)
                assert torch.equal(got, want), (layer, ours)
            assert not reader.page(layer, 8).any()  # nobody asked for it
        for row, tensor in enumerate(reader.aux):
            assert torch.equal(tensor[4], prefill[0].aux[row][2])
    sent = sum(moved.nbytes for s in prefill if (moved := s.prefill_rooms.moved(ROOM)) is not None)
    page_bytes = sum(r.page(n, 0).nbytes for r in decode for n in range(len(r.kv)))
    aux_bytes = sum(tensor[0].nbytes for tensor in decode[0].aux) * len(decode)
    assert sent == page_bytes * len(here) + aux_bytes


@pytest.mark.parametrize("late", [False, True], ids=["reader first", "prefill first"])
def test_a_reader_of_another_prompt_fails_both_sides_at_once(
    closing: ExitStack, late: bool
) -> None:
    """Both have the same number of pages, so nothing else would tell."""
    ours, theirs = identify([1, 2, 3], None), identify([1, 2, 4], None)
    prefill, (reader,) = engines(closing, (2, 1), 4)
    pages = [3, 9, 4]
    steps = [
        lambda: [source.prefill_rooms.open(ROOM, ours) for source in prefill],
        lambda: reader.ask(pages, prefill, prompt=theirs),
    ]
    for step in steps if late else reversed(steps):
        step()
    everyone = [*prefill, reader]
    # SGLang fails a request on all prefill ranks if it fails on one.
    until(everyone, lambda: bool(reader.failed) and any(source.failed for source in prefill))
    for why in (why for rank in everyone for why in rank.failed):
        assert difference(ours, theirs) in why
    assert not any(rank.ready or rank.done for rank in everyone)
    assert not any(reader.page(0, page).any() for page in pages)
    # Control: with prefill's prompt, the pages are handed off. Other engines: the second source may
    # hear of the first reader only now.
    prefill, (reader,) = engines(closing, (2, 1), 4)
    everyone = [*prefill, reader]
    for source in prefill:
        source.prefill_rooms.open(ROOM, ours)
    reader.ask(pages, prefill, prompt=ours)
    until(everyone, lambda: all(source.ready for source in prefill))
    for source in prefill:
        source.send_all(pages)
    until(everyone, lambda: all(rank.done for rank in everyone))


def test_a_prefix_that_decode_has_is_not_sent_again(closing: ExitStack) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 2)
    here, there = [3, 9, 4, 11], [7, 2, 13, 1]
    source.prefill_rooms.open(ROOM)
    reader.ask(there, [source], prefix=3)
    until([source, reader], lambda: bool(source.ready))
    assert source.prefill_rooms.prefix(ROOM) == 3
    source.send_all(here, prefix=3)
    until([source, reader], lambda: bool(reader.done and source.done))
    assert torch.equal(reader.page(0, 1), expected(reader, 0, 11))
    assert not reader.page(0, 13).any()


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("kv_heads", [1, 4], ids=["mla", "gqa4"])
def test_a_prompt_that_decode_has_whole_still_brings_its_row(
    closing: ExitStack, sizes: tuple[int, int], kv_heads: int
) -> None:
    """A rank that holds heads, but not the row, is told that nothing is read from it."""
    prefill, decode = engines(closing, sizes, kv_heads)
    everyone = [*prefill, *decode]
    for source in prefill:
        source.prefill_rooms.open(ROOM)
    for reader in decode:
        reader.ask([7, 2], paired(reader, prefill, sizes), prefix=2)
    until(everyone, lambda: all(source.ready for source in prefill))
    # SGLang's checksum covers what is sent. Ranks with other heads have none to compare.
    held = [source.prefill_rooms.prefix(ROOM) for source in prefill]
    assert held[0] == 2 and (sizes[0] > sizes[1] or held == [2] * len(held))
    for source in prefill:
        source.send_all([3, 9], prefix=2)
    until(everyone, lambda: all(rank.done for rank in everyone))
    for reader in decode:
        assert torch.equal(reader.aux[0][4], prefill[0].aux[0][2])
        assert not any(tensor.any() for tensor in reader.kv)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_prefill_does_not_wait_for_a_request_that_ended_before_it_asked(
    closing: ExitStack, sizes: tuple[int, int]
) -> None:
    prefill, (reader,) = engines(closing, sizes, 4)
    for source in prefill:
        source.prefill_rooms.open(ROOM)
    workers = [source.endpoint for source in prefill]
    reader.decode_rooms.decline(ROOM, workers, *sizes)
    until([*prefill, reader], lambda: all(source.ready for source in prefill))
    for source in prefill:
        source.send_all([3, 9])
    assert all(source.done for source in prefill)


def test_prefill_does_not_wait_for_a_reader_that_left_before_it_began(closing: ExitStack) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    reader.ask([7], [source])
    planner = source.agent._sending._sender
    until([source, reader], lambda: bool(planner._parked))
    reader.decode_rooms.drop(ROOM)
    until([source, reader], lambda: not planner._parked)
    source.prefill_rooms.open(ROOM)
    until([source, reader], lambda: bool(source.ready))


def test_state_goes_with_the_last_chunk(closing: ExitStack) -> None:
    prefill, decode = engines(closing, (2, 2), 4, state=True)
    for source in prefill:
        source.prefill_rooms.open(ROOM)
    for reader, source in zip(decode, prefill, strict=True):
        reader.ask([7], [source])
    until([*prefill, *decode], lambda: all(source.ready for source in prefill))
    for source in prefill:
        source.send_all([3])
    until([*prefill, *decode], lambda: all(reader.done for reader in decode))
    for reader, source in zip(decode, prefill, strict=True):
        for got, want in zip(reader.state, source.state, strict=True):
            assert torch.equal(got[1], want[3])


def test_state_of_another_number_of_ranks_is_refused_at_once(closing: ExitStack) -> None:
    (source,), decode = engines(closing, (1, 2), 4, state=True)
    source.prefill_rooms.open(ROOM)
    decode[0].ask([7], [source])
    until([source, decode[0]], lambda: bool(decode[0].failed))
    assert "refused" in decode[0].failed[0]
    assert "state_tp is 2 on the decode side, 1 on the prefill side" in decode[0].failed[0]
    stats = decode[0].agent.take_stats()
    assert stats is not None
    counters = stats.data["counters"]
    assert counters["handoff_received_requests"] == {"failed": 1}
    assert counters["handoff_failures"] == {"refused": 1}


def test_one_that_cannot_be_served_leaves_others_alone(closing: ExitStack) -> None:
    (source,), (good,) = engines(closing, (1, 1), 4)
    bad = Decode(Rank(0, 1, 0, 1), 2)  # another model
    closing.callback(bad.agent.close)
    source.prefill_rooms.open(ROOM)
    bad.ask([7], [source])
    until([source, bad], lambda: bool(bad.failed))
    good.ask([7], [source])
    until([source, good], lambda: bool(source.ready))
    source.send_all([3])
    until([source, good], lambda: bool(good.done))
    assert not source.failed


def test_pages_are_not_free_before_nothing_can_land(closing: ExitStack) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    source.prefill_rooms.open(ROOM)
    reader.ask([7], [source])
    until([source, reader], lambda: bool(source.ready))
    reader.decode_rooms.drop(ROOM)
    assert not reader.decode_rooms.is_over(ROOM)
    until([source, reader], lambda: reader.decode_rooms.is_over(ROOM))
    until([source, reader], lambda: bool(source.failed))
    assert "cancelled the transfer" in source.failed[0]
    source.send_all([3])
    # The next request of the room comes after all that was sent.
    source.prefill_rooms.close(ROOM)
    source.ready.clear()
    source.prefill_rooms.open(ROOM)
    reader.ask([8], [source])
    until([source, reader], lambda: bool(source.ready))
    source.send_all([4])
    until([source, reader], lambda: bool(reader.done))
    assert torch.equal(reader.page(0, 8), expected(reader, 0, 4))
    assert not reader.page(0, 7).any()
    assert not reader.failed


def test_a_room_given_to_two_requests_is_over_when_both_are(closing: ExitStack) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    source.prefill_rooms.open(ROOM)
    reader.ask([7], [source])
    until([source, reader], lambda: bool(source.ready))
    reader.ask([8], [source])  # waits for the room to be opened again
    until([source, reader], lambda: bool(source.agent._sending._sender._parked))
    assert not reader.decode_rooms.is_over(ROOM)  # page 7 may still be written
    reader.decode_rooms.drop(ROOM)
    until([source, reader], lambda: reader.decode_rooms.is_over(ROOM))


@pytest.mark.parametrize("state", ["complete", "under way"])
def test_a_room_is_asked_for_again_before_prefill_has_closed_it(
    closing: ExitStack, state: str
) -> None:
    """SGLang retracts a request and lets prefill compute it once more, in the same room."""
    (source,), (reader,) = engines(closing, (1, 1), 4)
    source.prefill_rooms.open(ROOM)
    reader.ask([7, 2], [source])
    until([source, reader], lambda: bool(source.ready))
    if state == "complete":
        source.send_all([3, 9])
        until([reader], lambda: bool(reader.done))
    else:
        reader.decode_rooms.drop(ROOM)
    reader.ask([11, 12, 13], [source])
    planner = source.agent._sending._sender
    until([reader], lambda: bool(planner._parked or reader.failed))
    assert not reader.failed
    source.poll_agent()
    source.prefill_rooms.close(ROOM)  # SGLang's loop comes round
    source.ready.clear()
    source.done.clear()
    reader.done.clear()
    source.prefill_rooms.open(ROOM)
    until([source, reader], lambda: bool(source.ready))
    source.send_all([4, 5, 6])
    until([source, reader], lambda: bool(reader.done and source.done))
    for ours, page in zip([11, 12, 13], [4, 5, 6], strict=True):
        assert torch.equal(reader.page(0, ours), expected(reader, 0, page))


def test_a_second_reader_does_not_move_what_the_first_one_has(closing: ExitStack) -> None:
    """Of another rank, and from another block on: SGLang counts pages from the first one's."""
    (source,), (reader,) = engines(closing, (1, 1), 4)
    second = Decode(Rank(1, 2, 0, 1), 4)
    closing.callback(second.agent.close)
    here, there = [3, 9, 4, 11, 5], [7, 2, 13, 1, 20]
    source.prefill_rooms.open(ROOM)
    reader.ask(there, [source])
    until([source, reader], lambda: bool(source.ready))
    source.prefill_rooms.send(
        ROOM, source.prefill_rooms.prefix(ROOM), array("q", here[:2]), [], None
    )
    second.ask(there, [source], prefix=3)
    stats = OffloadingConnectorStats()

    def turned_away() -> bool:
        stats.aggregate(source.agent.take_stats() or OffloadingConnectorStats())
        return bool(stats.data.get("counters", {}).get("handoff_refused"))

    until([source, reader, second], turned_away)
    assert source.prefill_rooms.prefix(ROOM) == 0
    rest = [Span(translate.AUX, 0, array("q", [2]))]
    source.prefill_rooms.send(ROOM, 2, array("q", here[2:]), rest, None)
    source.prefill_rooms.complete(ROOM)
    until([source, reader, second], lambda: bool(reader.done and source.done))
    assert not source.failed
    for ours, page in zip(there, here, strict=True):
        assert torch.equal(reader.page(0, ours), expected(reader, 0, page))


def test_a_reader_that_has_more_than_the_prompt_fails_at_once(closing: ExitStack) -> None:
    """SGLang would send nothing, and wait for ever."""
    (source,), (reader,) = engines(closing, (1, 1), 4)
    source.prefill_rooms.open(ROOM)
    room = source.prefill_rooms.find(ROOM)
    assert room is not None
    room.prompt_blocks = 2
    reader.ask([7, 2, 13, 1], [source], prefix=3)
    until([source, reader], lambda: bool(source.failed and reader.failed))
    assert "3 blocks of a prompt of 2" in source.failed[0]
    assert not source.ready


def test_a_request_that_prefill_gives_up_fails_on_decode(closing: ExitStack) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    source.prefill_rooms.open(ROOM)
    reader.ask([7], [source])
    until([source, reader], lambda: bool(source.ready))
    source.prefill_rooms.close(ROOM)
    until([source, reader], lambda: bool(reader.failed))
    assert "gone" in reader.failed[0]
    assert reader.decode_rooms.is_over(ROOM)


def test_who_asks_for_a_request_that_is_over_is_told_at_once(closing: ExitStack) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    source.prefill_rooms.open(ROOM)
    source.prefill_rooms.close(ROOM)  # before anybody asked
    reader.ask([7], [source])
    until([source, reader], lambda: bool(reader.failed))
    assert "gone" in reader.failed[0]
    source.prefill_rooms.open(ROOM)
    source.prefill_rooms.close(ROOM)
    source.prefill_rooms.open(ROOM)  # used again: that request is another one
    reader.ask([7], [source])
    until([source, reader], lambda: bool(source.ready))
    source.send_all([3])
    until([source, reader], lambda: bool(reader.done))


def test_a_prefill_rank_that_dies_fails_what_waits_for_it(closing: ExitStack) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    source.prefill_rooms.open(ROOM)
    reader.ask([7], [source])
    until([source, reader], lambda: bool(source.ready))
    source.agent.close()
    until([reader], lambda: bool(reader.failed))
    assert "peer" in reader.failed[0]


def test_layers_go_while_the_chunk_computes(closing: ExitStack) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    here, there = [3, 9, 4], [7, 2, 13]
    push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
    source.prefill_rooms.open(ROOM)
    reader.ask(there, [source])
    until([source, reader], lambda: bool(source.ready))
    request = request_of(TOKENS * 3, TOKENS * 2 + 1)  # the third page is begun, not full
    push.begin(Scheduler(here), batch_of(request))
    push.layer(0)
    first = [tensor[2 * TOKENS : 3 * TOKENS] for tensor in reader.kv]
    until([source, reader], lambda: bool(first[0].any() and first[LAYERS].any()))
    assert not first[1].any()  # its layer has not been computed
    push.layer(0)  # some backends call several times
    push.layer(1)
    push.layer(2)
    push.end()
    source.send_all(here, chunks=3)  # only what has not gone goes now
    until([source, reader], lambda: bool(reader.done and source.done))
    for layer in range(len(reader.kv)):
        for ours, theirs in zip(there, here, strict=True):
            assert torch.equal(reader.page(layer, ours), expected(reader, layer, theirs))
    assert not (source.failed or reader.failed)
    stats = source.agent.take_stats()
    assert stats is not None
    # K and V of a layer as one, then the page that was not full, and the row.
    assert stats.reduce()["SEND_operations"] == LAYERS + 2


def test_a_silent_forward_is_handed_off_at_its_end(
    closing: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
    source.prefill_rooms.open(ROOM)
    reader.ask([7], [source])
    until([source, reader], lambda: bool(source.ready))
    push.begin(Scheduler([3]), batch_of(request_of(TOKENS, TOKENS)))
    push.end()
    until([source, reader], lambda: bool(reader.page(2, 7).any()))
    assert "could not be followed" in caplog.text
    source.send_all([3])
    until([source, reader], lambda: bool(reader.done and source.done))


NOT_FINAL = -1.0  # what a state holds before its layer has run


def pushing_states(
    closing: ExitStack, names: Callable[[translate.LayerNames], translate.LayerNames]
) -> tuple[Prefill, Decode, LayerwisePush]:
    """Return both ends of a hand-off that can begin; the states in slot 3 are not final."""
    (source,), (reader,) = engines(closing, (1, 1), 4, state=True)
    push = LayerwisePush(source.agent, source.prefill_rooms, names(source.names))
    source.prefill_rooms.open(ROOM)
    reader.ask([7, 2], [source])
    until([source, reader], lambda: bool(source.ready))
    for tensor in source.state:
        tensor[3] = NOT_FINAL
    return source, reader, push


def as_they_are(names: translate.LayerNames) -> translate.LayerNames:
    return names


def with_attention(names: translate.LayerNames) -> translate.LayerNames:
    """The mistake: a layer's state counted as final when its attention has run."""
    states = {layer: (*names.kv[layer], *names.states[layer]) for layer in names.states}
    return names._replace(kv={**names.kv, **states})


@pytest.mark.parametrize("right", [True, False], ids=["linear", "attention"])
def test_states_go_after_their_layer_in_the_step_that_ends_the_prompt(
    closing: ExitStack, right: bool
) -> None:
    source, reader, push = pushing_states(closing, as_they_are if right else with_attention)
    both = [source, reader]
    scheduler, got = Scheduler([3, 9]), [tensor[1] for tensor in reader.state]
    push.begin(scheduler, batch_of(request_of(TOKENS * 2, TOKENS)))
    push.layer(HYBRID, linear=True)  # more of the prompt follows, and changes the state
    push.layer(HYBRID)
    push.end()
    until(both, lambda: all(reader.page(layer, 7).any() for layer in range(len(reader.kv))))
    assert not any(state.any() for state in got)

    push.begin(scheduler, batch_of(request_of(TOKENS * 2, TOKENS * 2)))
    push.layer(HYBRID)
    until(both, lambda: bool(reader.page(HYBRID, 2).any()))
    if not right:
        until(both, lambda: all(bool(state.any()) for state in got))
    assert not right or not any(state.any() for state in got)
    for number, tensor in enumerate(source.state):
        tensor[3] = number + 1
    push.layer(HYBRID, linear=True)
    until(both, lambda: all(bool(state.any()) for state in got))
    assert not reader.page(0, 2).any()  # the step goes on
    push.end()
    source.send_all([3, 9], chunks=1)
    until(both, lambda: bool(reader.done and source.done))
    assert [bool((state == n + 1).all()) for n, state in enumerate(got)] == [right] * len(got)
    stats = source.agent.take_stats()
    assert stats is not None
    # Layers of two pages; the states and the row, once each.
    pages = LAYERS * 2
    assert stats.reduce()["SEND_operations"] == pages + len(got) + 1


def test_states_that_no_call_follows_go_at_the_end_of_the_forward(closing: ExitStack) -> None:
    source, reader, push = pushing_states(closing, as_they_are)
    push.begin(Scheduler([3, 9]), batch_of(request_of(TOKENS * 2, TOKENS * 2)))
    push.layer(HYBRID)
    until([source, reader], lambda: bool(reader.page(HYBRID, 2).any()))
    assert not any(tensor.any() for tensor in reader.state)
    for number, tensor in enumerate(source.state):
        tensor[3] = number + 1
    push.end()
    until([source, reader], lambda: all(bool(tensor[1].any()) for tensor in reader.state))
    source.send_all([3, 9], chunks=1)
    until([source, reader], lambda: bool(reader.done and source.done))
    for number, tensor in enumerate(reader.state):
        assert (tensor[1] == number + 1).all()


def test_a_state_that_moves_while_it_is_sent_fails_the_request(closing: ExitStack) -> None:
    source, reader, push = pushing_states(closing, as_they_are)
    push.begin(Scheduler([3, 9], state=2), batch_of(request_of(TOKENS * 2, TOKENS * 2)))
    push.end()
    source.send_all([3, 9], chunks=1)  # its state from slot 3
    until([source, reader], lambda: bool(reader.failed))
    assert "moved to another slot" in source.failed[0]
    assert not reader.done


def test_a_state_that_was_offered_alone_is_withdrawn_with_its_room(closing: ExitStack) -> None:
    """Decode has declined, so nobody reads. The next request of the room has another state."""
    (source,), (reader,) = engines(closing, (1, 1), 4, state=True)
    push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
    source.prefill_rooms.open(ROOM)
    room = source.prefill_rooms.find(ROOM)
    assert room is not None
    room.waiting = frozenset()
    push.begin(Scheduler([3]), batch_of(request_of(TOKENS - 1, TOKENS - 1)))  # no whole page
    push.end()
    source.prefill_rooms.close(ROOM)
    source.prefill_rooms.open(ROOM)
    for tensor in source.state:
        tensor[5] = 6.0
    reader.ask([7], [source])
    until([source, reader], lambda: bool(source.ready))
    source.send_all([3], chunks=1)
    until([source, reader], lambda: bool(reader.done and source.done))
    assert not source.failed


class Held:
    """A link that is busy with other pages: what is submitted goes when it is let go."""

    def __init__(self, source: Prefill) -> None:
        self.transport = source.agent._sessions.transport
        self.queued: list[Any] = []
        self.submit = self.transport.submit
        self.transport.submit = self.queued.append  # type: ignore[method-assign]

    def let_go(self) -> None:
        self.transport.submit = self.submit  # type: ignore[method-assign]
        for job in self.queued:
            self.submit(job)


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "freed"])
def test_pages_that_the_tree_frees_while_they_are_sent(closing: ExitStack, deferred: bool) -> None:
    """Another prompt with the same beginning was entered first: SGLang frees this one's own pages,
    and the next batch writes to those that are free. Without the hook that is seen, and fails."""
    (source,), (reader,) = engines(closing, (1, 1), 4)
    own, tree, there = [3, 9, 4], [15, 16, 4], [7, 2, 13]
    for one, other in zip(own[:2], tree[:2], strict=True):  # the same was computed twice
        for layer in range(len(source.kv)):
            source.page(layer, other).copy_(source.page(layer, one))
    push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
    source.prefill_rooms.open(ROOM)
    reader.ask(there, [source])
    until([source, reader], lambda: bool(source.ready))
    link = Held(source)
    scheduler, request = Scheduler(own), request_of(TOKENS * 3, TOKENS * 3)
    push.begin(scheduler, batch_of(request))
    for layer in range(LAYERS):
        push.layer(layer)
    push.end()
    until([source, reader], lambda: len(link.queued) >= LAYERS)
    with push.entering(scheduler, request) if deferred else nullcontext():
        scheduler.checkpoint(2, tree)
    allocator = scheduler.token_to_kv_pool_allocator
    assert allocator.freed == ([] if deferred else own[:2])
    for page in allocator.freed:
        for layer in range(len(source.kv)):
            source.page(layer, page).fill_(-1.0)
    source.send_all(tree, chunks=1)  # what SGLang sends: the row as it is now
    link.let_go()
    until([source, reader], lambda: bool(reader.done or reader.failed))
    if deferred:
        until([source], lambda: bool(source.done))
        for layer in range(len(reader.kv)):
            for ours, page in zip(there, own, strict=True):
                assert torch.equal(reader.page(layer, ours), expected(reader, layer, page))
    else:
        assert reader.failed and not reader.done
        assert "moved to another page" in source.failed[0]
    source.prefill_rooms.close(ROOM)
    assert allocator.freed == own[:2]  # once


def test_a_room_that_keeps_pages_offers_no_more_of_its_own_ahead(closing: ExitStack) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    own, tree, there = [3, 9, 4], [15, 9, 4], [7, 2, 13]
    for layer in range(len(source.kv)):
        source.page(layer, 15).copy_(source.page(layer, 3))
    push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
    source.prefill_rooms.open(ROOM)
    reader.ask(there, [source])
    until([source, reader], lambda: bool(source.ready))
    scheduler, request = Scheduler(own), request_of(TOKENS * 3, TOKENS)
    push.begin(scheduler, batch_of(request))
    push.end()
    with push.entering(scheduler, request):
        scheduler.checkpoint(1, tree)
    room = source.prefill_rooms.find(ROOM)
    assert room is not None and [pages() for pages in room.deferred_pages] == [{3}]
    request.kv.cache_protected_len = TOKENS
    request.extend_end = 3 * TOKENS
    push.begin(scheduler, batch_of(request))
    push.end()
    assert room.next_block == 1
    source.send_all(tree, chunks=1)
    until([source, reader], lambda: bool(reader.done and source.done))
    for layer in range(len(reader.kv)):
        for ours, page in zip(there, own, strict=True):
            assert torch.equal(reader.page(layer, ours), expected(reader, layer, page))


@pytest.mark.parametrize("end", ["served", "given up", "closed", "freed"])
def test_a_sent_page_that_the_tree_has_not_is_kept_until_its_room_is_closed(
    closing: ExitStack, end: str
) -> None:
    """Without layers: with keys of two tokens the tree lacks the last page of a chunk, which has
    been sent. Another prompt enters it before this one's next chunk. Pages that were not sent are
    freed at once. Without the hook all are, and decode gets what is written next (control)."""
    (source,), (reader,) = engines(closing, (1, 1), 4)
    own, tree, there = [3, 9, 4, 11], [3, 15, 16, 11], [7, 2, 13, 5]
    for one, other in zip(own, tree, strict=True):
        for layer in range(len(source.kv)):
            source.page(layer, other).copy_(source.page(layer, one))
    push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
    source.prefill_rooms.open(ROOM)
    reader.ask(there, [source])
    until([source, reader], lambda: bool(source.ready))
    link = Held(source)
    scheduler, request = Scheduler(own), request_of(TOKENS * 4, TOKENS * 2)
    allocator, hooked = scheduler.token_to_kv_pool_allocator, end != "freed"
    with push.entering(scheduler, request) if hooked else nullcontext():
        request.kv.cache_protected_len = TOKENS
    source.prefill_rooms.send(ROOM, 0, array("q", own[:2]), [], None)
    request.extend_end = TOKENS * 4
    with push.entering(scheduler, request) if hooked else nullcontext():
        scheduler.checkpoint(3, tree, start=1)
    assert allocator.freed == ([4] if hooked else [9, 4])
    for page in allocator.freed:
        for layer in range(len(source.kv)):
            source.page(layer, page).fill_(-1.0)
    if end == "given up":
        source.prefill_rooms.give_up(ROOM, "prefill has failed")
    if end in ("served", "freed"):
        source.prefill_rooms.send(ROOM, 2, array("q", tree[2:]), [AUX_ROW], None)
        source.prefill_rooms.complete(ROOM)
        link.let_go()
        until([source, reader], lambda: bool(reader.done and source.done))
        right = [torch.equal(reader.page(0, 2), expected(reader, 0, 9))]
        right += [torch.equal(reader.page(0, 13), expected(reader, 0, 4))]
        assert right == [hooked, True]
    assert (9 in allocator.freed) != hooked
    source.prefill_rooms.close(ROOM)
    assert sorted(allocator.freed) == [4, 9]


def test_a_room_that_keeps_pages_also_keeps_what_is_sent_later(closing: ExitStack) -> None:
    """After the first deferral nothing is offered that the tree lacks, but SGLang sends it."""
    (source,), (reader,) = engines(closing, (1, 1), 4)
    own, there = [3, 9, 4, 11, 5, 6], [7, 2, 13, 1, 8, 10]
    push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
    source.prefill_rooms.open(ROOM)
    reader.ask(there, [source])
    until([source, reader], lambda: bool(source.ready))
    scheduler, request = Scheduler(own), request_of(TOKENS * 6, TOKENS * 2)
    allocator = scheduler.token_to_kv_pool_allocator
    freed = []
    for done, entered, dup in ((2, 1, range(1)), (4, 3, range(1, 1)), (6, 5, range(3, 5))):
        request.extend_end = done * TOKENS
        push.begin(scheduler, batch_of(request))
        push.end()
        with push.entering(scheduler, request):
            scheduler.checkpoint(dup.stop, own, start=dup.start)
        request.kv.cache_protected_len = entered * TOKENS
        freed.append([*allocator.freed])
        if done < len(own):
            ids = array("q", own[done - 2 : done])
            source.prefill_rooms.send(ROOM, done - 2, ids, [], None)
    assert freed == [[], [], [5]]
    source.prefill_rooms.close(ROOM)
    assert allocator.freed == [5, 3, 11] and not source.failed


def test_all_ranks_keep_the_same_pages_whatever_each_has_offered(closing: ExitStack) -> None:
    """Decode has the first blocks and reads from one rank alone, so only the other one, which it
    has declined, offers them ahead. SGLang plans by what is free, and must plan alike."""
    prefill, (reader,) = engines(closing, (2, 1), 1)
    own, tree = [3, 9, 4], [15, 16, 4]
    for source in prefill:
        source.prefill_rooms.open(ROOM)
    reader.ask([7, 2, 13], prefill, prefix=2)
    until([*prefill, reader], lambda: all(source.ready for source in prefill))
    offered, freed, later = [], [], []
    for source in prefill:
        push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
        scheduler, request = Scheduler(own), request_of(TOKENS * 3, TOKENS * 2)
        allocator = scheduler.token_to_kv_pool_allocator
        push.begin(scheduler, batch_of(request))
        push.end()
        with push.entering(scheduler, request):
            scheduler.checkpoint(2, tree)
        room = source.prefill_rooms.find(ROOM)
        assert room is not None
        offered.append(len(room.offered_ahead))
        freed.append([*allocator.freed])
        # The tree has all that any rank has offered: what the next chunk frees is freed at once.
        request.kv.cache_protected_len, request.extend_end = TOKENS * 2, TOKENS * 3
        push.begin(scheduler, batch_of(request))
        push.end()
        with push.entering(scheduler, request):
            allocator.free_segment(slots_of([4]), start_pos=0)
        later.append([*allocator.freed])
        source.prefill_rooms.close(ROOM)
        assert allocator.freed == [4, *own[:2]]
    assert offered == [0, 2], "the control: the ranks differ in what they have offered"
    assert freed == [[], []]
    assert later == [[4], [4]]


def breaks(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("nobody has thought of this")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SendRoom, "unoffered_until"),
        (HandoffAgent, "begin_step"),
        (HandoffAgent, "layer_written"),
        (HandoffAgent, "end_step"),
        (DeferredFrees, "pages"),
    ],
)
def test_an_error_in_a_step_fails_its_rooms_and_not_the_scheduler(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    (source,), (reader,) = engines(closing, (1, 1), 4)
    push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
    source.prefill_rooms.open(ROOM)
    reader.ask([7, 2], [source])
    until([source, reader], lambda: bool(source.ready))
    scheduler, request = Scheduler([3, 9]), request_of(TOKENS * 2, TOKENS)
    assert callable(getattr(owner, name))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaks)
        push.begin(scheduler, batch_of(request))
        push.layer(0)
        push.end()
        with push.entering(scheduler, request):
            scheduler.checkpoint(1, [15, 9])
    assert source.failed == ["ZeroDivisionError: nobody has thought of this"]
    source.send_all([3, 9])
    source.prefill_rooms.close(ROOM)
    assert scheduler.token_to_kv_pool_allocator.freed == [3]
    until([source, reader], lambda: bool(reader.failed))
    assert not reader.done
    # The next request of this rank is handed off.
    reader.failed.clear()
    source.ready.clear()
    source.prefill_rooms.open(ROOM)
    reader.ask([7, 2], [source])
    until([source, reader], lambda: bool(source.ready))
    push.begin(scheduler, batch_of(request))
    push.layer(0)
    push.end()
    source.send_all([15, 9])
    until([source, reader], lambda: bool(reader.done))


def test_an_allocator_is_as_it_was_when_nothing_was_ahead() -> None:
    allocator = Allocator()
    with deferring_frees(allocator) as found:
        allocator.free_segment(slots_of([3, 4]), start_pos=0)
        assert not allocator.freed
    assert found.pages(TOKENS)() == {3, 4}
    allocator.free_segment(slots_of([5]), start_pos=0)
    assert allocator.freed == [5]
    for free in found.frees:
        free()
    assert allocator.freed == [5, 3, 4]


@pytest.mark.parametrize("once", [True, False], ids=["once", "halves"])
def test_layers_of_two_halves_are_not_followed(
    closing: ExitStack, once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With two-batch overlap a layer is called for half of the batch first: the other half's pages
    are not written yet. The control follows it, and sends what is not there."""
    (source,), (reader,) = engines(closing, (1, 1), 4)
    push = LayerwisePush(source.agent, source.prefill_rooms, source.names, once)
    source.prefill_rooms.open(ROOM)
    reader.ask([7, 2], [source])
    until([source, reader], lambda: bool(source.ready))
    for layer in range(len(source.kv)):
        source.page(layer, 9).fill_(-1.0)
    push.begin(Scheduler([3, 9]), batch_of(request_of(TOKENS * 2, TOKENS * 2)))
    for layer in range(LAYERS):
        push.layer(layer)  # the first half: page 3
    if once:  # what was called has left
        until([source, reader], lambda: bool(reader.page(LAYERS - 1, 2).any()))
    for layer in range(len(source.kv)):
        source.page(layer, 9).copy_(expected(reader, layer, 9))
        if layer < LAYERS:
            push.layer(layer)  # the second: page 9
    push.end()
    source.send_all([3, 9], chunks=1)
    until([source, reader], lambda: bool(reader.done and source.done))
    right = torch.equal(reader.page(0, 2), expected(reader, 0, 9))
    assert right is not once
    assert ("could not be followed" in caplog.text) is not once


def test_shifted_pages_would_be_seen(closing: ExitStack) -> None:
    """The control of the tests above: pages sent to the wrong place are not what is expected."""
    (source,), (reader,) = engines(closing, (1, 1), 4)
    source.prefill_rooms.open(ROOM)
    reader.ask([7, 2], [source])
    until([source, reader], lambda: bool(source.ready))
    source.agent.run(
        DisaggregationInstructions(
            offers=[
                OfferBlocks(
                    transfer_of(ROOM),
                    (Span(0, 0, array("q", [9, 3])), Span(1, 0, array("q", [2]))),
                )
            ]
        )
    )
    until([source, reader], lambda: bool(reader.done))
    assert not torch.equal(reader.page(0, 7), expected(reader, 0, 3))


def test_rooms_are_what_a_row_of_sglang_can_hold() -> None:
    for room in (1, 2**62, 2**63 - 1):
        assert is_room(room)
        assert room_of(transfer_of(room)) == room
    for value in (-1, 0, 2**63, 2**64 - 1, None, True, "7", 1.0):
        assert not is_room(value)


def test_a_cache_of_another_kind_is_refused(closing: ExitStack) -> None:
    (source,), _ = engines(closing, (1, 1), 4)
    args = source.args()
    model = translate.Model("m", "float32", source.rank, 4, (0, LAYERS + 1), False, -1)
    with pytest.raises(Incompatible, match="6 KV buffers for layers 0 to 4"):
        translate.describe(args, model, SAME)
    args.page_size = 5
    with pytest.raises(Incompatible, match="pages of 5 tokens"):
        translate.describe(
            args, model.__class__("m", "float32", source.rank, 4, (0, LAYERS), False, -1), SAME
        )


@pytest.mark.parametrize(
    ("peers", "address", "allowed"),
    [
        ((), "127.0.0.1:8998", True),
        ((), "[::1]:8998", True),
        ((), "localhost:8998", True),
        ((), "192.0.2.9:8998", True),  # this machine's own
        ((), "10.1.2.3:8998", False),
        (("10.0.0.0/8",), "10.1.2.3:8998", True),
        (("10.0.0.0/8",), "169.254.169.254:80", False),
        ((), "no such host:1", False),
        ((), "", False),
    ],
)
def test_only_known_bootstrap_servers_are_asked(
    peers: tuple[str, ...], address: str, allowed: bool
) -> None:
    addresses = BootstrapAddresses(Settings(peers=peers), "192.0.2.9")
    deadline = time.monotonic() + PATIENCE_S
    while not (addresses.allows(address) or addresses.refusal(address)):
        assert time.monotonic() < deadline
    refusal = addresses.refusal(address)
    assert (not refusal) is allowed
    assert allowed or repr(address) in refusal


def test_a_name_that_hangs_holds_nobody_up() -> None:
    """Names come from clients: the scheduler's thread waits for no answer."""
    asked, answers = [], threading.Event()

    def resolve(host: str) -> str:
        asked.append(host)
        assert answers.wait(PATIENCE_S)
        return "127.0.0.1"

    addresses = BootstrapAddresses(Settings(), "192.0.2.9", resolve)
    for number in range(100):  # it would wait for ever if it waited
        assert not addresses.allows(f"name{number}:1")
        assert not addresses.refusal(f"name{number}:1")
    assert addresses.allows("127.0.0.1:1")
    assert len(asked) < 100  # not a thread for each
    answers.set()
    deadline = time.monotonic() + PATIENCE_S
    while not addresses.allows("name0:1"):
        assert time.monotonic() < deadline


def test_a_name_is_refused_for_a_while_if_there_are_no_more_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    addresses = BootstrapAddresses(Settings(), "192.0.2.9", lambda _: "127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        assert not addresses.allows("name:1")
        assert "can't start new thread" in addresses.refusal("name:1")
        assert not addresses._asking
    monkeypatch.setattr(bootstrap, "_REFUSED_S", 0.0)
    deadline = time.monotonic() + PATIENCE_S
    while not addresses.allows("name:1"):
        assert time.monotonic() < deadline


def test_what_is_remembered_of_servers_is_bounded() -> None:
    addresses = BootstrapAddresses(Settings(), "192.0.2.9", lambda _: "127.0.0.1")
    for number in range(5000):
        addresses.refuse(f"10.0.0.{number}:1", "no")
        addresses.allows(f"name{number}:1")
    deadline = time.monotonic() + PATIENCE_S
    while addresses._asking:
        assert time.monotonic() < deadline
    assert len(addresses._refused) <= 1024 and len(addresses._names) <= 1024


def test_a_prefill_engine_that_does_not_fit_says_why() -> None:
    addresses = BootstrapAddresses(Settings(), "192.0.2.9")
    addresses.refuse("127.0.0.1:1", "Page size mismatch: 16 and 32")
    assert "Page size mismatch: 16 and 32" in addresses.refusal("127.0.0.1:1")
    assert not addresses.refusal("127.0.0.1:2")
