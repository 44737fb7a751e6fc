"""What is broken on purpose is seen: the tests of this folder would not miss it."""

from __future__ import annotations

import pytest

from tests.sglang.schedulers import pair as pairs
from tests.sglang.schedulers.engine import EngineDied
from tests.sglang.schedulers.model import continuation, grow, next_token
from tests.sglang.schedulers.pair import Fault, Pair, Request

on_one_pair = pytest.mark.parametrize("pair", ["overlap"], indirect=True)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "STUCK_S", 2.0)


def _begin(pair: Pair) -> Request:
    request = pair.request(range(100, 140), 20)
    pair.send(request)
    pair.until(lambda: len(request.got["decode"]) > 2, "some tokens")
    return request


@on_one_pair
def test_number_that_changes_in_decode_s_memory(pair: Pair) -> None:
    _begin(pair)
    with pytest.raises(Fault, match="KV that is not its request's"):
        pair.break_("decode", "page")
    pair.mend("decode")
    pair.finish()


@on_one_pair
def test_room_that_is_kept(pair: Pair) -> None:
    pair.break_("prefill", "room")
    with pytest.raises(Fault, match="something is left"):
        pair.finish()
    pair.mend("prefill")
    pair.finish()


@on_one_pair
def test_request_that_waits_for_ever(pair: Pair) -> None:
    request = pair.request(range(30), 2)
    pair.send(request, "decode")
    with pytest.raises(Fault, match="nothing changes any more"):
        pair.finish()
    pair.abort(request, "decode")
    pair.finish()


@on_one_pair
def test_news_that_are_not_taken(pair: Pair) -> None:
    pair.break_("prefill", "deaf")
    pair.send(pair.request(range(200, 240), 6))
    with pytest.raises(Fault, match="nothing changes any more"):
        pair.finish()
    pair.mend("prefill")
    pair.finish()


@on_one_pair
def test_pages_in_another_order(pair: Pair) -> None:
    pair.break_("prefill", "order")
    pair.send(pair.request(range(300, 340), 6))
    with pytest.raises(Fault, match=r"KV that is not its request's|wrong tokens"):
        pair.finish()


@on_one_pair
def test_loop_that_ends(pair: Pair) -> None:
    _begin(pair)
    with pytest.raises(EngineDied, match="ended on purpose"):
        pair.break_("decode", "loop")


def test_other_prompts_have_other_tokens() -> None:
    """A page of another prompt agrees with itself; what follows from it does not."""
    mine, other = list(range(50)), [7, *range(1, 50)]
    assert continuation(mine, 8) != continuation(other, 8)
    assert next_token(grow(0, 1)) != next_token(grow(0, 2))
