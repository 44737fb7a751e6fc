"""One of two decode engines is drained in mid-stream: the other one continues its streams, and no
prompt is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.engines.load import Admin
from tests.engines.models import BLOCK_SIZE
from tests.engines.pd import decode_config, refused, side_by_side
from tests.engines.ranks import until
from tests.engines.server import Router, Server, kv_transfer
from tests.engines.streams import Ask, Said, Streamed, asked, in_the_middle, said
from tests.servers import free_port

STREAMS = 8


class Fleet(NamedTuple):
    """``both`` can send what it has computed, ``receiver`` cannot."""

    both: Server
    receiver: Server
    router: Router
    admin: Admin
    want: list[Said]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    token = tmp_path_factory.mktemp("admin") / "token"
    token.write_text("a-token-for-these-tests")
    admin = Admin(free_port(), token.read_text())
    flags = ("--unified", "--continue", "1", "--decode-policy", "round_robin")
    flags += ("--admin-token-file", str(token), "--admin-port", str(admin.port))
    sends = kv_transfer(host_bytes="off", transport="tcp")
    both, receiver = (
        Server("llama", sends, blocks=512),
        Server("llama", decode_config(), blocks=512),
    )
    with side_by_side(both, receiver), Router([], [both, receiver], flags) as router:
        want = [said(each) for each in [Streamed(router, ask(n)) for n in range(STREAMS)]]
        assert all(each.text and each.heads == 1 for each in want)
        yield Fleet(both, receiver, router, admin, want)


RESULTS = {"drained": ("handed_off", "computed", "stayed"), "lost": ("continued",)}


def results(router: Router) -> dict[str, float]:
    """Return what became of streams so far."""
    name = "kvconnect_router_{}_streams_total"
    return {
        f"{kind} {result}": router.metric(name.format(kind), result=result)
        for kind, names in RESULTS.items()
        for result in names
    }


def computed(server: Server) -> float:
    """Return how many tokens of prompts a server has computed."""
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


class Run(NamedTuple):
    """Streams one of whose engines was drained or killed: how many it had, what became of these,
    and how many tokens of prompts were computed beside those of the clients."""

    begun: int
    results: dict[str, float]
    again: float


def ask(number: int) -> Ask:
    """Return a stream that shares no cached block with others."""
    path, body = asked(number)
    return path, body | {"cache_salt": f"salt {number}"}


def run(fleet: Fleet, victim: Server, *, kill: bool = False, tries: int = 10) -> Run:
    """Have all streams begin, end one of the engines for them, and check what they have said. On a
    busy machine, all may have ended before: then begin once more."""
    servers = {server.url: server for server in (fleet.both, fleet.receiver)}
    for server in servers.values():
        server.settle()
        server.post("/reset_prefix_cache")
    numbers = {each["url"]: each["number"] for each in fleet.admin.workers()}
    before = results(fleet.router)
    counted = {n: servers[url] for url, n in numbers.items() if not kill or url != victim.url}
    at = sum(computed(server) for server in counted.values())
    streams = [Streamed(fleet.router, ask(n)) for n in range(STREAMS)]
    its = numbers[victim.url]

    opened: list[Streamed] = []

    def one_is_open() -> bool:
        found = [s for s in streams if s.decode == its and in_the_middle(s)]
        # What a client has not read yet may be all that is left.
        opened.extend(found if found and victim.metric("vllm:num_requests_running") else ())
        return bool(opened) or all(each.whole for each in streams)

    until(one_is_open, "a stream of the engine, or all have ended")
    if not opened and tries:
        for each in streams:
            each.join()
        return run(fleet, victim, kill=kill, tries=tries - 1)
    if kill:
        victim.kill()
    else:
        fleet.admin.drain("decode", victim.url)
        assert not all(each.whole for each in streams), "the drain was not the streams' end"
    assert [said(each) for each in streams] == fleet.want
    asked_for = sum(
        want.usage[0][0]
        for each, want in zip(streams, fleet.want, strict=True)
        if each.decode in counted
    )
    after = results(fleet.router)
    changed = {name: after[name] - before[name] for name in after}
    again = sum(computed(server) for server in counted.values()) - at - asked_for
    return Run(sum(each.decode == its for each in streams), changed, again)


def test_a_drained_engine_hands_its_streams_off(fleet: Fleet) -> None:
    found = run(fleet, fleet.both)
    moved = found.results["drained handed_off"]
    assert 0 < moved <= found.begun
    assert not any(n for name, n in found.results.items() if name != "drained handed_off")
    # At most one block where they were, and one token where they go on.
    assert found.again <= moved * (BLOCK_SIZE + 1)
    fleet.admin.add("decode", fleet.both.url)


@pytest.mark.parametrize("kill", [False, True])
def test_without_a_hand_off_prompts_are_computed_again(fleet: Fleet, kill: bool) -> None:
    """The control: an engine that cannot send, and one that is dead."""
    before = refused(fleet.receiver, "params")
    found = run(fleet, fleet.receiver, kill=kill)
    name = "lost continued" if kill else "drained computed"
    assert 0 < found.results[name] <= found.begun
    assert not any(n for other, n in found.results.items() if other != name)
    assert found.again > found.results[name] * (BLOCK_SIZE + 1)
    if not kill:
        assert refused(fleet.receiver, "params") == before, "nobody is warned of a drain"
        fleet.admin.add("decode", fleet.receiver.url)
