"""Engines that share host memory, with a network, a clock and threads that a test moves on.

Everything of KVConnect is real: the plan of the secondary tiers, the offers, the worker with its
stores, and the peers' agent. What they run on is not. A thread runs only while it is told to, and
until it waits for something; then another one may. So every order of events can be played again.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import math
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest

from kvconnect import threads
from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.head_shards import HeadUnit
from kvconnect.cache.keys import block_key, tenant_of
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.index import PENDING, READY, HostIndex
from kvconnect.peers import dialling, loop
from kvconnect.peers.sessions import HELLO_TIMEOUT_S
from kvconnect.protocol.cache_messages import NONCE_BYTES, HostTierAddresses, Place
from kvconnect.settings import DigestMode
from kvconnect.settings.sharing import PeerSettings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers import (
    LookupRequest,
    LookupResult,
    PrefetchDecision,
    TierLimits,
    TierPlan,
    store_threads,
    tiered_store,
)
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.messages import TierInstructions
from kvconnect.tiers.offers import Offers
from kvconnect.tiers.peers import peer_agent, same_machine, serving, sources
from kvconnect.tiers.peers.peer_agent import PeerAgent, SharedBlocks
from kvconnect.tiers.peers.peer_source import PeerSource
from kvconnect.tiers.peers.same_machine import OwnMemory, SourceMemory
from kvconnect.tiers.worker import TierWorker
from kvconnect.transport.base import (
    Disconnect,
    Drained,
    Event,
    IncomingPages,
    Memory,
    MessageReceived,
    OutgoingPages,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Transport,
    Unit,
)
from tests.turns import Turns

BLOCK = 4096
HALF = BLOCK // 2
SLOTS, BLOCKS, TOKENS = 4, 3, 4
"""Slots of an engine, blocks of a prompt, tokens of a block."""
ASK_S, WAIT_S, DEADLINE_S, STALL_S = 0.5, 2.0, 2.0, 3.0
HERE, FIRST_PORT = "127.0.0.1", 7900
WHOLE = [[[HeadUnit(0, ((0, HALF),)), HeadUnit(1, ((HALF, HALF),))]]]
SWAPPED = [[[HeadUnit(0, ((HALF, HALF),)), HeadUnit(1, ((0, HALF),))]]]
"""The same heads, in another order in the slot."""


# Threads ------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """The process of a thread was killed."""


class Task:
    """A thread that runs from :meth:`resume` until it waits, and takes ``threading.Thread``'s
    place."""

    running: ClassVar[Task | None] = None

    def __init__(self, engine: Engine, work: Callable[[], None]) -> None:
        self.where = "not started"
        self.done = False
        self.held = 0  # locks
        self._ready: Callable[[], bool] = lambda: True
        self._until: float | None = None
        self._engine = engine
        self._work = work
        self._killed = False
        self._turns = Turns(self._run)

    def start(self) -> None:
        self.where = "started"
        self._engine.tasks.append(self)

    def join(self, timeout: float) -> None:
        while not self.done:
            self.resume()

    def can_go_on(self) -> bool:
        late = self._until is not None and self._engine.world.now >= self._until
        return not self.done and (late or self._ready())

    def resume(self) -> None:
        before, Task.running = Task.running, self
        self._turns.resume()
        Task.running = before

    def kill(self) -> None:
        self._killed = True
        while not self.done:
            self.resume()

    def wait(self, where: str, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Let others run until this is ready or the time is over; for the task's own thread."""
        world = self._engine.world
        self._until = None if timeout is None else world.now + timeout
        self._ready, self.where = ready, where
        self._turns.pause()
        if self._killed:
            raise Stopped
        self.where = "running"
        return ready()

    def _run(self) -> None:
        try:
            if not self._killed:
                self._work()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - shown by the next invariant
            self._engine.world.errors.append(error)
        finally:
            self.done = True


class Turn:
    """Takes the place of ``threading.Condition``. One thread runs, and it does not pause before it
    gives the lock back."""

    def __enter__(self) -> bool:
        if Task.running is not None:
            Task.running.held += 1
        return True

    def __exit__(self, *_: object) -> None:
        if Task.running is not None:
            Task.running.held -= 1

    def wait_for(self, ready: Callable[[], Any], timeout: float | None = None) -> bool:
        if ready():
            return True
        assert Task.running is not None, "the engine's own thread waits"
        return Task.running.wait("condition", lambda: bool(ready()), timeout)

    def notify(self) -> None:
        """Who waits looks for itself."""

    notify_all = notify


def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engines' threads, locks and clocks be those of the world that is being played."""

    def make(kind: object, name: str, work: Callable[[], None], **_: object) -> Task:
        return Task(World.played.acting, work)

    clock = SimpleNamespace(monotonic=lambda: World.played.now)
    locks = SimpleNamespace(Condition=Turn, Lock=threading.Lock, Event=threading.Event)
    kinds = SimpleNamespace(make=make, ThreadKind=threads.ThreadKind)
    monkeypatch.setattr(peer_agent, "time", clock)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(loop, "threads", kinds)
    monkeypatch.setattr(dialling, "threading", locks)
    monkeypatch.setattr(sources, "threading", locks)
    monkeypatch.setattr(store_threads, "threading", locks)
    monkeypatch.setattr(tiered_store, "threading", locks)
    monkeypatch.setattr(store_threads, "make", make)
    monkeypatch.setattr(store_threads, "failed", lambda *what: World.played.errors.append(what[-1]))
    monkeypatch.setattr(serving, "MOST_BYTES", 4 * BLOCK)  # so that sources are busy at times
    process = SimpleNamespace(getpid=lambda: World.played.acting.pid)
    monkeypatch.setattr(same_machine, "os", process)
    monkeypatch.setattr(same_machine, "read_process", read_process)
    monkeypatch.setattr(serving, "OwnMemory", Shown)
    monkeypatch.setattr(peer_agent, "SourceMemory", Copied)
    monkeypatch.setattr(peer_agent, "check_other_end", lambda *_: None)
    monkeypatch.setattr(peer_agent, "is_this_machine", lambda host: host == HERE)


# The network --------------------------------------------------------------------------------------


@dataclass
class Frame:
    """A wire block on its way, read half by half from the source's memory."""

    read_id: int
    number: int
    wire_block: int
    data: bytes = b""
    bad: bool = False


@dataclass(eq=False)
class Sends:
    """An order of pages, and how many of its blocks have left."""

    order: OutgoingPages
    left: int = 0
    frame: Frame | None = None


@dataclass(eq=False)
class End:
    """One engine's side of a connection. Messages are in order, and so are the pages of each of two
    data connections; nothing orders one beside the others."""

    network: FakeTransport
    peer: PeerId
    address: tuple[str, int]
    inbound: bool = False
    up: bool = True
    broken: bool = False
    reason: str = "lost"
    other: End | None = None  # until both have met
    said: deque[bytes] = field(default_factory=deque)  # by this side
    queues: tuple[deque[Sends], deque[Sends]] = field(default_factory=lambda: (deque(), deque()))
    flying: tuple[deque[Frame], deque[Frame]] = field(default_factory=lambda: (deque(), deque()))
    expected: dict[int, IncomingPages] = field(default_factory=dict)
    stopping: dict[int, float] = field(default_factory=dict)  # since when


class FakeTransport(Transport):
    """One engine's transport; :class:`World` moves what it is given."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ends: dict[PeerId, End] = {}
        self.events: deque[Event] = deque()
        self.woken = False
        self.where: tuple[str, int] | None = None
        self._last = 0

    def register(self, memory: Memory) -> None:
        """Slots are found by :func:`runs`."""

    def listen(self, host: str, port: int) -> tuple[str, int]:
        self.where = host, port
        self.engine.world.listening[host, port] = self
        return self.where

    def connect(self, host: str, port: int) -> PeerId:
        return self.add(End(self, self.number(), (host, port)))

    def submit(self, order: PeerMessage | IncomingPages | OutgoingPages | Disconnect) -> None:
        self.engine.world.pause()
        end = self.ends.get(order.peer)
        if end is None or end.broken:
            return
        if isinstance(order, IncomingPages):
            end.expected[order.read_id] = order
        elif isinstance(order, PeerMessage):
            end.said.append(order.payload)
        elif isinstance(order, OutgoingPages):
            end.queues[order.number % 2].append(Sends(order))
        else:
            self.engine.world.seen[f"hung up: {order.reason}"] += 1
            if not self._may_hang_up(end, order.reason):
                self.engine.world.errors.append(AssertionError(f"it hung up: {order.reason}"))
            self.engine.world.cut(end)

    def poll(self, timeout: float) -> list[Event]:
        assert Task.running is not None
        Task.running.wait("poll", lambda: bool(self.events) or self.woken, timeout)
        self.woken = False
        events = list(self.events)
        self.events.clear()
        return events

    def wake(self) -> None:
        self.woken = True

    def _may_hang_up(self, end: End, reason: str) -> bool:
        """Say whether there is a reason: this worker has met itself, or one that stood still, or a
        read does not stop."""
        other = end.other.network.engine if end.other else self.engine
        still = other.frozen or other.thawed > self.engine.world.now - HELLO_TIMEOUT_S
        stuck = "a read took" in reason
        return "itself" in reason or stuck or ("no hello" in reason and still)

    def cancel(self, peer: PeerId, read_id: int) -> None:
        self.engine.world.pause()
        end = self.ends.get(peer)
        if end is not None:
            for queue in end.queues:
                for sends in [each for each in queue if each.order.read_id == read_id]:
                    queue.remove(sends)
            end.stopping[read_id] = self.engine.world.now

    def close(self) -> None:
        for end in list(self.ends.values()):
            self.engine.world.cut(end)
            end.up = False
        self.ends.clear()
        if self.where is not None:
            self.engine.world.listening.pop(self.where, None)

    def number(self) -> PeerId:
        self._last += 1
        return PeerId(self._last)

    def add(self, end: End) -> PeerId:
        self.ends[end.peer] = end
        return end.peer


def runs(host: HostArena, unit: Unit, slot: int) -> Iterator[memoryview]:
    """Yield the memory of a unit's runs in a slot."""
    for place in range(0, len(unit.segments), 3):
        offset, _, length = unit.segments[place : place + 3]
        yield host.view(slot)[offset : offset + length]


# The memory of other engines ----------------------------------------------------------------------


NO_NONCE = ctypes.create_string_buffer(NONCE_BYTES)
"""What another process has where one showed a nonce."""


class Shown(OwnMemory):
    """What this engine's process shows to others. It stays where it is when it is freed, and so do
    its bytes, as in a real process for a while."""

    def tell(self, peer: PeerId, nonce: bytes) -> HostTierAddresses:
        told = super().tell(peer, nonce)
        World.played.acting.nonces.append(self._nonces[peer])
        return told


class Copied(SourceMemory):
    """Notes what is being copied, and sees that it was not dropped before."""

    def __init__(self, told: HostTierAddresses, nonce: bytes, host: HostArena) -> None:
        self._keys: dict[Place, bytes] = {}
        self._world = World.played
        super().__init__(told, nonce, host)
        self._source = self._world.process(told.pid)

    def learn(self, key: bytes, place: Place) -> None:
        self._keys[place] = key
        super().learn(key, place)

    def read(self, blocks: Sequence[tuple[Place, int]], nbytes: int) -> list[bool]:
        seen, source = self._world.seen, self._source
        gone, slots = set(source.gone), [place.slot for place, _ in blocks]
        source.copied.update(slots)
        try:
            right = super().read(blocks, nbytes)
        except OSError:
            seen["memory that is not there"] += 1
            raise
        finally:
            source.copied.subtract(slots)
        for (place, _), good in zip(blocks, right, strict=True):
            assert not good or self._keys[place] not in gone, "a dropped block is copied"
            seen["copied from memory" if good else "another block in memory"] += 1
        return right


def read_process(pid: int, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy runs of another process's memory, a block in two halves. As with the system call, a
    process that ends meanwhile is read to the end."""
    world = World.played
    world.pause(0.9)
    process = world.process(pid)
    for there, here, nbytes in runs:
        world.note_copied(here, nbytes)
        for start in range(0, nbytes, HALF):
            length = min(HALF, nbytes - start)
            ctypes.memmove(here + start, process.at(there + start, length), length)
            world.pause(0.9)


# Engines ------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def content(key: bytes) -> bytes:
    """What a block holds: other bytes for each key, so a wrong block is seen."""
    return hashlib.shake_128(key).digest(BLOCK)


def in_layout(data: bytes, layout: list[list[list[HeadUnit]]]) -> bytes:
    return data if layout is WHOLE else data[HALF:] + data[:HALF]


class Arena(HostArena):
    """Others may run before and after a block is verified."""

    world: World

    def verify(self, slot: int, nbytes: int) -> None:
        self.world.pause()
        super().verify(slot, nbytes)
        self.world.pause()


class Store(PeerSource):
    """Notes which slots are being read into."""

    engine: Engine

    def get(self, keys: Any, buffers: Any) -> list[BlockOutcome]:
        engine = self.engine
        slots = [self._slot(buffer) for buffer in buffers]
        engine.reading.update(slots)
        engine.reads[id(slots)] = engine.world.now
        outcomes = super().get(keys, buffers)
        engine.reading.subtract(slots)
        del engine.reads[id(slots)]
        engine.world.seen.update(f"read: {outcome.value}" for outcome in outcomes)
        return outcomes


@dataclass(eq=False)
class Copying:
    """A block on its way from the device to a slot, half by half."""

    block_hash: bytes
    key: bytes
    slot: int
    halves: int = 0
    void: bool = False


@dataclass
class Asked:
    """A request that waits for what secondary tiers have."""

    request: LookupRequest
    since: float


class Engine:
    """A scheduler with its plan and a worker with its host tier, steps apart."""

    def __init__(self, world: World, place: int, before: Engine | None = None) -> None:
        layout = world.layouts[place]
        self.world, self.place, self.layout = world, place, layout
        self.born = world.started
        self.pid = self.born if before is None else before.pid
        self.before = before  # whose process number this one has
        self.alive, self.frozen, self.closed = True, False, False
        self.thawed = -math.inf  # when it last went on after it had stood still
        self.stalls = False  # its pages stand still on their way, its messages do not
        self.tasks: list[Task] = []
        self.reading: Counter[int] = Counter()  # slots
        self.reads: dict[int, float] = {}  # since when
        self.rotten: set[int] = set()
        self.generation = 0
        self.names: dict[tuple[int, bytes], bytes] = {}  # (generation, hash) -> key
        self.asked: dict[str, Asked] = {}
        self.planned: list[Copying] = []
        self.steps: deque[tuple[TierInstructions, list[Copying]]] = deque()
        self.copying: list[Copying] = []
        self.holds: dict[int, bytes] = {}  # slot -> key of what was committed there
        self.gone: set[bytes] = set()  # keys that were dropped and not stored again
        self.copied: Counter[int] = Counter()  # slots, by others
        self.nonces: list[ctypes.Array[ctypes.c_char]] = []
        world.acting = self
        self.host = Arena(SLOTS, BLOCK, world.digest)
        self.host.world = world
        self.network = FakeTransport(self)
        blocks = SharedBlocks(self.host, layout, b"format", b"w" if layout is WHOLE else b"s")
        here = f"{HERE}:{FIRST_PORT + place}"
        everyone = f"{HERE}:{FIRST_PORT}-{FIRST_PORT + world.count - 1}"
        options = PeerSettings(
            ask=(everyone,), listen=here, ask_s=ASK_S, same_machine=world.same_machine
        )
        self.agent = PeerAgent(options, self.network, blocks, WAIT_S)
        self.store = Store(self.agent, blocks)
        self.store.engine = self
        geometry = Geometry((GroupGeometry((ByteRun(0, BLOCK, BLOCK),), TOKENS),))
        clock = lambda: world.now  # noqa: E731
        self.worker = TierWorker(
            {}, self.host, geometry, wait_s=WAIT_S, clock=clock, peers=self.store
        )
        self.index = HostIndex(SLOTS, 1, make_policy("lru", SLOTS))
        self.offers = Offers(self.index, serves=True)
        limits = TierLimits(1, DEADLINE_S, WAIT_S, SLOTS, reused=False)
        groups, stats = (CacheGroup(TOKENS),), OffloadingConnectorStats()
        self.plan = TierPlan(self.index, groups, stats, limits, choose_all, lambda *_: None)

    def prefix(self, tenant: str) -> bytes:
        scope = b"" if not self.generation else b"%d.%d" % (self.born, self.generation)
        return tenant_of(tenant) + scope.ljust(8, b"\0")

    def hashes(self, tenant: str, name: str, blocks: int) -> list[bytes]:
        found = [f"{tenant}.{name}{number}".encode() for number in range(blocks)]
        prefix = self.prefix(tenant)
        self.names.update({(self.generation, it): block_key(prefix, 0, it) for it in found})
        return found

    # The scheduler ------------------------------------------------------------------------------

    def compute(self, tenant: str, name: str, blocks: int = BLOCKS) -> None:
        """A prompt was computed: plan to store what host memory lacks."""
        for block_hash in self.hashes(tenant, name, blocks):
            if not self.index.has(0, block_hash):
                slot = self.index.reserve(0, block_hash)
                if slot is None:
                    return
                key = self.names[self.generation, block_hash]
                self.planned.append(Copying(block_hash, key, slot))

    def ask(self, request_id: str, tenant: str, name: str, blocks: int) -> None:
        hashes = self.hashes(tenant, name, blocks)
        request = LookupRequest([hashes], 0, TOKENS * blocks, self.prefix(tenant))
        self.asked[request_id] = Asked(request, self.world.now)
        self.look(request_id)

    def look(self, request_id: str) -> None:
        """Ask whether a request still waits; if not, it loads what is there, and ends."""
        asked, now = self.asked[request_id], self.world.now
        if self.plan.lookup(request_id, asked.request, now):
            return
        promoted = self.plan.on_load_planned(request_id)
        self.plan.forget(request_id)
        self.world.seen["from a peer"] += bool(promoted)
        ready = len(self.index.ready_slots(0, asked.request.hashes[0]))
        self.world.seen["a miss"] += ready < len(asked.request.hashes[0])
        del self.asked[request_id]

    def schedule(self) -> None:
        """Begin a step; the worker may be a step behind."""
        now = self.world.now
        work = self.plan.take(now)
        for request_id in list(self.asked):
            self.look(request_id)
        for asked in self.asked.values():
            assert now < asked.since + WAIT_S, "a request waits too long"
        self.offers.take(work)
        self.steps.append((work, self.planned))
        self.planned = []

    def reset(self) -> None:
        """The weights have changed."""
        self.generation += 1
        self.index.clear()
        self.holds.clear()
        self.plan.reset()
        self.offers.withdraw()
        for job in (*self.planned, *(job for _, jobs in self.steps for job in jobs), *self.copying):
            job.void = True

    def drop(self, rng: random.Random) -> None:
        """A hint drops a block: nobody may read it any more."""
        if ready := self.ready():
            slot = rng.choice(ready)
            self.index.remove([slot])
            self.offers.drop([self.holds[slot]])

    def ready(self) -> list[int]:
        return [slot for slot in range(SLOTS) if self.index.slots.state(slot) == READY]

    # The worker ---------------------------------------------------------------------------------

    def execute(self) -> None:
        self.world.acting = self
        work, stores = self.steps.popleft()
        if work.withdraw:
            self.gone.update(self.agent.served._places)
        self.worker.serve(work, [job.slot for job in stores])
        self.worker.submit((*work.lookups, *work.prefetches))
        self.gone.update(work.dropped)
        self.gone.difference_update(key for key, _ in work.served)
        self.copying += stores
        for answer in self.worker.poll():
            came = self.plan.on_answer(answer, self.world.now)
            if came is not None:
                self.offers.promoted(came)
                self.holds.update({slot: key for key, slot in came.places})
                self.rotten.difference_update(slot for _, slot in came.places)
                self.world.seen["promoted"] += len(came.places)

    def copy(self, job: Copying) -> None:
        """Copy half a block; after the second half, the scheduler hears of it."""
        data = in_layout(content(job.key), self.layout)
        assert not self.reading[job.slot], "a store writes where a read does"
        self.world.note_overwritten(self, job.slot)
        start = HALF * job.halves
        self.host.view(job.slot)[start : start + HALF] = data[start : start + HALF]
        job.halves += 1
        if job.halves == 1:
            return
        self.host.seal(job.slot, BLOCK)
        self.rotten.discard(job.slot)
        self.copying.remove(job)
        if job.void:
            self.index.abandon([job.slot])
            return
        self.index.commit([job.slot])
        self.holds[job.slot] = job.key
        self.offers.stored(0, job.block_hash, job.key)

    def rot(self, rng: random.Random) -> None:
        """A byte of a block changes that nobody is sending."""
        sent = {
            b.slot for sending in self.sending.values() for b in sending.blocks if b is not None
        }
        slots = [slot for slot in self.ready() if slot not in sent]
        if slots and self.world.digest == "full" and self.tasks[0].where == "poll":
            slot = rng.choice(slots)
            self.host.view(slot)[rng.randrange(BLOCK)] ^= 1
            self.rotten.add(slot)

    def at(self, address: int, nbytes: int) -> int:
        """Return where this process has an address of its own, or of a process that had its number
        before: both have their memory at the same addresses."""
        engine: Engine | None = self
        while engine is not None:
            for mine, place in zip(self.memory(), engine.memory(), strict=False):
                if place[0] <= address <= address + nbytes <= sum(place):
                    return mine[0] + address - place[0]
            for nonce in engine.nonces:
                if address == ctypes.addressof(nonce) and nbytes == NONCE_BYTES:
                    return address if engine is self else ctypes.addressof(NO_NONCE)
            engine = engine.before
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    def memory(self) -> list[tuple[int, int]]:
        """Return where the slots and their versions are, and how many bytes."""
        versions = self.agent.served.versions_address
        return [(self.host.address, SLOTS * BLOCK), (versions, 8 * SLOTS)]

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    @property
    def busy(self) -> bool:
        """Whether the engine steps."""
        return bool(self.asked or self.plan.busy or self.planned or self.offers.ready)

    @property
    def told(self) -> bool:
        """Whether it knows where blocks are in the memory of others."""
        sources = self.agent.reader.sources._sources.values()
        return any(source.memory and source.memory._places for source in sources)

    @property
    def gives(self) -> bool:
        """Whether it sends blocks, or others copy some."""
        return bool(self.sending or self.copied.total())

    @property
    def sending(self) -> dict[Any, Any]:
        return self.agent._serving._sending

    def check(self) -> None:
        """What holds at any time."""
        self.index.check()
        for slot in self.ready():
            if slot not in self.rotten:
                want = in_layout(content(self.holds[slot]), self.layout)
                assert bytes(self.host.view(slot)) == want, "a wrong block can be loaded"
        served = self.agent.served
        assert not any(served.find(key) for key in self.gone), "a dropped block is served"
        sources, _, reads = self.agent.reader
        for source in sources._sources.values():
            mine = [read for read in reads._open.values() if read.source is source]
            assert source.reading == sum(len(read.places) for read in mine), "reads are miscounted"
        nbytes = sum(sending.nbytes for sending in self.sending.values())
        assert self.agent._serving._limit.nbytes == nbytes, "bytes on their way are miscounted"
        for since in self.reads.values():
            late = self.world.now - since > ASK_S + WAIT_S + STALL_S + self.world.slack
            assert self.frozen or not late, "a read never ends"

    def check_rest(self) -> None:
        """What holds once nothing goes on."""
        reader, limit = self.agent.reader, self.agent._serving._limit
        assert not (reader.reads._open or reader.questions._open), "reads or questions are left"
        assert not (self.sending or limit.nbytes), "bytes are on their way for ever"
        assert all(source.reading == 0 for source in reader.sources._sources.values())
        assert not (self.asked or self.plan.busy or self.index.slots.busy), "something is left"


def choose_all(offer: LookupResult) -> PrefetchDecision:
    return PrefetchDecision(len(offer.tiers))


# The world ----------------------------------------------------------------------------------------

Act = Callable[[], object]


class World:
    """Engines, and what goes on between them: one small act after the other."""

    played: ClassVar[World]

    def __init__(
        self,
        layouts: list[list[list[list[HeadUnit]]]],
        digest: DigestMode,
        same_machine: Literal["memory", "network"],
        seen: Counter[str],
    ) -> None:
        World.played = self
        self.digest, self.same_machine = digest, same_machine
        self.seen, self.count, self.layouts = seen, len(layouts), layouts
        self.now = 1000.0
        self.slow = False  # nothing moves on the network
        self.slack = 0.0  # as the clock jumps over what is due
        self.rng = random.Random(0)
        self.errors: list[object] = []
        self.listening: dict[tuple[str, int], FakeTransport] = {}
        self.lost: list[End] = []  # of engines that were killed; their pages may still land
        self.requests = self.started = 0
        self._acting: Engine | None = None
        self.engines: list[Engine] = []
        for place in range(self.count):
            self.engines.append(self.start(place))

    @property
    def acting(self) -> Engine:
        """Whose code is running."""
        engine = Task.running._engine if Task.running else self._acting
        assert engine is not None
        return engine

    @acting.setter
    def acting(self, engine: Engine) -> None:
        self._acting = engine

    def start(self, place: int, before: Engine | None = None) -> Engine:
        self.started += 1
        return Engine(self, place, before)

    def process(self, pid: int) -> Engine:
        """Return the engine of a process; a process that stands still is there."""
        for engine in self.engines:
            if engine.pid == pid and (engine.alive or engine.closed):
                return engine
        raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))

    def pause(self, often: float = 0.3) -> None:
        """Let others run in the middle of a thread's work, sometimes."""
        task = Task.running
        if task is not None and not task.held and self.rng.random() < often:
            task.wait("pause", lambda: True, None)

    # What can happen next -----------------------------------------------------------------------

    def go(self, acts: int) -> None:
        for _ in range(acts):
            possible = list(self.possible())
            if possible:
                self.rng.choice(possible)()

    def possible(self, steps: bool = True) -> Iterator[Act]:
        for engine in self.engines:
            if engine.runs:
                yield from (task.resume for task in engine.tasks if task.can_go_on())
                yield from (partial(engine.copy, job) for job in engine.copying)
                if steps and engine.busy and len(engine.steps) < 2:
                    yield engine.schedule
                if engine.steps:
                    yield engine.execute
        for end in self.ends():
            yield from self.possible_at(end)

    def ends(self) -> list[End]:
        ends = [end for engine in self.engines for end in engine.network.ends.values()]
        return ends + self.lost

    def possible_at(self, end: End) -> Iterator[Act]:
        """What the network can do at one side of a connection."""
        frozen = end.network.engine.frozen
        if self.slow:
            return
        if end.broken and end.up:
            yield partial(self.end_down, end)
        if end.other is None:
            if not end.inbound and not end.broken:
                yield partial(self.meet, end)
            return
        if end.said:
            yield partial(self.deliver, end)
        for line in (0, 1):
            stalls = frozen or end.network.engine.stalls
            if end.queues[line] and end.up and not end.broken and not stalls:
                yield partial(self.leave, end, line)
            if end.flying[line] and not end.other.network.engine.frozen:
                yield partial(self.land, end, line)
        if not frozen and not end.other.network.engine.stalls:
            yield from (partial(self.drain, end, read_id) for read_id in end.stopping)

    def meet(self, end: End) -> None:
        """A connection that was asked for is made, or not."""
        there = self.listening.get(end.address)
        if there is None:
            self.end_down(end)
            return
        end.other = End(there, there.number(), end.address, inbound=True, other=end)
        there.add(end.other)
        for side in (end, end.other):
            address = f"{HERE}:{end.address[1]}"
            side.network.events.append(PeerUp(side.peer, side.inbound, address))

    def deliver(self, end: End) -> None:
        payload = end.said.popleft()
        if end.other is not None and end.other.up:
            end.other.network.events.append(MessageReceived(end.other.peer, payload))

    def leave(self, end: End, line: int) -> None:
        """Half a block is read from a source's memory and handed to the network."""
        sends = end.queues[line][0]
        order = sends.order
        slot = order.ids[sends.left]
        frame = sends.frame
        if frame is None:
            frame = sends.frame = Frame(order.read_id, order.number, order.first + sends.left)
        whole = b"".join(bytes(run) for run in runs(end.network.engine.host, order.unit, slot))
        half = len(whole) // 2
        if not frame.data:
            frame.data = whole[:half]
            return
        frame.data += whole[half:]
        end.flying[line].append(frame)
        sends.left, sends.frame = sends.left + 1, None
        if sends.left == len(order.ids):
            end.queues[line].popleft()
            nbytes = len(order.ids) * order.unit.block_bytes
            end.network.events.append(PagesSent(end.peer, order.read_id, nbytes, 0.0))

    def land(self, end: End, line: int) -> None:
        """A block arrives in a reader's slot, if the reader still expects it."""
        frame, other = end.flying[line].popleft(), end.other
        expected = None if other is None or not other.up else other.expected.get(frame.read_id)
        if other is None or expected is None:
            return
        engine = other.network.engine
        first, ids = expected.spans[frame.number]
        slot = ids[frame.wire_block - first]
        assert engine.reading[slot], "a slot is written after its read has ended"
        assert engine.index.slots.state(slot) == PENDING, "a slot is written that is nobody's"
        start = 0
        for run in runs(engine.host, expected.units[frame.number], slot):
            run[:] = frame.data[start : start + len(run)]
            start += len(run)
        if frame.read_id in other.stopping:
            self.seen["landed late"] += 1
            return
        bad = (frame.wire_block,) if frame.bad else ()
        where = other.peer, frame.read_id, frame.number, frame.wire_block
        other.network.events.append(PagesReceived(*where, 1, bad, len(frame.data), 0.0))

    def drain(self, end: End, read_id: int) -> None:
        """A read that was cancelled has ended."""
        end.stopping.pop(read_id, None)
        end.expected.pop(read_id, None)
        if end.up:
            end.network.events.append(Drained(end.peer, read_id))

    def end_down(self, end: End) -> None:
        """One side hears that a connection is gone."""
        end.up = False
        end.network.ends.pop(end.peer, None)
        if end.other is not None and end.other.up:  # what it has sent may still arrive there
            self.lost.append(end)
        end.expected.clear()
        end.stopping.clear()
        if end.network.engine.alive:
            end.network.events.append(PeerDown(end.peer, end.reason))
        self.lost = [each for each in self.lost if each.other is not None and each.other.up]

    def cut(self, end: End) -> None:
        for side in (end, end.other):
            if side is not None:
                side.broken = True
                for queue in side.queues:
                    queue.clear()

    # What a test does ---------------------------------------------------------------------------

    def kill(self, engine: Engine) -> None:
        """A process ends as with ``kill -9``."""
        if engine.reads:
            self.seen["killed while it reads"] += 1
        if engine.sending:
            self.seen["killed while it sends"] += 1
        if engine.copied.total():
            self.seen["killed while it is copied"] += 1
        engine.alive = False
        for task in engine.tasks:
            task.kill()
        if engine.network.where is not None:
            self.listening.pop(engine.network.where, None)
        for end in list(engine.network.ends.values()):
            self.cut(end)
            self.end_down(end)

    def close(self, engine: Engine) -> None:
        """An engine is shut down. Its process goes on, and uses the memory for something else."""
        engine.agent.close()
        self.kill(engine)
        engine.closed = True
        for slot in range(SLOTS):
            engine.host.view(slot)[:] = bytes(BLOCK)

    def restart(self, engine: Engine, same_pid: bool = False) -> None:
        self.engines[engine.place] = self.start(engine.place, engine if same_pid else None)

    def thaw(self, engine: Engine) -> None:
        """A process goes on that stood still; meanwhile nothing of it could end."""
        if engine.frozen:
            engine.thawed = self.now
        engine.frozen = False
        engine.reads = dict.fromkeys(engine.reads, self.now)

    def pass_time(self, seconds: float) -> None:
        """The clock goes on, and everybody who waits for it gets a turn. A transport ends what does
        not end by itself."""
        self.slack = max(self.slack, 4 * seconds)
        self.now += seconds
        for end in self.ends():
            late = [n for n, since in end.stopping.items() if self.now >= since + STALL_S]
            for read_id in late if not end.network.engine.frozen else ():
                self.drain(end, read_id)
        for engine in self.engines:
            for task in engine.tasks if engine.runs else ():
                for _ in range(6):
                    if task.can_go_on():
                        task.resume()

    def note_overwritten(self, engine: Engine, slot: int) -> None:
        sent = (b.slot for sending in engine.sending.values() for b in sending.blocks if b)
        self.seen["overwritten while it is sent"] += slot in sent
        self.seen["overwritten while it is copied"] += bool(engine.copied[slot])

    def note_copied(self, address: int, nbytes: int) -> None:
        """The acting engine copies memory of another one to an address."""
        engine = self.acting
        slot, rest = divmod(address - engine.host.address, BLOCK)
        if nbytes == BLOCK:
            assert not rest and engine.reading[slot], "a slot is written after its read has ended"
            assert engine.index.slots.state(slot) == PENDING, "a slot is written that is nobody's"

    def sources(self) -> list[Engine]:
        """Engines whose blocks are being read, after a while in which one may begin to be."""
        self.go_until(lambda: any(each.gives for each in self.engines))
        return [each for each in self.engines if each.alive and each.gives]

    def frames(self) -> list[Frame]:
        return [frame for end in self.ends() for line in end.flying for frame in line]

    def go_until(self, fact: Callable[[], object]) -> None:
        """Go on until a fact is true, but not for long."""
        for _ in range(60):
            if fact():
                return
            self.go(1)

    def garble(self) -> None:
        """A byte changes on its way, which the transport's digest shows."""
        self.go_until(self.frames)
        if frames := self.frames():
            frame = self.rng.choice(frames)
            place = self.rng.randrange(len(frame.data))
            changed = frame.data[place] ^ 1
            frame.data = frame.data[:place] + bytes([changed]) + frame.data[place + 1 :]
            frame.bad = True

    def play(self, *stepping: Engine) -> None:
        """Go on until nothing happens any more, with steps of some engines only."""
        for _ in range(3000):
            steps = [it.schedule for it in stepping if it.busy and len(it.steps) < 2]
            possible = [*self.possible(steps=False), *steps]
            if not possible:
                return
            self.rng.choice(possible)()
        raise AssertionError("something never ends")

    def settle(self, rounds: int = 300) -> None:
        """Let everything end by itself."""
        self.slow = False
        for engine in self.engines:
            self.thaw(engine)
        for number in range(rounds):
            while possible := list(self.possible(steps=False)):
                self.rng.choice(possible)()
            self.check()
            if number > 20 and self.at_rest():
                return
            for engine in self.engines:
                if engine.alive:
                    engine.schedule()
            self.pass_time(0.3)
        raise AssertionError("something never ends")

    def share(self) -> None:
        """Whatever happened before, every engine loads what another one has computed."""
        for engine in self.engines:
            if not engine.alive:
                self.restart(engine)
        self.settle()
        self.pass_time(60.0)  # whoever was late is asked again
        self.settle()
        for place, engine in enumerate(self.engines):
            name = f"last{place}."
            engine.compute("", name, 2)
            self.settle()
            other = self.engines[place - 1]
            other.ask("last", "", name, 2)
            self.settle()
            found = len(other.index.ready_slots(0, other.hashes("", name, 2)))
            same = engine.generation == other.generation == 0
            assert found == 2 * same, "engines no longer share"
        self.check_rest()

    def at_rest(self) -> bool:
        return not any(
            engine.asked or engine.plan.busy or engine.reads or engine.copying or engine.sending
            for engine in self.engines
            if engine.alive
        )

    def check(self) -> None:
        assert not self.errors, self.errors
        for engine in self.engines:
            if engine.alive:
                engine.check()

    def check_rest(self) -> None:
        for engine in self.engines:
            if engine.alive:
                engine.check_rest()

    def end(self) -> None:
        for engine in self.engines:
            for task in engine.tasks:
                task.kill()
