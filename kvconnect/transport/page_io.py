"""Sends and receives pages on a socket: in C, or in Python over TLS and without the extension.

Both move the same bytes and return the same digests: XXH3-64 over the runs of a wire block in
order, 8 bytes each, little-endian. The C loop releases the GIL once per call, the Python loop takes
it again for every byte run.

Plain sockets may be in any mode, TLS sockets must be non-blocking. ``digest`` selects the
blocks that are hashed. ``stop`` is one byte that any thread may set to a value other than 0.

Both functions raise, before a byte moves, ValueError for malformed arguments and IndexError for a
wire block outside the chunk's memory; TimeoutError when no byte moved for ``stall_ms``;
ConnectionError and other OSErrors from the socket. After an OSError the stream is out of step:
close it. During a call, shut the socket down instead of closing it.
"""

from __future__ import annotations

import ctypes
import select
import socket
import ssl
import time
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from kvconnect.errors import ConfigError
from kvconnect.transport.base import PageChunk

try:
    from kvconnect import _native
except ImportError:  # pages move without it, only slower
    _native = None  # type: ignore[assignment]


class DigestRule(NamedTuple):
    """Blocks ``chunk.ids[i]`` with ``(phase + i) % period == 0`` are hashed, none for period 0."""

    period: int
    phase: int


_POLL_MS = 50  # how long a stop may go unnoticed
_STEP_BYTES = 64 << 10  # per operation of the Python loop, so that progress is seen
_PLAIN_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def can_digest(tls: bool) -> bool:
    """Return whether pages can be hashed; the Python loop needs xxhash for that."""
    if _native is not None and not tls:
        return True
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return False
    return True


def check_digests(mode: str, tls: bool) -> None:
    """Raise :class:`ConfigError` if digests are required but cannot be computed."""
    if mode != "off" and not can_digest(tls):
        raise ConfigError("digest", mode, "install xxhash, or set it to 'off'")


def send_pages(
    sock: socket.socket,
    head: bytes,
    chunk: PageChunk,
    digest: DigestRule,
    stall_ms: int,
    stop: bytearray,
) -> bytes:
    """Send ``head`` and then the pages of ``chunk``; return the digests.

    Raises also InterruptedError, an OSError, once ``stop`` is set.
    """
    if _native is not None and not isinstance(sock, ssl.SSLSocket):
        return _native.send_pages(
            sock.fileno(), head, *_native_pages(chunk), digest, stall_ms, stop
        )
    blocks = list(_blocks(chunk))
    flow = _Flow(sock, select.POLLOUT, stall_ms, stop)
    digests = b""
    complete = flow.move([memoryview(head)]) == len(head)
    for i, runs in enumerate(blocks):
        complete = complete and flow.move(runs) == chunk.unit.block_bytes
        if not complete:
            break
        digests += _digest(runs, i, digest)
    if not complete:
        raise InterruptedError("stopped in the middle of pages")
    return digests


def recv_pages(
    sock: socket.socket, chunk: PageChunk, digest: DigestRule, stall_ms: int, stop: bytearray
) -> tuple[bytes, int]:
    """Receive the pages of ``chunk``; return (digests, number of whole blocks received).

    Once ``stop`` is set, no page is written any more: the rest is received and discarded, and the
    digests are those of the whole blocks. ConnectionError if the stream ends too early.
    """
    if _native is not None and not isinstance(sock, ssl.SSLSocket):
        return _native.recv_pages(sock.fileno(), *_native_pages(chunk), digest, stall_ms, stop)
    blocks = list(_blocks(chunk))
    flow = _Flow(sock, select.POLLIN, stall_ms, stop)
    size = chunk.unit.block_bytes
    digests = b""
    for i, runs in enumerate(blocks):
        moved = flow.move(runs)
        if moved < size:
            flow.drain((len(blocks) - i) * size - moved)
            return digests, i
        digests += _digest(runs, i, digest)
    return digests, len(blocks)


def digest_pages(chunk: PageChunk) -> bytes:
    """Return the digest of every wire block of ``chunk``. Raises as :func:`send_pages`."""
    native = getattr(_native, "digest_pages", None)
    if native is None:
        return b"".join(_digest(runs, 0, DigestRule(period=1, phase=0)) for runs in _blocks(chunk))
    return bytes(native(*_native_pages(chunk)))


def _native_pages(chunk: PageChunk) -> tuple[tuple[int, int], array[int], int, array[int]]:
    unit = chunk.unit
    return (chunk.address, chunk.nbytes), unit.segments, unit.phases, chunk.ids


def _blocks(chunk: PageChunk) -> Iterator[list[memoryview]]:
    """Yield the runs of each wire block, as writable views of the memory."""
    unit = chunk.unit
    count, rest = divmod(len(unit.segments), unit.phases) if unit.phases > 0 else (0, 1)
    if rest or count == 0 or count % 3:
        raise ValueError(f"{len(unit.segments)} segment numbers, {unit.phases} phases")
    memory = memoryview((ctypes.c_char * chunk.nbytes).from_address(chunk.address)).cast("B")
    for block in chunk.ids:
        page, phase = divmod(block, unit.phases)
        runs = []
        for i in range(phase * count, (phase + 1) * count, 3):
            offset, stride, length = unit.segments[i : i + 3]
            start = offset + page * stride
            if min(offset, stride) < 0 or length < 1:
                raise ValueError(f"segment ({offset}, {stride}, {length}) is malformed")
            if page < 0 or start + length > chunk.nbytes:
                raise IndexError(f"wire block {block} lies outside {chunk.nbytes} bytes")
            runs.append(memory[start : start + length])
        if sum(map(len, runs)) != unit.block_bytes:
            raise ValueError(f"phase {phase} does not have {unit.block_bytes} bytes")
        yield runs


def _digest(runs: list[memoryview], position: int, digest: DigestRule) -> bytes:
    if not digest.period or (digest.phase + position) % digest.period:
        return b""
    import xxhash

    state = xxhash.xxh3_64()
    for run in runs:
        state.update(run)
    return bytes(reversed(state.digest()))


class _Flow:
    """One direction of a socket, in steps that never block. ``stop`` ends ``move``."""

    def __init__(self, sock: socket.socket, ready: int, stall_ms: int, stop: bytearray) -> None:
        if stall_ms < 1 or len(stop) != 1:
            raise ValueError(f"stall_ms is {stall_ms}, stop has {len(stop)} bytes")
        self._sock = sock
        self._ready = ready
        self._stall_ms = stall_ms
        self._stop = stop
        self._flags = 0 if isinstance(sock, ssl.SSLSocket) else _PLAIN_FLAGS
        self._moved_at = time.monotonic()

    def move(self, runs: list[memoryview]) -> int:
        """Move the bytes of ``runs``; return how many, fewer only after a stop."""
        total = 0
        for run in runs:
            done = 0
            while done < len(run):
                if self._stop[0]:
                    return total + done
                done += self._step(run[done : done + _STEP_BYTES])
            total += done
        return total

    def drain(self, nbytes: int) -> None:
        """Receive and discard bytes, regardless of ``stop``."""
        scratch = memoryview(bytearray(_STEP_BYTES))
        while nbytes:
            nbytes -= self._step(scratch[:nbytes])

    def _step(self, view: memoryview) -> int:
        """Move some bytes, or wait a moment for the socket and return 0."""
        try:
            if self._ready == select.POLLOUT:
                count = self._sock.send(view, self._flags)
            else:
                count = self._sock.recv_into(view, flags=self._flags)
        except BlockingIOError:
            return self._wait(self._ready)
        except ssl.SSLWantReadError:
            return self._wait(select.POLLIN)
        except ssl.SSLWantWriteError:
            return self._wait(select.POLLOUT)
        if count == 0:
            raise ConnectionError("the peer closed in the middle of pages")
        self._moved_at = time.monotonic()
        return count

    def _wait(self, events: int) -> int:
        if (time.monotonic() - self._moved_at) * 1000 >= self._stall_ms:
            raise TimeoutError(f"no byte moved for {self._stall_ms} ms")
        poller = select.poll()
        poller.register(self._sock.fileno(), events)
        poller.poll(min(_POLL_MS, self._stall_ms))
        return 0
