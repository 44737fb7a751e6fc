"""The hand-off agent of one worker: its thread, and the methods that the engine calls."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from kvconnect import threads
from kvconnect.disaggregation import bandwidth_probe
from kvconnect.disaggregation.bandwidth_probe import ProbedMemory
from kvconnect.disaggregation.decode_executor import DecodeExecutor
from kvconnect.disaggregation.layer_queue import LayerQueue
from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    Receive,
    ReceiveReport,
    TransferEvent,
)
from kvconnect.disaggregation.prefill_executor import PrefillExecutor
from kvconnect.disaggregation.sessions import (
    GroupPages,
    HandoffSession,
    HandoffSessions,
    PathPreference,
)
from kvconnect.errors import ProtocolError, TransferFailed, contained
from kvconnect.offload.streams import make_streams
from kvconnect.peers.connections import open_transport, page_path
from kvconnect.peers.loop import PeerLoop
from kvconnect.protocol import messages
from kvconnect.protocol.hello import Reject
from kvconnect.protocol.identity import Identity
from kvconnect.protocol.messages import HandoffHello, Message, Probe
from kvconnect.protocol.reads import PROBE_READ_ID
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport.base import (
    Drained,
    Event,
    Fence,
    Memory,
    MessageReceived,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerId,
    PeerUp,
)
from kvconnect.transport.tcp.shared_port import SharedPort
from kvconnect.types import TransferId

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0
_STOP_S = 0.25  # how long an engine's thread waits for pages of an aborted request to be sent
_END_S = 10.0  # ... and then for their connections to end, which takes as long as its threads do
_STOP_CHECK_S = 0.001


class HandoffAgent:
    """Hand-offs of one worker, in both roles.

    Threads: the engine's thread calls the public methods; they hold the lock for microseconds and
    never wait for a peer. One thread of the agent answers peers while the engine computes or
    sleeps, and one submits the layers that a step wrote. ``close`` ends both.

    ``mark`` returns a fence after everything that the engine's thread has launched. ``address``:
    where the transport listens. ``ended``: the sessions with workers that this one read from.
    ``news`` is set when :meth:`poll` has something that the agent's own thread found; the poll
    clears it. The owner may put another event in its place.
    """

    def __init__(
        self,
        sessions: HandoffSessions,
        deadline_s: float,
        mark: Callable[[], Fence | None],
        address: tuple[str, int] | None,
    ) -> None:
        self.address = address
        self.news = threading.Event()
        self.ended = sessions.ended
        self._sessions = sessions
        self._sending = PrefillExecutor(sessions, deadline_s)
        self._receiving = DecodeExecutor(sessions)
        self._mark = mark
        self.offering = False  # this step offers blocks, so layer hooks matter
        self._lock = threading.Lock()
        self._written = LayerQueue(self._lock, self._sending.written, self._on_error)
        kind = threads.ThreadKind.HANDOFF
        self._loop = PeerLoop(kind, sessions.transport, self._take, self._tick)
        self._loop.start()

    def begin_step(self, work: DisaggregationInstructions, epoch: int) -> None:
        """Take a step's instructions; call it before the forward."""
        self.end_step()  # a pipeline stage may skip end_step
        with self._lock:
            self._sessions.hello.epoch = epoch
            self._sending.step_ended_at = self._receiving.step_ended_at = math.inf
            self._written.catch_up()
            self._sending.begin_step(work)
            fence = self._mark() if work.receives else None
            self._receiving.begin_step(work, time.monotonic(), fence)
        self.offering = any(offer.spans for offer in work.offers)

    def set_identity(self, identity: Identity) -> None:
        """The worker has these weights from now on. If they are others than before, all sessions
        end, and no block that was offered before is sent any more."""
        with self._lock:
            if self._sessions.hello.identity != identity:
                self._sending.outdate()
                self._sessions.set_identity(identity)

    def run(self, work: DisaggregationInstructions, fence: Fence | None = None) -> None:
        """Take instructions outside of a step. Offered blocks can be read once ``fence`` has
        passed; inside a step, at its end."""
        with self._lock:
            self._written.catch_up()
            self._sending.begin_step(work)
            if not self.offering:
                self._sending.written(None, fence)
            self._receiving.begin_step(work, time.monotonic(), self._mark())

    def await_stopped(self, transfer: TransferId) -> None:
        """Return when no page of a withdrawn transfer is being sent any more.

        Blocks for the time that the pages under way take. Connections that still send some after
        ``_STOP_S`` are ended: a page that is sent later may be its next owner's.
        """
        limit = time.monotonic() + _STOP_S
        ended: set[PeerId] = set()
        while peers := self._sending_to(transfer):
            if time.monotonic() >= limit:
                if ended:
                    logger.error("pages of an aborted request are still being sent")
                    return
                ended, limit = set(peers), time.monotonic() + _END_S
                with self._lock:
                    for peer in ended:
                        self._sessions.disconnect(peer, "pages of an aborted request were stuck")
            time.sleep(_STOP_CHECK_S)

    def _sending_to(self, transfer: TransferId) -> list[PeerId]:
        with self._lock:
            return self._sending.sending_to(transfer)

    def mark(self) -> Fence | None:
        """Return a fence after everything that the engine's thread has launched; None if there is
        nothing to wait for."""
        return self._mark()

    def layer_written(self, name: str, fence: Fence | None = None) -> None:
        """A layer of this step has been launched: before ``fence``, or before now. Takes no
        lock."""
        if self.offering:
            self._written.put(name, fence or self._mark())

    def end_step(self, fence: Fence | None = None) -> None:
        """The whole forward has been launched: before ``fence``, or before now. Takes no lock."""
        if self.offering:
            self.offering = False
            self._written.put(None, fence or self._mark())

    @property
    def has_news(self) -> bool:
        """Whether :meth:`poll` has news; takes no lock. Some news comes from the engine's own
        thread: a reader that asked early joins when the blocks are offered."""
        told = self._sending.has_notices or self._receiving.has_finished
        return told or self.news.is_set() or not self._loop.alive

    def poll(
        self, ends_step: bool = False
    ) -> tuple[list[tuple[ReceiveReport, Receive]], list[TransferEvent]]:
        """Return the receives that ended and the notices since the last call.
        ``ends_step``: the engine computes nothing until the next step begins.

        Raises:
            TransferFailed: a bug ended the agent's thread; requests would wait for ever.
        """
        if not self._loop.alive and not self._loop.closed:
            raise TransferFailed("the hand-off thread has ended, see its traceback above")
        with self._lock:
            self.news.clear()
            if ends_step:
                self._sending.step_ended_at = self._receiving.step_ended_at = time.monotonic()
            return self._receiving.take_finished(), self._sending.take_notices()

    @contextmanager
    def stats(self) -> Iterator[OffloadingConnectorStats]:
        """Lend the counters under the lock, so that the engine's side can add to them."""
        with self._lock:
            yield self._sessions.stats

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call."""
        with self._lock:
            return self._sessions.stats.take()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._loop.stop()
        self._sessions.transport.close()
        self._loop.join()
        self._written.close(_JOIN_TIMEOUT_S)

    def _take(self, event: Event) -> None:
        # Lock per event, so that a flood does not block the engine's thread.
        with self._lock, contained(self._on_error):
            self._on_event(event)
        if self._receiving.has_finished or self._sending.has_notices:
            self.news.set()

    def _tick(self, now: float) -> None:
        self._written.check()
        for tick in (self._sessions.tick, self._sending.tick, self._receiving.tick):
            with self._lock, contained(self._on_error):
                tick(now)

    def _on_error(self, error: Exception) -> None:
        """Log and count an error that no peer's boundary has contained; the thread goes on."""
        logger.error("internal error of KVConnect in its hand-offs", exc_info=error)
        self._sessions.stats.count("handoff_peer_errors")

    def _on_event(self, event: Event) -> None:
        with self._sessions.isolate(event.peer):
            if isinstance(event, PeerUp):
                self._sessions.on_up(event)
            elif isinstance(event, PeerDown):
                self._on_down(event)
            elif (session := self._sessions.get(event.peer)) is not None:
                self._on_session_event(session, event)

    def _on_down(self, event: PeerDown) -> None:
        origin, cause = self._sessions.on_down(event)
        with self._sessions.isolate(event.peer):  # the receive side must hear of it in any case
            self._sending.on_lost(event.peer)
        self._receiving.on_lost(event.peer, origin, cause)

    def _on_session_event(
        self, session: HandoffSession, event: MessageReceived | PagesSent | PagesReceived | Drained
    ) -> None:
        if not isinstance(event, MessageReceived) and event.read_id >= PROBE_READ_ID:
            if bandwidth_probe.on_event(self._sessions, session, event):
                self._receiving.on_connected(self._sessions.origin(session), session)
        elif isinstance(event, MessageReceived):
            self._on_message(session, messages.decode(event.payload))
        elif isinstance(event, PagesSent):
            self._sending.on_sent(session, event)
        elif isinstance(event, PagesReceived):
            if session.agreed:  # else it ends, perhaps because they are of other weights
                self._receiving.on_received(session, event)
        elif session.inbound:
            self._sending.on_drained(event)
        else:
            self._receiving.on_drained(event)

    def _on_message(self, session: HandoffSession, message: Message) -> None:
        if isinstance(message, Reject):
            self._sessions.on_reject(session, message)
        elif isinstance(message, HandoffHello):
            origin = self._sessions.on_hello(session, message)
            if origin is not None:
                bandwidth_probe.request_next(self._sessions, session)
        elif not session.agreed:
            raise ProtocolError(f"{type(message).__name__} before an agreement")
        elif isinstance(message, Probe):
            bandwidth_probe.answer(self._sessions, session, message.read_id)
        elif session.inbound:
            self._sending.on_message(session, message)
        else:
            self._receiving.on_message(session, message)


class WorkerCache(NamedTuple):
    """A worker's KV cache: its Hello, where the pages of each layer are, and how a transport
    reaches them. ``device``: the model's."""

    hello: HandoffHello
    pages: Sequence[GroupPages]
    memory: Memory
    device: torch.device


def start_agent(
    settings: Settings,
    cache: WorkerCache,
    address: tuple[str, int] | None,
    deadline_s: float,
    alone: bool = False,
    traced: bool = False,
    port: SharedPort | None = None,
    reads: bool = True,
) -> HandoffAgent:
    """Start a worker's hand-off agent; it listens at ``address``, if given, with what else in this
    process has the same ``port``.

    ``deadline_s``: how long a read request may wait for an unknown transfer. ``alone``: this worker
    gets instructions of its own, so it renews leases and reports gauges itself. ``traced``: the
    engine traces, so the agent keeps times of transfers. ``reads``: it receives blocks, too.

    Raises:
        ConfigError: an address, key, certificate or transport that cannot be used.
    """
    path = page_path(settings, measures=True)
    memory = ProbedMemory(cache.memory, cache.device)
    with ExitStack() as undo:
        serves = address is not None
        transport = open_transport(
            settings, "handoff", port, path, memory, reads=reads, serves=serves
        )
        undo.callback(transport.close)
        found = None
        if address:
            host, wanted = address
            found = transport.listen(host, wanted)
            logger.info("handing out KV blocks at %s:%d", found[0], found[1])
        preference = PathPreference(path, settings.min_rate)
        sessions = HandoffSessions(
            cache.hello, cache.pages, transport, OffloadingConnectorStats(), preference
        )
        sessions.speaks_for_engine, sessions.traced = sessions.speaks_for_engine or alone, traced
        agent = HandoffAgent(sessions, deadline_s, make_streams(cache.device).mark, found)
        undo.pop_all()
    return agent
