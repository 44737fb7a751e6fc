"""A shared tier on Mooncake Store: memory of other processes, found through a master."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from contextlib import contextmanager
from typing import Any, TypeVar

from kvconnect.errors import ConfigError, TransferFailed
from kvconnect.settings.stores import ONE_BY_ONE, MooncakeSettings
from kvconnect.tiers.backends.base import BlockOutcome
from kvconnect.tiers.backends.record_seals import RecordKeys
from kvconnect.tiers.backends.remote import RemoteStore, Server

T = TypeVar("T")

_THREADS = 4  # a call moves 8 MiB and at most one value more; the buffer has room for four
# This client provides no memory, so no other client connects to it. With a port in its name, it
# tries once to reach the master instead of twenty times.
_OWN_NAME = "127.0.0.1:1"
_ATTEMPTS = 3  # at reading values that another process may be replacing
_NO_ROOM, _IN_WORK, _NOT_THERE = -200, -703, -704
_NO_ANSWER = -900  # and all lower codes


def make_mooncake_store(
    settings: MooncakeSettings, fingerprint: bytes, keys: RecordKeys | None = None
) -> RemoteStore:
    """Return a store with the settings of :class:`MooncakeSettings`.

    An unreachable master is not an error.

    Raises:
        ConfigError: a setting cannot be used, or the client library is missing.
    """
    return RemoteStore(
        MooncakeServer(settings, _library()), settings.prefix, fingerprint, keys=keys
    )


def _library() -> Callable[[], Any]:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        fix = f"install kvconnect[mooncake] and the system's libibverbs1: {error}"
        raise ConfigError("store", "mooncake", fix) from error
    client: Callable[[], Any] = MooncakeDistributedStore
    return client


class MooncakeServer(Server):
    """Calls the client library's batches on its own threads. Connects at the first call.

    The library waits 30 s for a process that hangs, which cannot be changed. Its calls run on
    threads that the caller stops waiting for after the timeout.
    """

    one_by_one = MooncakeSettings in ONE_BY_ONE  # it has no batch of sizes

    def __init__(self, options: MooncakeSettings, library: Callable[[], Any]) -> None:
        self._options = options
        self._library = library
        self._client: Any = None
        self._connecting = threading.Lock()
        self._name_locks = _NameLocks()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvconnect-mooncake")

    def __repr__(self) -> str:
        return f"mooncake {self._options.address}"

    def store(self, names: Sequence[str], values: Sequence[memoryview]) -> list[BlockOutcome]:
        def put(client: Any) -> list[BlockOutcome]:
            # Replacing a value that another process is writing blocks the space of both for ten
            # minutes. So an absent value is only added; if another process was faster, its value
            # is the same block.
            replace = set(self._existing(client, names))
            outcomes = dict.fromkeys(names, BlockOutcome.OK)
            pairs = list(zip(names, values, strict=True))
            for batch, one, group in (
                (client.put_batch, client.put, [p for p in pairs if p[0] not in replace]),
                (client.upsert_batch, client.upsert, [p for p in pairs if p[0] in replace]),
            ):
                if group and batch(*map(list, zip(*group, strict=True))):
                    # The answer is for the whole batch: repeat the values one by one.
                    outcomes |= {name: self._stored(one(name, value)) for name, value in group}
            return [outcomes[name] for name in names]

        return self._run(names, put)

    def load(self, names: Sequence[str], most: int) -> list[memoryview | None]:
        def get(client: Any) -> dict[str, memoryview]:
            found: dict[str, memoryview] = {}
            for _ in range(_ATTEMPTS):
                there = self._existing(client, [name for name in names if name not in found])
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
            there = self._existing(client, names)
            return {name: self._answer(client.get_size(name)) for name in there}

        found = self._run((), ask)
        return [max(0, found.get(name, 0)) for name in names]

    def delete(self, names: Sequence[str]) -> list[bool]:
        def drop(client: Any) -> list[bool]:
            # Forced, since a value that was just read has a lease. A value that another process
            # is replacing counts as removed.
            codes = client.batch_remove(list(names), True)
            if not {0, _NOT_THERE, _IN_WORK}.issuperset(codes):
                raise TransferFailed(f"{self!r}: not removed, errors {set(codes)}")
            return [code != _NOT_THERE for code in codes]

        return self._run(names, drop)

    def close(self) -> None:
        self._threads.shutdown()
        if self._client is not None:
            self._client.close()

    def _existing(self, client: Any, names: Sequence[str]) -> list[str]:
        """Return the names that have a value, each once. A lease keeps their values for now."""
        once = list(dict.fromkeys(names))  # the library returns wrong bytes for repeated names
        if not once:
            return []  # the library would log a warning
        answers = client.batch_is_exist(once)
        return [n for n, code in zip(once, answers, strict=True) if self._answer(code) > 0]

    def _answer(self, code: int) -> int:
        """Return the store's code; a negative one is an error of one value."""
        if code <= _NO_ANSWER:
            raise TransferFailed(f"{self!r}: error {code}")
        return code

    def _stored(self, code: int) -> BlockOutcome:
        if self._answer(code) == 0:
            return BlockOutcome.OK
        return BlockOutcome.FULL if code == _NO_ROOM else BlockOutcome.FAILED

    def _run(self, names: Sequence[str], call: Callable[[Any], T]) -> T:
        """Make a call while no other call of this process uses the names."""
        deadline = time.monotonic() + self._options.timeout_s

        def work() -> T:
            with self._name_locks.locked(names, deadline) as locked:
                if not locked:  # the caller has given up, and its memory may be reused
                    raise TimedOut
                return call(self._connected())

        future = self._threads.submit(work)
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimedOut as error:
            future.cancel()
            text = f"{self!r}: no answer in {self._options.timeout_s:g} s"
            raise TransferFailed(text) from error

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        try:  # the library takes several seconds to notice a missing master
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
    """Locks names for one call at a time. Thread-safe.

    The store overwrites a value of the same length in place: a concurrent reader gets a mixture,
    and one of two writers fails. Between processes this can still happen; digests detect it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._locked: set[str] = set()

    @contextmanager
    def locked(self, names: Sequence[str], deadline: float) -> Iterator[bool]:
        """Lock the names during the context. Yield False if they are not free by the deadline."""
        mine = set(names)
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            free = self._changed.wait_for(lambda: mine.isdisjoint(self._locked), left)
            free = free and time.monotonic() < deadline
            if free:
                self._locked |= mine
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._locked -= mine
                    self._changed.notify_all()
