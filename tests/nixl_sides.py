"""Transports over NIXL in this process and in others, for tests."""

from __future__ import annotations

import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from kvconnect.testing.page_memory import PageMemory, plain_unit
from kvconnect.testing.transport import ConnectedPair, Side, kinds
from kvconnect.transport import make_transport
from kvconnect.transport.base import Drained, IncomingPages, PagesReceived, PeerMessage, PeerUp
from tests.fakes.nixl_source import BLOCK
from tests.links import NIXL_QUICK, OPEN

UNIT = plain_unit(4096)


class Passing(NamedTuple):
    """A fence that passes when the event is set."""

    event: threading.Event

    def wait(self) -> None:
        assert self.event.wait(30)


@contextmanager
def side(nbytes: int = 1 << 20, seed: int | None = None, **options: Any) -> Iterator[Side]:
    transport = make_transport("nixl", OPEN, replace(NIXL_QUICK, **options))
    try:
        yield Side(transport, PageMemory(nbytes, seed=seed))
    finally:
        transport.close()


@contextmanager
def pair(**options: Any) -> Iterator[ConnectedPair]:
    with side(**options) as reader, side(seed=1, **options) as source:
        yield ConnectedPair(reader, source, "nixl")


def moves(link: ConnectedPair, read_id: int = 1) -> None:
    """Move some pages, compare them, and end the read."""
    link.expect(read_id, [UNIT], [range(100)])
    link.send(read_id, 0, UNIT, range(100, 200))
    link.until(lambda: link.arrived(read_id) == 100, "pages")
    assert link.reader.memory.read(UNIT, range(100)) == link.source.memory.read(
        UNIT, range(100, 200)
    )
    link.reader.transport.cancel(link.of_reader, read_id)
    link.until(
        lambda: any(event.read_id == read_id for event in link.reader.of(Drained)), "its Drained"
    )


@contextmanager
def process(nbytes: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A source in a process of its own, and its port."""
    command = [sys.executable, "-m", "tests.fakes.nixl_source", str(nbytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as source:
        try:
            assert source.stdout is not None
            yield source, int(source.stdout.readline())
        finally:
            source.kill()


def poll_until(reader: Side, done: Callable[[], object]) -> None:
    for _ in range(4000):
        if done():
            return
        reader.poll()
    raise AssertionError("waited for too long")


def begin(reader: Side, port: int, nbytes: int) -> int:
    """Ask a process for all its memory; return the peer when the first pages have come."""
    peer = reader.transport.connect("127.0.0.1", port)
    poll_until(reader, lambda: PeerUp in kinds(reader, peer))
    unit, ids = plain_unit(BLOCK), array("q", range(nbytes // BLOCK))
    reader.transport.submit(IncomingPages(peer, 1, [unit], [(0, ids)], None, "nixl"))
    reader.transport.submit(PeerMessage(peer, b"1"))
    poll_until(reader, lambda: PagesReceived in kinds(reader, peer))
    return peer
