"""The four ends of a stream in the relay in C, and what its owner knows of chunks."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvconnect._native import Relay
from kvconnect.router.connections.relay import Returned
from kvconnect.router.requests.event_form import EventForm

MANY = 1 << 16
LAST = b"0\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


class Line:
    """A relay, and the four ends of a stream's two connections."""

    def __init__(self, most_fd: int = MANY) -> None:
        self.relay = Relay(most_fd)
        self.engine, self.from_engine = socket.socketpair()
        self.client, self.to_client = socket.socketpair()
        self.ends = (self.engine, self.from_engine, self.client, self.to_client)
        self.got = b""

    def add(self, *, events_only: bool = False, form: EventForm | None = None) -> int:
        source, target = self.from_engine.fileno(), self.to_client.fileno()
        return self.relay.add(source, target, events_only, form)

    def back(self) -> Returned:
        """Wait until the stream comes back."""
        record = None
        while record is None:
            assert select.select([self.relay.fileno()], [], [], 60)[0]
            record = self.relay.take()
        return Returned(*record)

    def reads(self, nbytes: int) -> bytes:
        """Return the next bytes that the client gets."""
        self.client.settimeout(60)
        while len(self.got) < nbytes and (more := self.client.recv(1 << 20)):
            self.got += more
        found, self.got = self.got[:nbytes], self.got[nbytes:]
        return found

    def settle(self, nbytes: int) -> tuple[bytes, Returned | None]:
        """Wait until the client has ``nbytes`` or the stream is back; return both."""
        returned = None
        while len(self.got) < nbytes and returned is None:
            ready, _, _ = select.select([self.client.fileno(), self.relay.fileno()], [], [], 60)
            assert ready
            if self.client.fileno() in ready:
                self.got += self.client.recv(1 << 20)
            if self.relay.fileno() in ready:
                record = self.relay.take()
                returned = None if record is None else Returned(*record)
        if returned is not None:
            self.client.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    self.got += self.client.recv(1 << 20)
            self.client.setblocking(True)
        found, self.got = self.got, b""
        return found, returned


@contextmanager
def line(most_fd: int = MANY) -> Iterator[Line]:
    made = Line(most_fd)
    try:
        yield made
    finally:
        made.relay.close()
        for end in made.ends:
            end.close()


def whole_chunks(data: bytes) -> int:
    """Return the bytes of the whole chunks at the beginning that are not the last."""
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end], 16)
        if size == 0 or end + 2 + size + 2 > len(data):
            break
        at = end + 2 + size + 2
    return at
