"""A room that a request leaves on one rank, while its prompt is computed on all of them."""

from __future__ import annotations

from contextlib import ExitStack

from sglang.srt.disaggregation.base.conn import KVPoll

from kvconnect.engines.sglang.layerwise import LayerwisePush
from tests.sglang.live_rooms import ask, decode_manager, prefill_manager, receiver, sender
from tests.unit.engines.sglang_ranks import ROOM, TOKENS, engines, until
from tests.unit.engines.sglang_scheduler import Scheduler, batch_of, request_of


def test_ranks_free_the_same_pages_although_one_has_left_the_room() -> None:
    """A reader has left on one rank first, and a client repeats the room before the others know."""
    with ExitStack() as closing:
        sources, (reader,) = engines(closing, (2, 1), 4)
        managers = [prefill_manager(source) for source in sources]
        senders = [sender(manager, ROOM) for manager in managers]
        asking = receiver(decode_manager(reader), sources, ROOM)
        ask(asking, [7, 8, 9, 10])
        until(sources, lambda: all(each.poll() == KVPoll.WaitingForInput for each in senders))
        ranks = []
        for source, sending in zip(sources, senders, strict=True):
            push = LayerwisePush(source.agent, source.prefill_rooms, source.names)
            request = request_of(6 * TOKENS, 2 * TOKENS)
            request.disagg_kv_sender = sending
            ranks.append((push, Scheduler([1, 2, 3, 4]), request))

        def freed() -> list[list[int]]:
            return [scheduler.token_to_kv_pool_allocator.freed for _, scheduler, _ in ranks]

        offered = []
        for push, scheduler, request in ranks:
            push.begin(scheduler, batch_of(request))
            offered.append(push._offering)
            push.end()
            with push.entering(scheduler, request):
                pass  # the tree has none of the first chunk's pages
            request.kv.cache_protected_len, request.extend_end = 2 * TOKENS, 4 * TOKENS
        # The second rank first: a reader that hears of the failure leaves that one, too.
        other = sender(managers[1], ROOM)
        managers[0].fail(ROOM, "the reader has left")
        others = [sender(managers[0], ROOM), other]
        assert [other.owns_room for other in others] == [True, False]
        for push, scheduler, request in ranks:
            push.begin(scheduler, batch_of(request))
            offered.append(push._offering)
            push.end()
            with push.entering(scheduler, request):
                scheduler.checkpoint(3, [1, 2, 15], start=2)  # the tree has its third page
        assert offered == [True, True, False, True], "nothing is offered as the other request's"
        assert freed() == [[], []]
        for sending in senders:
            sending.clear()
        assert freed() == [[3], [3]]
        for other in others:
            other.clear()
        asking.abort()
        asking.clear()
        assert freed() == [[3], [3]]
