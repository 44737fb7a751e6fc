"""A TCP relay that delays, slows, spoils or cuts what passes through it.

In a test::

    with FaultProxy("127.0.0.1", port) as proxy:
        peer = transport.connect(*proxy.address)
        proxy.corrupt(offset=1000)

As a command, for instance as a slow link between two engines on one machine::

    python -m kvconnect.testing.proxy --listen 127.0.0.1:7000 --target 127.0.0.1:8000 --delay-ms 5
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
import sys
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Direction = Literal["up", "down", "both"]
"""``up``: from who connects to the target; ``down``: back."""

_CHUNK_BYTES = 64 << 10
_QUEUED_CHUNKS = 256  # 16 MiB on their way: 1.6 GB/s at a delay of 10 ms
_SLACK_S = 0.002  # timers wake late; what they miss is caught up with
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST instead of FIN


class _Chunk(NamedTuple):
    data: bytes  # empty: the end
    read_at: float


@dataclass
class _LinkFaults:
    """The faults of one direction; of all connections together, as on one cable."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: as fast as it goes
    corrupt_at: int = -1  # bytes from now; negative: not, or already done
    truncate_at: int = -1
    duplicate_at: int = -1
    stalled: bool = False
    free_at: float = 0.0  # when the cable has sent what was given to it

    def spoil(self, data: bytes) -> tuple[bytes, bool]:
        """Return what passes in the place of ``data``, and whether the connection ends then."""
        size = len(data)
        cut = 0 <= self.truncate_at < size
        if 0 <= self.corrupt_at < size:
            spoilt = bytearray(data)
            spoilt[self.corrupt_at] ^= 1
            data = bytes(spoilt)
        if 0 <= self.duplicate_at < size:
            data += data
        if cut:
            data = data[: self.truncate_at]
        self.truncate_at -= size
        self.corrupt_at -= size
        self.duplicate_at -= size
        return data, cut

    def book(self, size: int, now: float) -> float:
        """Return when the cable will have sent so many bytes more."""
        if self.bytes_per_s:
            self.free_at = max(self.free_at, now - _SLACK_S) + size / self.bytes_per_s
            return self.free_at
        return now


class _Relay:
    """Everything that runs on the event loop; ``directions`` are changed there too."""

    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self.directions = {"up": _LinkFaults(), "down": _LinkFaults()}
        self._dropping = False
        self.changed = asyncio.Condition()  # notified of every change to the directions
        self._listener = listener
        self._target = target
        self._tasks: dict[asyncio.Task[None], list[socket.socket]] = {}

    async def run(self, started: threading.Event) -> None:
        """Relay until cancelled."""
        loop = asyncio.get_running_loop()
        started.set()
        try:
            while True:
                near, _ = await loop.sock_accept(self._listener)
                near.setblocking(False)
                task = asyncio.create_task(self._serve(near))
                self._tasks[task] = [near]
                task.add_done_callback(self._tasks.pop)
        finally:
            self._listener.close()
            await self.end_all()

    async def drop(self, dropping: bool) -> None:
        """Choose whether new connections get no answer."""
        self._dropping = dropping

    async def end_all(self, *, reset: bool = False) -> None:
        """Close every connection that is there now."""
        for task, sockets in self._tasks.items():
            for sock in sockets if reset else ():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, near: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with near, socket.socket(near.family, socket.SOCK_STREAM) as far:
            if self._dropping:
                await loop.create_future()  # for ever
            far.setblocking(False)
            with suppress(OSError):
                await loop.sock_connect(far, self._target)
                self._tasks[_current()].append(far)
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await _all_or_none(
                    self._pass(self.directions["up"], near, far),
                    self._pass(self.directions["down"], far, near),
                )

    async def _pass(
        self, faults: _LinkFaults, source: socket.socket, target: socket.socket
    ) -> None:
        queue: asyncio.Queue[_Chunk] = asyncio.Queue(_QUEUED_CHUNKS)
        await _all_or_none(_read(source, queue), self._write(faults, target, queue))

    async def _write(
        self, faults: _LinkFaults, target: socket.socket, queue: asyncio.Queue[_Chunk]
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data, read_at = await queue.get()
            async with self.changed:
                await self.changed.wait_for(lambda: not faults.stalled)
            passed, cut = faults.spoil(data)
            due = max(faults.book(len(passed), loop.time()), read_at + faults.delay_s)
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await loop.sock_sendall(target, passed)
            if cut:
                raise ConnectionAbortedError("cut off on purpose")
            if not data:
                target.shutdown(socket.SHUT_WR)
                return


def _current() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task
    return task


async def _read(source: socket.socket, queue: asyncio.Queue[_Chunk]) -> None:
    loop = asyncio.get_running_loop()
    data = b"start"
    while data:
        data = await loop.sock_recv(source, _CHUNK_BYTES)
        await queue.put(_Chunk(data, loop.time()))


async def _all_or_none(*works: Coroutine[Any, Any, None]) -> None:
    """Run all; when one fails, end the others and fail the same way."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FaultProxy:
    """Relays ``address`` to a target, on a thread of its own, inside its ``with``.

    The methods are for any thread; each fault is in force when its method returns, for
    connections that are there and for those to come.
    Offsets count the bytes that pass in that direction from then on, over all connections.

    Raises:
        OSError: the address to listen at cannot be had.
    """

    def __init__(
        self, target_host: str, target_port: int, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        listener = socket.create_server((host, port), backlog=512)
        listener.setblocking(False)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._relay = _Relay(listener, (target_host, target_port))
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._relay.run(self._started))
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Deliver everything so much later; throughput stays."""
        self._set(direction, delay_s=seconds)

    def rate(self, bytes_per_s: float, direction: Direction = "both") -> None:
        """Limit the bytes per second, over all connections together; 0 for no limit."""
        self._set(direction, bytes_per_s=bytes_per_s)

    def corrupt(self, offset: int = 0, direction: Direction = "down") -> None:
        """Flip a bit in the one byte at ``offset``."""
        self._set(direction, corrupt_at=offset)

    def truncate(self, offset: int = 0, direction: Direction = "down") -> None:
        """Close the connection that carries the byte at ``offset``, just before it."""
        self._set(direction, truncate_at=offset)

    def duplicate(self, offset: int = 0, direction: Direction = "down") -> None:
        """Deliver the chunk that has the byte at ``offset`` twice."""
        self._set(direction, duplicate_at=offset)

    def stall(self, direction: Direction = "both") -> None:
        """Let nothing pass, without closing anything, until ``clear``."""
        self._set(direction, stalled=True)

    def reset(self) -> None:
        """Break every connection that is there now, as a crashed machine would (RST)."""

        self._do(self._relay.end_all(reset=True))

    def drop_new_connections(self) -> None:
        """Accept new connections but never answer on them, as behind a cut cable."""
        self._do(self._relay.drop(True))

    def clear(self) -> None:
        """Let everything pass again. Connections that got no answer stay silent."""
        self._do(self._relay.drop(False))
        self._set("both", **vars(_LinkFaults()))

    def _set(self, direction: Direction, **faults: Any) -> None:
        async def change() -> None:
            for name in ("up", "down") if direction == "both" else (direction,):
                vars(self._relay.directions[name]).update(faults)
            async with self._relay.changed:
                self._relay.changed.notify_all()

        self._do(change())

    def _do(self, change: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(change, self._loop).result()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def main(arguments: Sequence[str] | None = None) -> None:
    """Relay with a fixed delay and rate until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m kvconnect.testing.proxy", description="Relay TCP connections, slowly."
    )
    parser.add_argument("--listen", type=_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--target", type=_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, each direction")
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="each direction; 0: no limit")
    options = parser.parse_args(arguments)
    (target_host, target_port), (host, port) = options.target, options.listen
    with FaultProxy(target_host, target_port, host, port) as proxy:
        proxy.delay(options.delay_ms / 1000)
        proxy.rate(options.rate_mbit * 1e6 / 8)
        sys.stdout.write("relaying {}:{}\n".format(*proxy.address))
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
