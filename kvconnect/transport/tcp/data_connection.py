"""One data connection: a thread that receives frames and, where needed, one that sends them."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

from kvconnect import threads
from kvconnect.errors import Incompatible, KVConnectError, ProtocolError
from kvconnect.protocol.frames import (
    DIGEST_BYTES,
    HEADER_BYTES,
    FrameHeader,
    digested,
    pack_header,
    unpack_header,
)
from kvconnect.transport import page_io
from kvconnect.transport.base import PageChunk, PagesReceived, PageUser, PeerId
from kvconnect.transport.tcp.context import TransportContext
from kvconnect.transport.tcp.send_queue import FrameTarget, OutboundFrame, SendQueue
from kvconnect.transport.tcp.sockets import allow_silence, read_some, shut, write_some
from kvconnect.transport.tcp.stall_watchdog import MovingFrame

_SCRATCH_BYTES = 1 << 20


class DataConnection:
    """Moves the frames of a ``send_queue`` over one authenticated socket, which it owns.

    Each thread calls ``on_end`` when it ends, always, with the reason and whether the connection
    was lost.
    """

    def __init__(
        self,
        peer: PeerId,
        sock: socket.socket,
        send_queue: SendQueue,
        shared: TransportContext,
        on_end: Callable[[str, bool], None],
    ) -> None:
        self._peer = peer
        self._sock = sock
        self._queue = send_queue
        self._shared = shared
        self._on_end = on_end
        self._stall_s = shared.options.stall_s
        self._stall_ms = max(1, round(shared.options.stall_s * 1000))
        # A reader may be slow and alive for longer than its control connection may be silent.
        allow_silence(sock, shared.options.stall_s)
        self._can_digest = page_io.can_digest(isinstance(sock, ssl.SSLSocket))

    def start_receiving(self, period: int) -> None:
        """Start the thread that receives frames with this digest period.

        RuntimeError if the system has no thread to give, as in ``start_sending``.
        """
        self._start(partial(self._receive_all, period), "receive")

    def start_sending(self, period: int) -> None:
        """Start the thread that sends frames with this digest period."""
        self._start(partial(self._send_all, period), "send")

    def shut(self) -> None:
        """Make both threads leave the socket."""
        shut(self._sock)

    def close(self) -> None:
        """Close the socket; both threads must have ended."""
        self._sock.close()

    def _start(self, work: Callable[[], None], verb: str) -> None:
        name = f"kvconnect-tcp-{verb}-{self._peer}"
        threads.make(threads.ThreadKind.DATA, name, partial(self._run, work)).start()

    def _run(self, work: Callable[[], None]) -> None:
        reason, lost = "a thread that moved its pages died", False
        try:
            work()
            reason = "closed"
        except ProtocolError as error:
            reason = f"broke the protocol: {error}"
        except KVConnectError as error:
            reason = str(error)
        except TimeoutError as error:
            reason = f"stalled: {error}"
        except (EOFError, OSError) as error:
            reason, lost = f"connection lost: {error}", True
        finally:
            self._on_end(reason, lost)

    def _send_all(self, period: int) -> None:
        if period and not self._can_digest:
            fix = "install it, or set digest to 'off' there"
            raise Incompatible(f"the other side asks for digests, which need xxhash here: {fix}")
        sequence = 0
        while True:
            with self._queue.next_frame() as frame:
                if frame is None:
                    return
                order, count = frame.request.order, len(frame.ids)
                if order.fence:
                    with self._queue.at_fence():
                        order.fence.wait()
                nbytes = count * order.unit.block_bytes
                header = FrameHeader(
                    sequence, order.read_id, order.number, frame.first, count, nbytes, period
                )
                with self._queue.watch.over(order.read_id, nbytes) as moving:
                    # The read may have been cancelled while the frame was at its fence.
                    sent = not self._queue.dropped(frame) and self._send(frame, header, moving)
                if sent:
                    self._queue.sent(frame)
                    sequence += 1

    def _send(self, frame: OutboundFrame, header: FrameHeader, moving: MovingFrame) -> bool:
        """Send a frame. Return False, before its first byte, if it was dropped while this side had
        no memory for it."""
        order, first, ids = frame.request.order, frame.first, frame.ids
        if not frame.request.started:
            frame.request.started = time.perf_counter()
        head = pack_header(header)
        digests = bytearray()
        user = PageUser(self._peer, partial(self._queue.dropped, frame))
        with closing(self._shared.pages().outgoing(order.unit, ids, user)) as pieces:
            for piece in self._ready(pieces, moving):
                digest = page_io.DigestRule(header.digest_period, first + order.number)
                digests += page_io.send_pages(
                    self._sock, head, piece, digest, self._stall_ms, self._queue.stop
                )
                first += len(piece.ids)
                head = b""
        if head:
            return False
        _write_all(self._sock, bytes(digests), self._stall_s)
        return True

    def _ready(self, pieces: Iterator[PageChunk], moving: MovingFrame) -> Iterator[PageChunk]:
        """Yield the pieces of a frame. What this side takes to have them ready, or to get memory
        that other peers use, is not taken from the time of the frame."""
        while True:
            with self._queue.watch.paused(moving):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def _receive_all(self, period: int) -> None:
        head = bytearray(HEADER_BYTES)
        sequence = 0
        while True:
            # A source may have nothing to say for hours; that it lives is the control
            # connection's concern.
            _read_exact(self._sock, memoryview(head), None)
            started = time.perf_counter()
            header = unpack_header(bytes(head))
            if header.sequence != sequence:
                raise ProtocolError(f"frame {header.sequence}, expected {sequence}")
            if header.digest_period != period:
                raise ProtocolError(
                    f"a frame of digest period {header.digest_period}, agreed was {period}"
                )
            sequence += 1
            with self._queue.receive(header) as target:
                if target and target.fence:
                    target.fence.wait()
                with self._queue.watch.over(header.read_id, header.nbytes) as moving:
                    if target and target.stop[0]:  # cancelled before there was a deadline
                        self._queue.watch.shorten(header.read_id)
                    self._receive(header, target, moving, started)

    def _receive(
        self, header: FrameHeader, target: FrameTarget | None, moving: MovingFrame, started: float
    ) -> None:
        blocks = digested(header.first, header.count, header.unit, header.digest_period)
        if target is None:
            self._drain(header.nbytes + len(blocks) * DIGEST_BYTES)
            return
        digests = self._receive_pages(header, target, moving)
        if digests is None:
            self._drain(len(blocks) * DIGEST_BYTES)
            return
        claimed = bytearray(len(blocks) * DIGEST_BYTES)
        _read_exact(self._sock, memoryview(claimed), self._stall_s)
        if target.stop[0]:
            return
        bad: tuple[int, ...] = ()
        if self._can_digest and digests != claimed:
            ours, theirs = memoryview(digests).cast("Q"), memoryview(claimed).cast("Q")
            bad = tuple(block for block, a, b in zip(blocks, ours, theirs, strict=True) if a != b)
        self._shared.events.put(
            PagesReceived(
                self._peer,
                header.read_id,
                header.unit,
                header.first,
                header.count,
                bad,
                header.nbytes,
                time.perf_counter() - started,
            )
        )

    def _receive_pages(
        self, header: FrameHeader, target: FrameTarget, moving: MovingFrame
    ) -> bytes | None:
        """Receive a frame's pages; return their digests, None if the read was cancelled meanwhile.

        Either way the whole payload has been read.
        """
        digests = bytearray()
        period = header.digest_period if self._can_digest else 0
        first = header.first
        user = PageUser(self._peer, lambda: bool(target.stop[0]))
        with closing(self._shared.pages().incoming(target.unit, target.ids, user)) as pieces:
            for piece in self._ready(pieces, moving):
                digest = page_io.DigestRule(period, first + header.unit)
                some, landed = page_io.recv_pages(
                    self._sock, piece, digest, self._stall_ms, target.stop
                )
                first += len(piece.ids)
                digests += some
                if landed < len(piece.ids) or target.stop[0]:
                    break  # before the piece would be moved into its pages
        if not target.stop[0]:
            return bytes(digests)
        self._drain((header.first + header.count - first) * target.unit.block_bytes)
        return None

    def _drain(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            _read_exact(self._sock, part, self._stall_s)
            nbytes -= len(part)


def _read_exact(sock: socket.socket, view: memoryview, stall_s: float | None) -> None:
    """Fill ``view``; wait up to ``stall_s`` for each next byte, or for ever.

    Raises:
        TimeoutError: nothing came for ``stall_s``.
        EOFError: the other side closed the connection; the text says whether inside ``view``.
        OSError: the connection broke.
    """
    done = 0
    while done < len(view):
        count = read_some(sock, view[done:])
        if count is None:
            _wait(sock, select.POLLIN, stall_s)
        elif count == 0:
            raise EOFError("the other side closed it" + (" inside a message" if done else ""))
        else:
            done += count


def _write_all(sock: socket.socket, data: bytes, stall_s: float) -> None:
    """Write all of ``data``; raises as :func:`_read_exact` does."""
    view = memoryview(data)
    while view:
        count = write_some(sock, view)
        if count == 0:
            _wait(sock, select.POLLOUT, stall_s)
        view = view[count:]


def _wait(sock: socket.socket, events: int, stall_s: float | None) -> None:
    poller = select.poll()
    poller.register(sock.fileno(), events)
    if not poller.poll(None if stall_s is None else stall_s * 1000):
        raise TimeoutError(f"no progress for {stall_s:g} s")
