"""Engines on one machine that copy blocks from one another's memory."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import xxhash

from kvconnect.errors import ConfigError
from kvconnect.offload.slot_digests import SlotDigests
from kvconnect.protocol.cache_messages import Found, HostTierAddresses, Place, encode
from kvconnect.settings import check_struct
from kvconnect.settings.sharing import PeerSettings
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.peers import peer_agent, same_machine
from kvconnect.tiers.peers.same_machine import SourceMemory, is_this_machine, read_process
from kvconnect.transport.base import PeerMessage
from tests.unit.tiers.peer_engines import (
    BLOCK,
    SWAPPED,
    WAIT_S,
    Engine,
    content,
    engines,
    key,
    until,
)

OK, ABSENT = BlockOutcome.OK, BlockOutcome.ABSENT


def memory(reader: Engine) -> SourceMemory | None:
    """Return the memory of the only source; None if its blocks come over the network."""
    with reader.agent.reader.sources.changed:
        (source,) = reader.agent.reader.sources._sources.values()
        return source.memory


def sent(source: Engine) -> bool:
    """Whether a source sent anything over the network since the last call."""
    stats = source.store.take_stats()
    return stats is not None and "CPU_to_PEER" in str(stats.data)


@contextmanager
def pair(
    there: str = "memory", here: str = "memory", **settings: object
) -> Iterator[tuple[Engine, Engine]]:
    """A source with two blocks, and a reader that is connected to it."""
    with engines(lambda: Engine(same_machine=there, **settings)) as [source]:
        source.keep(1, slot=3)
        source.keep(2, slot=0)
        with engines(lambda: Engine([source.where], same_machine=here)) as [reader]:
            reader.sources(1)
            if there == here == "memory" and not settings:
                until(lambda: memory(reader) is not None)
            yield source, reader


def test_blocks_are_copied_from_the_source_s_memory() -> None:
    with pair() as (source, reader):
        assert reader.store.exists([key(n) for n in (1, 9, 2)]) == [BLOCK, 0, BLOCK]
        assert reader.get([1, 9, 2], first_slot=4) == [OK, ABSENT, OK]
        assert [bytes(reader.host.view(n)) for n in (4, 5, 6)] == [
            content(1),
            bytes(BLOCK),
            content(2),
        ]
        assert not sent(source)
        taken = reader.store.take_stats()
        assert taken is not None
        assert taken.data["histograms"]["transfer_size_bytes"]["PEER_to_CPU"][0] == 2 * BLOCK


@pytest.mark.parametrize("settings", [("network", "memory"), ("memory", "network"), "rate", "far"])
def test_blocks_come_over_the_network_where_an_engine_must_not_be_read(
    settings: tuple[str, str] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either side can switch it off, a source with a rate does not let others help themselves, and
    engines on other machines cannot."""
    if settings == "far":
        monkeypatch.setattr(peer_agent, "is_this_machine", lambda _: False)
    there, here = settings if isinstance(settings, tuple) else ("memory", "memory")
    rate = {"serve_rate": 1 << 40} if settings == "rate" else {}
    with engines(lambda: Engine(same_machine=there, **rate)) as [source]:
        source.keep(1, slot=3)
        with engines(lambda: Engine([source.where], same_machine=here)) as [reader]:
            reader.sources(1)
            assert reader.get([1]) == [OK]
            assert bytes(reader.host.view(0)) == content(1)
            assert memory(reader) is None
            assert sent(source)


def test_slots_that_are_laid_out_otherwise_are_not_copied() -> None:
    with engines(lambda: Engine(same_machine="memory")) as [source]:
        source.keep(1, slot=3)
        other = lambda: Engine([source.where], SWAPPED, same_machine="memory")  # noqa: E731
        with engines(other) as [reader]:
            reader.sources(1)
            assert reader.get([1]) == [OK]
            assert memory(reader) is None
            assert bytes(reader.host.view(0)) != content(1)  # its halves are swapped


def overwrite(source: Engine) -> None:
    """A store puts another block into the slot of block 1."""
    source.agent.served.withdraw([3])
    source.keep(7, slot=3)


def drop(source: Engine) -> None:
    source.agent.served.drop([key(1)])


def reset(source: Engine) -> None:
    """The weights change: no block is the right one any more."""
    source.agent.served.clear()


def rot(source: Engine) -> None:
    source.host.view(3)[5] ^= 1


GONE: list[Callable[[Engine], None]] = [overwrite, drop, reset, rot]


@pytest.mark.parametrize("change", GONE)
def test_a_block_that_is_gone_since_the_answer_is_not_used(
    change: Callable[[Engine], None],
) -> None:
    with pair() as (source, reader):
        assert reader.store.exists([key(1), key(2)]) == [BLOCK, BLOCK]
        change(source)
        assert reader.get([1, 2])[0] is ABSENT
        assert memory(reader) is not None
        # What is the source's own fault costs the other block nothing.
        assert change is reset or bytes(reader.host.view(1)) == content(2)


@pytest.mark.parametrize("change", GONE)
def test_without_its_check_a_block_that_is_gone_is_used(
    change: Callable[[Engine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    if change is rot:
        monkeypatch.setattr(SourceMemory, "_matches", lambda *_: True)
    else:
        monkeypatch.setattr(SourceMemory, "_versions", lambda self, slots: expected(self, slots))

    def expected(read: SourceMemory, slots: list[int]) -> list[int]:
        return [versions.get(slot, 0) for slot in slots]

    versions: dict[int, int] = {}
    with pair() as (source, reader):
        assert reader.store.exists([key(1)]) == [BLOCK]
        found = memory(reader)
        assert found is not None
        place = found._places[key(1)]
        versions[place.slot] = place.version
        if change is overwrite:  # with the digest of what is there now, as a digest may be off
            overwrite(source)
            found.learn(key(1), Place(place.slot, place.version, source.host.digests.known(3)))
        else:
            change(source)
        assert reader.get([1]) == [OK]


def test_a_block_that_is_overwritten_while_it_is_copied_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair() as (source, reader):
        assert reader.store.exists([key(1)]) == [BLOCK]
        copy = read_process

        def slowly(pid: int, runs: list[tuple[int, int, int]]) -> None:
            ((there, here, nbytes),) = runs if runs[0][2] == BLOCK else [(0, 0, 0)]
            if nbytes:
                copy(pid, [(there, here, nbytes // 2)])
                overwrite(source)
                copy(pid, [(there + nbytes // 2, here + nbytes // 2, nbytes // 2)])
            else:
                copy(pid, runs)

        monkeypatch.setattr(same_machine, "read_process", slowly)
        assert reader.get([1]) == [ABSENT]
        mixed = bytes(reader.host.view(0))
        assert mixed == content(1)[: BLOCK // 2] + content(7)[BLOCK // 2 :]


def test_a_source_that_may_not_be_read_sends_its_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(same_machine, "read_process", refused)
    caplog.set_level("INFO")
    with engines(lambda: Engine(same_machine="memory")) as [source]:
        source.keep(1, slot=3)
        with engines(lambda: Engine([source.where], same_machine="memory")) as [reader]:
            reader.sources(1)
            until(lambda: "cannot be read, so the network is used" in caplog.text)
            assert reader.get([1]) == [OK]
            assert sent(source)


def test_a_source_that_can_no_longer_be_read_sends_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair() as (source, reader):
        assert reader.store.exists([key(1)]) == [BLOCK]
        source.agent._serving.close()  # it does not show the nonce any more
        assert reader.get([1]) == [OK]
        assert memory(reader) is None
        assert sent(source)


# What a source may say ----------------------------------------------------------------------------


def told(source: Engine, **changes: int) -> HostTierAddresses:
    nonce = ctypes.create_string_buffer(b"another nonce", 16)
    kept.append(nonce)
    fields = {
        "pid": os.getpid(),
        "nonce": ctypes.addressof(nonce),
        "slots": source.host.address,
        "slot_bytes": BLOCK,
        "versions": source.agent.served.versions_address,
    }
    return HostTierAddresses(**{**fields, **changes})


kept: list[object] = []
"""Memory that messages name."""


@pytest.mark.parametrize(
    "changes",
    [{}, {"pid": (1 << 31) - 1}, {"pid": 1}, {"nonce": 0}, {"nonce": (1 << 62) - 1}],
    ids=["another nonce", "no process", "not ours", "no address", "highest address"],
)
def test_memory_that_is_not_the_source_s_is_not_read(changes: dict[str, int]) -> None:
    with pair("network") as (source, reader):
        with pytest.raises(OSError, match=r"\w"):
            SourceMemory(told(source, **changes), b"n" * 16, reader.host)
        nonce = ctypes.create_string_buffer(b"n" * 16, 16)  # control: the right nonce
        there = told(source, nonce=ctypes.addressof(nonce))
        found = SourceMemory(there, b"n" * 16, reader.host)
        assert found.read([(Place(3, 0, None), 1)], BLOCK) == [True]
        assert bytes(reader.host.view(1)) == content(1)


def test_memory_that_was_not_asked_for_ends_the_connection() -> None:
    with pair(here="network") as (source, reader):
        (session,) = source.agent._sessions
        reads = reader.agent.reader
        source.agent._transport.submit(PeerMessage(session.peer, encode(told(source))))
        until(lambda: not len(reads.sources))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_places_that_are_not_those_of_the_blocks_found(number: int) -> None:
    """None at all is an answer that any source may give."""
    with pair() as (source, reader):
        places = source.agent._serving._memory
        places.places = lambda *_: [Place(3, 0, None)] * number  # type: ignore[method-assign]
        asked = reader.store.exists([key(1), key(2)])
        assert asked == ([BLOCK, BLOCK] if number == 0 else [0, 0])
        until(lambda: len(reader.agent.reader.sources) == (number == 0))


@pytest.mark.parametrize("slot", [8, (1 << 32) - 1])
def test_a_slot_that_is_not_there_is_asked_for_over_the_network(slot: int) -> None:
    with pair() as (source, reader):
        places = source.agent._serving._memory
        places.places = lambda *_: [Place(slot, 1 << 63, None)]  # type: ignore[method-assign]
        assert reader.get([1]) == [OK]
        assert bytes(reader.host.view(0)) == content(1)
        assert sent(source)


def test_an_answer_with_places_from_a_source_that_cannot_be_read() -> None:
    with pair("network") as (source, reader):
        places = source.agent._serving._memory
        places.places = lambda *_: [Place(3, 0, None)]  # type: ignore[method-assign]
        assert reader.get([1]) == [OK]
        assert sent(source)


def test_a_message_about_memory_is_none_of_a_reader() -> None:
    with pair() as (source, reader):
        (session,) = reader.agent._sessions
        for message in (told(source), Found(1, b"\1", [Place(0, 0, None)])):
            reader.agent._transport.submit(PeerMessage(session.peer, encode(message)))
        until(lambda: not len(source.agent._sessions))


def test_a_reader_that_wants_digests_copies_no_block_without_one() -> None:
    """A source with fewer digests sends such blocks, and a digest with them."""
    for mode, copied in (("full", False), ("sampled", True)):
        with pair() as (source, reader):
            reader.host.digests = SlotDigests(8, mode)
            places = source.agent._serving._memory
            whole = places.places
            places.places = lambda *asked, whole=whole: [  # type: ignore[method-assign]
                Place(place.slot, place.version, None) for place in whole(*asked)
            ]
            assert reader.get([1]) == [OK]
            assert bytes(reader.host.view(0)) == content(1)
            assert sent(source) is not copied


# Other processes ----------------------------------------------------------------------------------

CONFUSING = """
import sys
from kvconnect.protocol.cache_messages import HostTierAddresses, Place
from tests.unit.tiers.peer_engines import Engine, key
pid, nonce, slots, versions, digest = map(int, sys.argv[1:])
source = Engine(same_machine="memory")
source.keep(1, slot=3)
told = HostTierAddresses(pid=pid, nonce=nonce, slots=slots, slot_bytes=8192, versions=versions)
memory = source.agent._serving._memory
memory.tell = lambda *_: told
memory.places = lambda *_: [Place(0, 0, digest)]
print(source.where, flush=True)
input()
"""
"""A peer that names another process, one whose nonce it has been told."""


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "negative control"])
def test_a_peer_that_names_another_process_is_not_believed(
    checked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader would copy whatever the peer names, and offer it to all its peers."""
    caplog.set_level("INFO")
    nonce, secret, versions = (ctypes.create_string_buffer(n) for n in (16, BLOCK, 8))
    nonce.raw, secret.raw = b"n" * 16, b"the prompt of another tenant".ljust(BLOCK)
    system = SimpleNamespace(urandom=lambda size: b"n" * size)
    monkeypatch.setattr(peer_agent, "os", system)
    if not checked:
        monkeypatch.setattr(peer_agent, "check_other_end", lambda *_: None)
    addresses = [ctypes.addressof(each) for each in (nonce, secret, versions)]
    digest = xxhash.xxh3_64_intdigest(secret.raw)
    command = [sys.executable, "-c", CONFUSING, *map(str, (os.getpid(), *addresses, digest))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            where = process.stdout.readline().strip()
            with engines(lambda: Engine([where], same_machine="memory")) as [victim]:
                victim.sources(1)
                if checked:
                    until(lambda: "does not hold the other end" in caplog.text)
                else:
                    until(lambda: memory(victim) is not None)
                assert victim.get([1]) == [OK]
                copied = bytes(victim.host.view(0))
                assert copied == (content(1) if checked else secret.raw)
        finally:
            process.kill()


SOURCE = """
from tests.unit.tiers.peer_engines import Engine
source = Engine(same_machine="memory")
source.keep(1, slot=3)
print(source.where, flush=True)
input()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_was_killed_or_stands_still(number: signal.Signals) -> None:
    """One that stands still can be read all the same, for what it said before."""
    command = [sys.executable, "-c", SOURCE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            where = process.stdout.readline().strip()
            with engines(lambda: Engine([where], same_machine="memory")) as [reader]:
                reader.sources(1)
                until(lambda: memory(reader) is not None)
                assert reader.get([1]) == [OK]  # control
                assert reader.store.exists([key(1)]) == [BLOCK]
                process.send_signal(number)
                if number == signal.SIGKILL:
                    process.wait(WAIT_S)
                    assert reader.get([1], 1)[0] is not OK
                else:
                    assert reader.get([1], 1) == [OK]
                    assert bytes(reader.host.view(1)) == content(1)
        finally:
            process.kill()


def test_many_runs_are_copied_in_several_calls() -> None:
    source, target = array("Q", range(1200)), array("Q", bytes(9600))
    there, here = source.buffer_info()[0], target.buffer_info()[0]
    read_process(os.getpid(), [(there + 8 * n, here + 8 * (1199 - n), 8) for n in range(1200)])
    assert list(target) == list(range(1200))[::-1]
    with pytest.raises(OSError, match="Bad address"):
        read_process(os.getpid(), [(there, here, 8), (1 << 61, here, 8)])


def test_which_addresses_are_of_this_machine() -> None:
    assert is_this_machine("127.0.0.1")
    for other in ("192.0.2.1", "2001:db8::1", "", "localhost", "fe80::1%lo0"):
        assert not is_this_machine(other)


def test_the_setting_is_one_of_two_words() -> None:
    with pytest.raises(ConfigError, match="same_machine"):
        check_struct(PeerSettings, {"ask": ["10.0.0.1:1"], "same_machine": "disk"})
