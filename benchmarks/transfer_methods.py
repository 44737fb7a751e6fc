"""Ways to move scattered pages from one process to another, and the process that has them.

``benchmarks/transport.py`` starts two of these and measures; see there for what is compared.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_interface
from typing import Any, NamedTuple, TypeVar

import xxhash

from benchmarks.settings import chosen
from kvconnect.testing.page_memory import PageMemory, plain_unit
from kvconnect.transport import make_transport
from kvconnect.transport.base import (
    ConnectionOptions,
    Disconnect,
    IncomingPages,
    MessageReceived,
    OutgoingPages,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Security,
)

MIB = 1 << 20
CONNECTIONS = ConnectionOptions().connections
PATIENCE_S = 60.0
MAX_IOVECS = 1024
POLL_S = 0.0005
POLL_US = 1000  # pause of plain NIXL's thread
NIXL = "nixl_cu12"  # plain "nixl" would look for CUDA and load torch

EventType = TypeVar("EventType", PeerUp, PeerDown, MessageReceived, PagesSent, PagesReceived)


class Picked(NamedTuple):
    """The pages of one sample, paired in order. ``page`` is their size in bytes."""

    page: int
    mine: array[int]
    theirs: array[int]


class TransferMethod(ABC):
    """One process's side of one way to move pages from the source to the reader."""

    def __init__(self, area: PageMemory, source: bool, host: str, option: str) -> None:
        self.area = area
        self.source = source
        self.host = host
        self.option = option
        self.hello: Any = None  # what the other side has to know

    @abstractmethod
    def meet(self, hello: Any) -> None:
        """Connect to the other side."""

    @abstractmethod
    def prepare(self, picked: Picked) -> None:
        """Get ready to move pages; not timed."""

    @abstractmethod
    def move(self) -> None:
        """Do this side's part."""


class Ours(TransferMethod):
    """The transport of hand-offs; ``option`` is its path and its digest mode."""

    def __init__(self, area: PageMemory, source: bool, host: str, option: str) -> None:
        super().__init__(area, source, host, option)
        network = (str(ip_interface(f"{host}/24").network),)
        self._path, digest = option.split()
        security = Security(allowed=network)
        set_here = chosen("transport", digest=digest)
        options = ConnectionOptions(**set_here, reads=not source, serves=source)
        self._transport = make_transport(self._path, security, options)
        self._transport.register(area)
        self._peer = PeerId(0)
        self._want = 0
        if source:
            self.hello = self._transport.listen(host, 0)

    def meet(self, hello: Any) -> None:
        if not self.source:
            self._source = hello
            self._transport.connect(*hello)
        self._peer = next(self._events(PeerUp)).peer

    def handshake(self) -> float:
        """Reader: connect once more and part again; return the seconds until both had agreed on a
        path."""
        start = time.perf_counter()
        self._transport.connect(*self._source)
        up = next(self._events(PeerUp))
        seconds = time.perf_counter() - start
        if self._path not in up.paths:
            raise SystemExit(f"no {self._path}: {up.path_error}")
        self._transport.submit(Disconnect(up.peer, "measured"))
        next(self._events(PeerDown))
        return seconds

    def prepare(self, picked: Picked) -> None:
        self._unit, self._ids = plain_unit(picked.page), picked.mine
        self._want += 1

    def move(self) -> None:
        submit, peer, want = self._transport.submit, self._peer, self._want
        if self.source:
            next(self._events(MessageReceived))
            submit(OutgoingPages(peer, want, 0, self._unit, 0, self._ids))
            next(self._events(PagesSent))
            return
        submit(IncomingPages(peer, want, [self._unit], [(0, self._ids)], None, self._path))
        submit(PeerMessage(peer, b"go"))
        left = len(self._ids)
        for event in self._events(PagesReceived):
            if event.bad:
                raise SystemExit(f"good pages were called bad: {event}")
            left -= event.count
            if left == 0:
                return

    def _events(self, kind: type[EventType]) -> Iterator[EventType]:
        while True:  # the driver ends what takes too long
            for event in self._transport.poll(PATIENCE_S):
                if isinstance(event, kind):
                    yield event


class Raw(TransferMethod):
    """Sockets and nothing else; ``option`` is the number of bytes per system call."""

    def __init__(self, area: PageMemory, source: bool, host: str, option: str) -> None:
        super().__init__(area, source, host, option)
        self._threads = ThreadPoolExecutor(CONNECTIONS)
        self._lists: list[list[list[memoryview]]] = []
        if source:
            self._listener = socket.create_server((host, 0))
            self.hello = self._listener.getsockname()

    def meet(self, hello: Any) -> None:
        numbers = range(CONNECTIONS)
        if self.source:
            self._sockets = [self._listener.accept()[0] for _ in numbers]
        else:
            self._sockets = [socket.create_connection(hello) for _ in numbers]
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, picked: Picked) -> None:
        page, data = picked.page, memoryview(self.area.data)
        pages = [data[i * page : (i + 1) * page] for i in picked.mine]
        share = -(-len(pages) // CONNECTIONS)
        step = min(MAX_IOVECS, max(1, int(self.option) // page))
        self._lists = [
            [pages[i : i + step] for i in range(start, min(start + share, len(pages)), step)]
            for start in range(0, len(pages), share)
        ]

    def move(self) -> None:
        one = self._send if self.source else self._receive
        for _ in self._threads.map(one, self._sockets, self._lists):
            pass

    def _send(self, sock: socket.socket, lists: list[list[memoryview]]) -> None:
        sock.recv(1)
        for pages in lists:
            if sock.sendmsg(pages) < sum(map(len, pages)):
                raise SystemExit("a blocking sendmsg did not send all")

    def _receive(self, sock: socket.socket, lists: list[list[memoryview]]) -> None:
        sock.send(b"g")
        for pages in lists:
            if sock.recvmsg_into(pages, 0, socket.MSG_WAITALL)[0] < sum(map(len, pages)):
                raise SystemExit("a blocking recvmsg did not receive all")


class Nixl(TransferMethod):
    """NIXL over TCP; ``option`` is READ, where the reader asks, or WRITE, where the source does."""

    def __init__(self, area: PageMemory, source: bool, host: str, option: str) -> None:
        super().__init__(area, source, host, option)
        self._agent = nixl_agent("source" if source else "reader", area)
        self._asks = source == (option == "WRITE")
        self.hello = self._agent.get_agent_metadata().hex(), area.address

    def meet(self, hello: Any) -> None:
        self._other = self._agent.add_remote_agent(bytes.fromhex(hello[0]))
        self._address = hello[1]

    def prepare(self, picked: Picked) -> None:
        if self._asks:
            page = picked.page
            ours, others = (
                self._agent.get_xfer_descs([(at + i * page, page, 0) for i in ids], "DRAM")
                for at, ids in (
                    (self.area.address, picked.mine),
                    (self._address, picked.theirs),
                )
            )
            self._transfer = self._agent.initialize_xfer(self.option, ours, others, self._other)

    def move(self) -> None:
        if self._asks:
            self._agent.transfer(self._transfer)
            while self._agent.check_xfer_state(self._transfer) != "DONE":
                time.sleep(POLL_S)
            self._agent.release_xfer_handle(self._transfer)


@functools.cache
def nixl_agent(name: str, area: PageMemory) -> Any:
    """Return this process's agent, whose thread sleeps between polls."""
    config = importlib.import_module(f"{NIXL}._bindings").nixlAgentConfig
    delay = config.pthrDelay
    config.pthrDelay = property(delay.fget, lambda agent, _: delay.fset(agent, POLL_US))
    api = importlib.import_module(f"{NIXL}._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(area.address, len(area.data), 0, "")], "DRAM")
    return agent


KINDS: dict[str, type[TransferMethod]] = {"ours": Ours, "raw": Raw, "nixl": Nixl}


class Host:
    """What the driver calls in a process: one memory, and transfer methods by name."""

    def __init__(self, source: bool, address: str, area_bytes: int) -> None:
        self._source = source
        self._address = address
        self._area = PageMemory(area_bytes)
        self._methods: dict[str, TransferMethod] = {}
        self._views: list[memoryview] = []
        self._busy = threading.Event()
        if source:
            contents = random.Random(0)
            piece = min(area_bytes, 64 * MIB)
            for start in range(0, area_bytes, piece):
                self._area.data[start : start + piece] = contents.randbytes(piece)

    def open(self, kind: str, name: str, option: str) -> Any:
        method = self._methods[name] = KINDS[kind](self._area, self._source, self._address, option)
        return method.hello

    def meet(self, name: str, hello: Any) -> None:
        self._methods[name].meet(hello)

    def prepare(self, name: str, page: int, nbytes: int, seed: int) -> None:
        """Pick pages, the same in both processes: the source's first, then the reader's."""
        picker, pages = random.Random(seed), range(len(self._area.data) // page)
        source, reader = (array("q", picker.sample(pages, nbytes // page)) for _ in range(2))
        mine, theirs = (source, reader) if self._source else (reader, source)
        data = memoryview(self._area.data)
        self._views = [data[i * page : (i + 1) * page] for i in mine]
        self._methods[name].prepare(Picked(page, mine, theirs))

    def move(self, name: str) -> float:
        start = time.perf_counter()
        self._methods[name].move()
        return time.perf_counter() - start

    def handshake(self, name: str) -> float:
        method = self._methods[name]
        if not isinstance(method, Ours):
            raise SystemExit(f"{name} has no handshake to time")
        return method.handshake()

    def digest(self) -> str:
        """Return a checksum of the pages that were moved, in order."""
        state = xxhash.xxh3_64()
        for view in self._views:
            state.update(view)
        return state.hexdigest()

    def spoil(self) -> None:
        """Change one bit of the pages."""
        self._views[-1][-1] ^= 1

    def busy(self, on: bool) -> None:
        """Start a thread that runs Python code, or end it."""
        if on:
            self._busy.set()
            threading.Thread(target=self._run_python, daemon=True).start()
        else:
            self._busy.clear()

    def _run_python(self) -> None:
        while self._busy.is_set():
            pass


def serve(source: bool, address: str, area_bytes: int) -> None:
    """Do what the driver says on stdin, a JSON line each; stdout is for nothing but answers."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        host = Host(source, address, area_bytes)
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            answers.write(json.dumps(getattr(host, method)(*arguments)) + "\n")
