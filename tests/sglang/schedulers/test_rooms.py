"""Rooms that are not as one would think, each on engines that must serve the next request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.sglang.schedulers.http_stubs import BootstrapProxy
from tests.sglang.schedulers.model import VOCAB
from tests.sglang.schedulers.pair import Pair


def _prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def _serves(pair: Pair) -> None:
    """The engines serve an ordinary request; then nothing is left of it and of all before."""
    last = pair.request(_prompt(30, seed=99), 4)
    pair.send(last)
    pair.finish()
    assert last.ended == {"prefill": "length", "decode": "length"}


@pytest.mark.parametrize("pair", ["overlap", "plain", "tight"], indirect=True)
@pytest.mark.parametrize("count", [2, 8])
def test_samples_of_one_prompt_share_a_room(pair: Pair, count: int) -> None:
    """SGLang gives all samples of a prompt one room. The first is served, and no other harms it."""
    first = pair.request(_prompt(40), 6)
    others = [pair.request(first.prompt, 6, room=first.room) for _ in range(count - 1)]
    for other in others:
        other.explained = "its room is another sample's"
    pair.send_together([first, *others], "decode")
    pair.send_together([first, *others], "prefill")
    pair.finish()
    assert first.ended == {"prefill": "length", "decode": "length"}
    _serves(pair)


@pytest.mark.parametrize("pair", ["overlap"], indirect=True)
@pytest.mark.parametrize("room", [-1, 0, 2**63, 2**64 - 1, 2**64])
def test_room_that_is_none(pair: Pair, room: int) -> None:
    request = pair.request(_prompt(20), 4, room=room)
    request.explained = "no room"
    pair.send(request)
    pair.finish()
    assert request.ended == {"prefill": "abort", "decode": "abort"}
    _serves(pair)


@pytest.mark.parametrize("pair", ["overlap"], indirect=True)
@pytest.mark.parametrize("port", [70000, -1, 0, 2**40, "x", None, [1]])
def test_bootstrap_server_names_no_port(pair: Pair, port: Any) -> None:
    def change(said: dict[str, Any]) -> None:
        if "rank_port" in said:
            said["rank_port"] = port

    with BootstrapProxy(pair.engines["prefill"].bootstrap_port, change) as proxy:
        request = pair.request(_prompt(20), 4)
        request.explained = "a port that is none"
        pair.send(request, "decode", port=proxy.port)
        pair.finish()
    assert request.ended == {"decode": "abort"}
    _serves(pair)


@pytest.mark.parametrize("pair", ["radix", "ranks"], indirect=True)
@pytest.mark.parametrize("length", [8, 40, 41])
def test_prompt_that_decode_has(pair: Pair, length: int) -> None:
    """Also the whole of it: then nothing but the first token is left to send."""
    for _ in range(3):
        request = pair.request(_prompt(length), 5)
        pair.send(request)
        pair.until(lambda request=request: len(request.ended) == 2, "a known prompt")
        assert request.ended["decode"] == "length"
    assert pair.seen["decode cached"] >= 2
    pair.finish()


@pytest.mark.parametrize("pair", ["tight"], indirect=True)
def test_decode_gives_up_before_it_asked(pair: Pair) -> None:
    """A request that waits for memory is aborted at decode: prefill hears of it."""
    large = pair.request(_prompt(100, seed=1), 40)
    pair.send(large)
    pair.until(lambda: bool(large.got["decode"]), "the first request")
    waiting = pair.request(_prompt(60, seed=2), 4)
    pair.send(waiting)
    for _ in range(20):
        pair.both()
    assert not large.ended.get("decode")
    assert pair.engines["decode"].ranks[0].state["queues"]["waiting for memory"] == 1
    pair.abort(waiting, "decode")
    pair.finish()
    assert waiting.ended["decode"] == "abort"
    assert waiting.ended["prefill"]
    assert large.ended["decode"] == "length"


@pytest.mark.parametrize("pair", ["overlap", "plain"], indirect=True)
def test_decode_asks_again_before_prefill_has_seen_the_end(pair: Pair) -> None:
    """Decode has received, gives its KV up and asks for the room again, while prefill has the first
    transfer in its hands."""
    request = pair.request(_prompt(40), 30)
    pair.break_("prefill", "unseen")
    pair.send(request)
    prefill = pair.engines["prefill"].ranks[0]
    pair.until(lambda: prefill.state["queues"]["in flight"] == 1, "prefill computes")
    pair.until(lambda: bool(request.got["decode"]), "decode receives", "decode")
    assert "prefill" not in request.ended
    pair.retract()
    pair.resume()
    decode = pair.engines["decode"].ranks[0]
    pair.until(lambda: decode.state["queues"]["in transfer"] == 1, "decode asks", "decode")
    for _ in range(200):
        pair.step("decode")
    assert "prefill" not in request.ended
    pair.mend("prefill")
    pair.finish()
    assert request.ended["decode"] == "length"
    assert pair.seen["recomputed"] == 1


@pytest.mark.parametrize("pair", ["tight"], indirect=True)
def test_failure_of_one_request_leaves_the_prefill_server_known(pair: Pair) -> None:
    """One request waits for memory to be computed again while another's client hangs up."""
    requests = [pair.request(_prompt(50, seed=seed), 40) for seed in range(2)]
    for request in requests:
        pair.send(request)
    pair.until(lambda: all(len(r.got["decode"]) > 12 for r in requests), "both compute")
    pair.retract()
    pair.resume()
    decode = pair.engines["decode"].ranks[0]
    pair.until(lambda: decode.state["queues"]["waiting for memory"] == 1, "one waits")
    other = pair.request(_prompt(20, seed=5), 4)
    pair.send(other)
    pair.both()
    pair.abort(other)
    pair.finish()
    assert [request.ended["decode"] for request in requests] == ["length", "length"]


@pytest.mark.parametrize("pair", ["stages"], indirect=True)
def test_pipeline_stages_of_prefill(pair: Pair) -> None:
    """One after the other, and several chunks at a time."""
    _serves(pair)
    for seed in range(4):
        pair.send(pair.request(_prompt(70, seed), 4))
    pair.finish()
    assert pair.seen["decode length"] == 5
