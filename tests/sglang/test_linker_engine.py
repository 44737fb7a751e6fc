"""A real server of two ranks with the linker: what its small cache evicts comes back from the host
tier, with the tokens of a server that computes everything."""

from __future__ import annotations

import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.sglang.linker_server import (
    LENGTHS,
    ROOM,
    Linked,
    linker_args,
    prompts,
)
from tests.sglang.scenario import CROWD, NEW, Fleet, settled
from tests.sglang.server import PAGE, SglangServer


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    fault = tmp_path_factory.mktemp("linker") / "fault"
    server = SglangServer(
        tp=2,
        tokens=ROOM,
        args=linker_args(host_bytes="64MiB", digest="full"),
        env={"KVCONNECT_FAULTY_LINKER": str(fault)},
    )
    with server:
        yield Linked(server, fault)


@pytest.fixture
def fault(linked: Linked) -> Iterator[Callable[[str], None]]:
    yield lambda what: linked.fault.write_text(what) and None
    linked.fault.unlink(missing_ok=True)


def test_evicted_prompts_come_back_with_the_same_tokens(linked: Linked) -> None:
    asked = prompts(0)
    computed = linked.ask_all(asked)
    assert all(reply.host == 0 for reply in computed)
    again = linked.ask_all(asked)
    assert [reply.tokens for reply in again] == [reply.tokens for reply in computed]
    whole = [(length - 1) // PAGE * PAGE for length in LENGTHS]  # the last token is computed
    assert [reply.host for reply in again] == whole


def test_tokens_are_those_of_a_server_without_a_linker(linked: Linked, fleet: Fleet) -> None:
    asked = prompts(1)
    plain = [fleet.single.complete(prompt, NEW).tokens for prompt in asked]
    assert [reply.tokens for reply in linked.ask_all(asked)] == plain
    assert [reply.tokens for reply in linked.ask_all(asked)] == plain


def test_a_crowd_gets_its_own_pages(linked: Linked) -> None:
    asked = prompts(2)
    computed = linked.ask_all(asked)
    with ThreadPoolExecutor(CROWD) as crowd:
        again = list(crowd.map(linked.ask, asked * 3))
    assert [reply.tokens for reply in again] == [reply.tokens for reply in computed] * 3
    assert any(reply.host for reply in again)


def test_wrong_pages_change_the_tokens(linked: Linked, fault: Callable[[str], None]) -> None:
    """The control of the comparisons above."""
    asked = prompts(3)
    computed = linked.ask_all(asked)
    fault("shift")
    shifted = linked.ask_all(asked)
    assert all(reply.host for reply in shifted)
    assert all(a.tokens != b.tokens for a, b in zip(shifted, computed, strict=True))
    linked.server.forget()


def test_damage_on_one_rank_is_a_clean_error_and_the_retry_is_right(
    linked: Linked, fault: Callable[[str], None]
) -> None:
    asked = prompts(4)
    computed = linked.ask_all(asked)
    fault("damage 1")
    with pytest.raises(urllib.error.HTTPError) as refused:
        linked.ask(asked[0])
    refused.value.close()
    assert refused.value.code == 503
    fault("")
    retried = linked.ask(asked[0])
    assert retried.tokens == computed[0].tokens
    read = partial(
        linked.server.metric, "sglang:kvconnect_quarantined_blocks_total", cause="digest"
    )
    assert settled(read, 1.0) >= 1
    linked.server.forget()


def test_nothing_is_found_after_a_flush(linked: Linked) -> None:
    asked = prompts(5)
    computed = linked.ask_all(asked)
    linked.server.forget()
    again = linked.ask_all(asked)
    assert [reply.tokens for reply in again] == [reply.tokens for reply in computed]
    assert all(reply.host == 0 for reply in again)
    read = partial(linked.server.metric, "sglang:kvconnect_ledger_held_blocks")
    assert settled(read, 0) == 0
