"""A shared tier on Mooncake Store: memory that other processes lend, found through its master."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from kvconnect.errors import ConfigError, TransferFailed
from kvconnect.tiers.backends.base import BlockOutcome, parse_settings
from kvconnect.tiers.backends.remote import RecordKeys, RemoteStore, Server

T = TypeVar("T")

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_LEAST_BUFFER = 16 << 20
_THREADS = 4  # an exchange is 8 MiB and at most a value more: four of them fit into the buffer
# This client lends nothing, so nobody looks for it. With a port in its name it tries once to
# reach the master, not twenty times; a name that is no address of a network is not used as one.
_OWN_NAME = "127.0.0.1:1"
_ATTEMPTS = 3  # at values that another process may be replacing
_NO_ROOM, _IN_WORK, _NOT_THERE = -200, -703, -704
_NO_ANSWER = -900  # and all below it


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the store.

    Attributes:
        address: ``HOST:PORT`` of the master.
        prefix: what all names in the store start with.
        timeout_s: seconds after which a store that says nothing has failed.
        buffer: bytes of memory that blocks pass through on their way; a block must fit into it.
    """

    address: str = "127.0.0.1:50051"
    prefix: str = "kvconnect"
    timeout_s: float = 5.0
    buffer: int = 128 << 20

    def __post_init__(self) -> None:
        self.node()
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigError("prefix", self.prefix, "use 1 to 64 letters, digits and _ . : -")
        if not 0 < self.timeout_s <= 60:
            raise ConfigError("timeout_s", self.timeout_s, "use seconds, at most 60")
        if self.buffer < _LEAST_BUFFER:
            raise ConfigError("buffer", self.buffer, 'use "16MiB" or more')

    def node(self) -> tuple[str, int]:
        """Return (host, port) of the master; raise :class:`ConfigError` if it is none."""
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError("address", self.address, "use HOST:PORT such as cache-1:50051")
        return host, int(port)


def make_mooncake_store(
    settings: Mapping[str, object], fingerprint: bytes, keys: RecordKeys | None = None
) -> RemoteStore:
    """Return a store with the settings of :class:`MooncakeOptions`.

    A master that cannot be reached now may be there later, so that is no error.
    Raises :class:`ConfigError` for settings that cannot be used, or without the client library.
    """
    options = parse_settings(MooncakeOptions, settings, ("buffer",))
    return RemoteStore(MooncakeServer(options, _library()), options.prefix, fingerprint, keys=keys)


def _library() -> Callable[[], Any]:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        fix = f"install kvconnect[mooncake] and the system's libibverbs1: {error}"
        raise ConfigError("store", "mooncake", fix) from error
    client: Callable[[], Any] = MooncakeDistributedStore
    return client


class MooncakeServer(Server):
    """Batches of the client library, in threads of its own. Connects at the first call.

    The library waits half a minute for a process that hangs and cannot be told otherwise, so
    its calls run in threads that their caller leaves behind when the time is up.
    """

    def __init__(self, options: MooncakeOptions, library: Callable[[], Any]) -> None:
        self._options = options
        self._library = library
        self._client: Any = None
        self._connecting = threading.Lock()
        self._names = _NameLocks()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvconnect-mooncake")

    def __repr__(self) -> str:
        return f"mooncake {self._options.address}"

    def store(self, names: Sequence[str], values: Sequence[memoryview]) -> list[BlockOutcome]:
        def put(client: Any) -> list[BlockOutcome]:
            # Replacing what another process is writing costs both their room for ten minutes, so
            # what is not there is only added; if another was faster, its value is as good.
            replace = set(self._there(client, names))
            outcomes = dict.fromkeys(names, BlockOutcome.OK)
            pairs = list(zip(names, values, strict=True))
            for batch, one, group in (
                (client.put_batch, client.put, [p for p in pairs if p[0] not in replace]),
                (client.upsert_batch, client.upsert, [p for p in pairs if p[0] in replace]),
            ):
                if group and batch(*map(list, zip(*group, strict=True))):
                    # Its answer is that of the whole batch: find those that have no room.
                    outcomes |= {name: self._stored(one(name, value)) for name, value in group}
            return [outcomes[name] for name in names]

        return self._run(names, put)

    def fetch(self, names: Sequence[str], most: int) -> list[memoryview | None]:
        def get(client: Any) -> dict[str, memoryview]:
            found: dict[str, memoryview] = {}
            for _ in range(_ATTEMPTS):
                there = self._there(client, [name for name in names if name not in found])
                if not there:
                    return found
                handles = client.batch_get_buffer(there)
                read = [(n, h) for n, h in zip(there, handles, strict=True) if h is not None]
                found |= {name: memoryview(handle).cast("B")[:most] for name, handle in read}
            if len(read) < len(there):
                raise TransferFailed(f"{self!r}: a value is there but cannot be read")
            return found

        found = self._run(names, get)
        return [found.get(name) for name in names]

    def sizes(self, names: Sequence[str]) -> list[int]:
        def ask(client: Any) -> dict[str, int]:
            there = self._there(client, names)
            return {name: self._answer(client.get_size(name)) for name in there}

        found = self._run((), ask)
        return [max(0, found.get(name, 0)) for name in names]

    def delete(self, names: Sequence[str]) -> list[bool]:
        def drop(client: Any) -> list[bool]:
            # Forced: what was just read has a lease, and would stay. What another process is
            # replacing counts as removed before that.
            codes = client.batch_remove(list(names), True)
            if not {0, _NOT_THERE, _IN_WORK}.issuperset(codes):
                raise TransferFailed(f"{self!r}: not removed, errors {set(codes)}")
            return [code != _NOT_THERE for code in codes]

        return self._run(names, drop)

    def close(self) -> None:
        self._threads.shutdown()
        if self._client is not None:
            self._client.close()

    def _there(self, client: Any, names: Sequence[str]) -> list[str]:
        """Return those names, once each, that have a value; their leases keep it for now."""
        once = list(dict.fromkeys(names))  # a name twice in a batch gets wrong bytes
        answers = client.batch_is_exist(once)
        return [n for n, code in zip(once, answers, strict=True) if self._answer(code) > 0]

    def _answer(self, code: int) -> int:
        """Return what the store says; negative numbers are errors of one value."""
        if code <= _NO_ANSWER:
            raise TransferFailed(f"{self!r}: error {code}")
        return code

    def _stored(self, code: int) -> BlockOutcome:
        if self._answer(code) == 0:
            return BlockOutcome.OK
        return BlockOutcome.FULL if code == _NO_ROOM else BlockOutcome.FAILED

    def _run(self, names: Sequence[str], call: Callable[[Any], T]) -> T:
        """Make a call for which the bytes under the names are its own."""
        deadline = time.monotonic() + self._options.timeout_s

        def work() -> T:
            with self._names.taken(names, deadline) as taken:
                if not taken:  # or the caller's memory may have been given to others
                    raise TooLate
                return call(self._connected())

        future = self._threads.submit(work)
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TooLate as error:
            future.cancel()
            text = f"{self!r}: no answer in {self._options.timeout_s:g} s"
            raise TransferFailed(text) from error

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        try:  # the library itself takes several seconds to find that nobody is there
            socket.create_connection(self._options.node(), self._options.timeout_s).close()
        except OSError as error:
            raise TransferFailed(f"{self!r}: {error}") from error
        client = self._library()
        code = client.setup(
            {
                "local_hostname": _OWN_NAME,
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": "0",
                "local_buffer_size": str(self._options.buffer),
                "protocol": "tcp",
                "master_server_addr": self._options.address,
            }
        )
        if code:
            raise TransferFailed(f"{self!r}: the client cannot be set up, error {code}")
        return client


class _NameLocks:
    """Gives names to one call at a time. Threads: any.

    The store writes new bytes of the same length over the old ones: who reads meanwhile gets a
    mixture, and of two writers one fails. That stays so between processes, where digests tell.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken: set[str] = set()

    @contextmanager
    def taken(self, names: Sequence[str], deadline: float) -> Iterator[bool]:
        """Have all the names during the context; yield whether that was so by the deadline."""
        mine = set(names)
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            free = self._changed.wait_for(lambda: mine.isdisjoint(self._taken), left)
            free = free and time.monotonic() < deadline
            if free:
                self._taken |= mine
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._taken -= mine
                    self._changed.notify_all()
