"""What peers that hold the key may say, and strangers before they prove it, over real connections.

A peer that holds the key says valid and invalid messages in any order: to a source as its reader,
to a reader as its source, and to both about NIXL. It ends its own connection at most: an honest
reader is served the right bytes afterwards, and nothing of the hostile ones is kept.
"""

from __future__ import annotations

import importlib.util
import random
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

from kvconnect.disaggregation.messages import OfferBlocks, PrefillSource
from kvconnect.errors import ProtocolError, Refused, TransferFailed
from kvconnect.protocol import codec, frames, messages, nixl_messages, tickets
from kvconnect.protocol.auth import NONCE_BYTES, SESSION_BYTES, ClientAuth, Opening, ServerAuth
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.messages import PROBE_READ_ID, GroupHello, HandoffHello
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity, identify
from kvconnect.testing.page_memory import PageMemory, plain_unit
from kvconnect.transport import Security, Transport, make_transport
from kvconnect.transport.base import IncomingPages, OutgoingPages, PagesReceived, PeerUp
from kvconnect.transport.nixl.agent import NixlAgent
from kvconnect.types import Endpoint, Rank, Span
from tests.fakes.handoff_engine import TRANSFER, Engine, finished, receive, table
from tests.hostile import Outcome

KEY = b"the key that all engines share.."
TOKENS = 150
MESSAGES = 16_000
HANDSHAKES = 3_000
TICKETS = 20_000
DEADLINE_S = 60.0

_NUMBERS = (0, 1, 2, 5, 63, 1 << 20, (1 << 24) - 1, (1 << 40) - 1, 1 << 62, PROBE_READ_ID - 1)


def run(limit: int | None = None, seed: int = 1) -> Outcome:
    """Play messages, handshakes and tickets, at most ``limit`` of each."""
    outcome = Outcome()
    rng = random.Random(seed)
    most = [count if limit is None else min(limit, count) for count in (MESSAGES, HANDSHAKES)]
    _play_readers(outcome, rng, most[0] // 2)
    _play_sources(outcome, rng, most[0] // 4)
    _play_nixl(outcome, rng, most[0] - most[0] // 2 - most[0] // 4)
    _play_handshakes(outcome, rng, most[1])
    _play_tickets(outcome, rng, TICKETS if limit is None else min(limit, TICKETS))
    return outcome


class Wire:
    """One hostile peer's connections, once it has proven the key."""

    def __init__(self, control: socket.socket, data_connections: list[socket.socket]) -> None:
        self.control, self.data_connections = control, data_connections
        self._reader = codec.MessageReader()
        self._frames = 0

    def say(self, payload: bytes) -> None:
        self.control.sendall(codec.pack_message(payload))

    def received(self) -> list[bytes]:
        """Wait for something, and return the messages in it."""
        data = self.control.recv(1 << 16)
        if not data:
            raise EOFError
        return self._reader.feed(data)

    def hear(self) -> list[messages.Message]:
        """Wait for something, and return the messages in it."""
        found = []
        for message in self.received():
            with suppress(ProtocolError):  # the greeting, and heartbeats
                found.append(messages.decode(message))
        return found

    def send(self, read_id: int, unit: int, blocks: range, payload: bytes) -> None:
        """Send pages, with digests that are wrong."""
        first, count, nbytes = blocks.start, len(blocks), len(payload)
        header = frames.FrameHeader(self._frames, read_id, unit, first, count, nbytes, 1)
        self._frames += 1
        self.data_connections[0].sendall(frames.pack_header(header) + payload + bytes(8 * count))

    def close(self) -> None:
        """Close it once the other side has heard everything, or ended it."""
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)
            while self.control.recv(1 << 16):
                pass
        for each in (self.control, *self.data_connections):
            each.close()


def _prove(sock: socket.socket, auth: ClientAuth | ServerAuth) -> None:
    if isinstance(auth, ClientAuth):
        sock.sendall(auth.start())
    while not auth.done:
        data = sock.recv(4096)
        if not data:
            raise EOFError
        sock.sendall(auth.feed(data))


def _connect(address: tuple[str, int], rng: random.Random, greeting: bytes) -> Wire:
    session, count = rng.randbytes(SESSION_BYTES), rng.choice([1, 2])
    openings = [Opening("control", session, 0, count)]
    openings += [Opening("data", session, number, count) for number in range(count)]
    socks: list[socket.socket] = []
    try:
        for opening in openings:
            sock = socket.create_connection(address, timeout=DEADLINE_S)
            socks.append(sock)
            _prove(sock, ClientAuth(KEY, opening, rng.randbytes(NONCE_BYTES)))
    except (OSError, EOFError):
        for sock in socks:
            sock.close()
        raise
    wire = Wire(socks[0], socks[1:])
    wire.say(greeting)
    return wire


def _accept(listener: socket.socket, rng: random.Random, greeting: bytes) -> Wire:
    socks: dict[tuple[str, int], socket.socket] = {}
    total = 1
    while len(socks) <= total:
        sock, _ = listener.accept()
        sock.settimeout(DEADLINE_S)
        auth = ServerAuth(KEY, rng.randbytes(NONCE_BYTES))
        _prove(sock, auth)
        total = auth.opening.connections
        socks[auth.opening.channel, auth.opening.number] = sock
    wire = Wire(socks.pop(("control", 0)), list(socks.values()))
    wire.say(greeting)
    return wire


def _hello(rng: random.Random, plain: bool = False, **other: object) -> bytes:
    """Return what says who a peer is; ``plain``: that it is like an honest one."""
    group = {"block_tokens": 16, "page_tokens": 16, "layers": ["layer0", "layer1", "layer2"]}
    group |= {"kv_heads": 4, "heads": 4, "row_bytes": 32, "order": "HNC", "splittable": True}
    group |= rng.choice(
        [{}]
        if plain
        else [
            *({}, {}, {}, {}, {"page_tokens": 1}, {"page_tokens": 8}, {"layers": []}),
            *({"layers": ["layer1"]}, {"order": "NHC"}, {"splittable": False}),
            {"block_tokens": 1 << 30, "page_tokens": 1 << 30},
        ]
    )
    ranks = [Rank(0, 1, 0, 1)] * 4 + [Rank(1, 2, 0, 1), Rank(3, 4, 0, 2)]
    rank = rng.choice(ranks[:1] if plain else ranks)
    group["heads"] = max(1, 4 // rank.tp)
    said = {"engine_id": f"evil{rng.randrange(10**6)}", "epoch": 0, **other}
    hello = HandoffHello(
        software="evil",
        rank=rank,
        identity=Identity(weights=Weights(files="tiny")),
        format={"model": "tiny"},
        groups=[GroupHello(**group)],  # type: ignore[arg-type]
        **said,  # type: ignore[arg-type]
    )
    return messages.encode(hello)


def _spoiled(rng: random.Random, payload: bytes) -> bytes:
    """Change a few bytes, cut it off, or say something else altogether."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 40))
    if kind == 1:
        return payload[: rng.randrange(1, len(payload) + 1)]
    changed = bytearray(payload)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


class Speaker:
    """Says what a reader, or a ``source``, may say, in any order, with numbers that often fit; now
    and then what it may not, which ends its connection."""

    def __init__(self, rng: random.Random, source: bool = False, last: int = 0) -> None:
        self._rng = rng
        self._source = source
        self._last = last

    def next(self) -> bytes:
        if self._rng.random() < 0.02:
            return _spoiled(self._rng, messages.encode(self._message(self._source)))
        return messages.encode(self._message(self._source ^ (self._rng.random() < 0.02)))

    def _message(self, source: bool) -> messages.Message:
        rng = self._rng
        number = min(
            rng.choice([self._last, self._last, rng.randrange(20), rng.choice(_NUMBERS)]),
            PROBE_READ_ID - 1,
        )
        transfer = rng.choice([TRANSFER, TRANSFER, bytes(16), rng.randbytes(16)])
        if source:
            kinds = [
                *[lambda: messages.Alive([number] * rng.choice([0, 1, 1000]))] * 4,
                *[lambda: messages.PagesReady(number)] * 4,
                lambda: messages.Fail(number, rng.choice(["gone", "x\u200b"]), "\x1b[31m" * 500),
            ]
        elif rng.random() < 0.4:
            return self._read_request(transfer, number)
        else:
            kinds = [
                lambda: messages.Cancel(number),
                lambda: messages.Cancel(self._last),
                lambda: messages.ReadDone(number),
                lambda: messages.Renew([transfer] * rng.choice([1, 4096])),
                lambda: messages.Decline(rng.randbytes(16)),
            ]
        if rng.random() < 0.01:
            kinds = [
                lambda: messages.Probe(PROBE_READ_ID + rng.randrange(3)),
                lambda: messages.Reject(rng.choice(["auth", "y"]), "z" * 5000),
            ]
        return rng.choice(kinds)()

    def _read_request(self, transfer: bytes, number: int) -> messages.ReadRequest:
        rng = self._rng
        self._last = number = self._last + 1 if rng.random() < 0.98 else number
        if rng.random() < 0.9:
            return messages.ReadRequest(
                number, transfer, rng.random() < 0.5, [(0, 0, rng.choice([1, 9]))], self._prompt()
            )
        places = [0, 0, 0, 1, 63], [0, 1, 3, 9, (1 << 40) - 1], [1, 2, 9, 10, 10, (1 << 24) - 1]
        count = rng.choice([1, 1, 1, 1, 2, 1024])
        parts = [tuple(rng.choice(each) for each in places) for _ in range(count)]
        early, prompt = rng.random() < 0.5, self._prompt()
        return messages.ReadRequest(number, transfer, early, sorted(parts), prompt)  # type: ignore[arg-type]

    def _prompt(self) -> PromptIdentity:
        return NO_PROMPT if self._rng.random() < 0.9 else identify([1], self._rng.random())


def _play_readers(outcome: Outcome, rng: random.Random, count: int) -> None:
    """Hostile readers of a source that an honest one reads from, too."""
    with Engine(sends=True, key=KEY) as p:
        there = table(TOKENS, p.block)
        p.fill(there, seed=1)
        p.step(offers=[OfferBlocks(TRANSFER)])
        p.step(offers=[OfferBlocks(TRANSFER, (Span(0, 0, there),))])
        address = p.agents[0].address
        assert address
        left = count
        while left > 0:
            with suppress(OSError, EOFError):
                wire = _connect(address, rng, codec.pack_greeting(rng.choice([0, 1, 16])))
                speaker = Speaker(rng)
                try:
                    wire.say(_hello(rng))
                    for _ in range(min(left, rng.randrange(1, 120))):
                        left, outcome.cases = left - 1, outcome.cases + 1
                        wire.say(speaker.next())
                    if rng.random() < 0.2:
                        wire.data_connections[0].sendall(rng.randbytes(rng.randrange(1, 200)))
                finally:
                    wire.close()
        _check(outcome, p, "hostile readers")
        with Engine(key=KEY) as d:
            here = table(TOKENS, d.block)
            d.step(receives=[receive(p.source(), here, TOKENS)])
            _check_pages(outcome, d, p, here, there)
        _until(outcome, lambda: not _kept(p), "what hostile readers left behind")


def _check_pages(
    outcome: Outcome, d: Engine, p: Engine, here: array[int], there: array[int]
) -> None:
    """See that an honest reader has the right bytes."""
    try:
        (report,) = finished(d)
    except AssertionError:
        outcome.hangs += 1
        outcome.notes.append("an honest reader waits for ever")
        return
    right = d.content(here, TOKENS).equal(p.content(there, TOKENS))
    if report.failures or not right:
        outcome.wrong += 1
        outcome.notes.append(f"an honest reader: {report.failures[:1]}, right pages: {right}")


def _play_sources(outcome: Outcome, rng: random.Random, count: int) -> None:
    """Hostile sources that a reader was sent to."""
    with Engine(key=KEY) as d:
        left = count
        while left > 0:
            share = min(left, rng.randrange(1, 120))
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.settimeout(DEADLINE_S)
                args = listener, random.Random(rng.random()), share
                turn = threading.Thread(target=_be_source, args=args, daemon=True)
                turn.start()
                host, port = listener.getsockname()
                source = PrefillSource("evil", 0, (Endpoint(0, 0, host, port),), 1, 1)
                d.step(receives=[receive(source, table(TOKENS, 16), TOKENS)])
                try:
                    (report,) = finished(d)
                    if not report.failures:
                        outcome.wrong += 1
                        outcome.notes.append("pages of a hostile source were taken for right ones")
                except AssertionError:
                    outcome.hangs += 1
                    outcome.notes.append("a receive from a hostile source does not end")
                turn.join(DEADLINE_S)
            left, outcome.cases = left - share, outcome.cases + share
        _check(outcome, d, "hostile sources")


def _be_source(listener: socket.socket, rng: random.Random, count: int) -> None:
    with suppress(OSError, EOFError):
        wire = _accept(listener, rng, codec.pack_greeting(rng.choice([0, 1, 16])))
        try:
            name = "evil" if rng.random() < 0.9 else "other"
            wire.say(_hello(rng, plain=rng.random() < 0.8, engine_id=name))
            read_id = _answer_probes(wire)
            speaker = Speaker(rng, source=True, last=read_id)
            pages = [(unit, block) for unit in (1, 2, 3) for block in range(10)]
            rng.shuffle(pages)
            while pages and rng.random() < 0.96:  # all of them, sometimes
                _send_pages(wire, rng, read_id, *pages.pop())
            for _ in range(count):
                chance = rng.random()
                if chance < 0.01:
                    wire.data_connections[0].sendall(_frame(rng))
                elif chance < 0.03:
                    _send_pages(wire, rng, read_id, *rng.choice([(0, 0), (0, 9), (1, 0), (3, 2)]))
                elif chance < 0.7 and pages:
                    _send_pages(wire, rng, read_id, *pages.pop())
                wire.say(speaker.next())
        finally:
            wire.close()


def _answer_probes(wire: Wire) -> int:
    """Send what a reader measures the path with; return the number of what it reads then."""
    while True:
        for message in wire.hear():
            if isinstance(message, messages.ReadRequest):
                return message.read_id
            if isinstance(message, messages.Probe):
                blocks = range([16, 128][message.read_id - PROBE_READ_ID])
                for first in blocks[::16]:
                    wire.send(message.read_id, 0, blocks[first : first + 16], bytes(16 << 16))


def _send_pages(wire: Wire, rng: random.Random, read_id: int, unit: int, block: int) -> None:
    """Send a block that was asked for, in one layer or, as the first unit, in all."""
    wire.send(read_id, unit, range(block, block + 1), rng.randbytes(2048 if unit else 3 * 2048))


def _frame(rng: random.Random) -> bytes:
    read_id = rng.choice([0, 1, 2, PROBE_READ_ID, PROBE_READ_ID + 1])
    nbytes = rng.choice([1, 100, 65536])
    header = frames.FrameHeader(0, read_id, rng.randrange(4), 0, rng.choice([1, 16]), nbytes, 1)
    return frames.pack_header(header) + rng.randbytes(min(nbytes, 100))


# About NIXL -------------------------------------------------------------------------------------


def _play_nixl(outcome: Outcome, rng: random.Random, count: int) -> None:
    """Messages between transports, to one that expects pages over NIXL and writes some."""
    if not importlib.util.find_spec("nixl_cu12"):
        outcome.notes.append("messages about NIXL were only decoded: nixl-cu12 is not installed")
        for _ in range(count):
            outcome.cases += 1
            with suppress(ProtocolError):
                nixl_messages.decode(_nixl_message(rng))
        return
    from tests.links import NIXL_QUICK

    security = Security(key=KEY)
    with closing(make_transport("nixl", security, NIXL_QUICK)) as victim:
        memory = PageMemory(1 << 20, seed=1)
        victim.register(memory)
        address = victim.listen("127.0.0.1", 0)
        own = PageMemory(1 << 20)
        theirs = NixlAgent("UCX", own.regions(), local=True)
        left = count
        while left > 0:
            share, reads = min(left, rng.randrange(1, 60)), rng.random() < 0.5
            offer = nixl_messages.encode(theirs.offer)
            greeting = codec.pack_greeting(1, offer if rng.random() < 0.9 else rng.randbytes(50))
            with suppress(OSError, EOFError):
                wire = _connect(address, rng, greeting) if reads else _called(victim, rng, greeting)
                _expect_pages(victim)
                try:
                    fitting = _fitting_requests(rng, own) if reads else _fitting_writes(rng, wire)
                    for _ in range(share):
                        message = next(fitting, b"") if rng.random() < 0.95 else b""
                        message = message or _nixl_message(rng)
                        if rng.random() < 0.05:
                            message = _spoiled(rng, message)
                        wire.say(codec.NixlPayload(message))
                finally:
                    wire.close()
            left, outcome.cases = left - share, outcome.cases + share
        theirs.close()
        _until(outcome, lambda: _works(victim, address), "an honest peer over NIXL")


def _called(victim: Transport, rng: random.Random, greeting: bytes) -> Wire:
    """Be a source that the victim connects to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        victim.connect(*listener.getsockname())
        return _accept(listener, rng, greeting)


def _fitting_requests(rng: random.Random, own: PageMemory) -> Iterator[bytes]:
    """Yield what a reader of six reads of ten blocks may say."""
    (area,) = own.regions()
    place = nixl_messages.UnitLocation(
        address=area.address,
        nbytes=area.nbytes,
        device=area.device,
        phases=1,
        block_bytes=4096,
        segments=array("q", [0, 4096, 4096]).tobytes(),
    )
    yield nixl_messages.encode(nixl_messages.UnitLocations(number=0, first=0, units=[place]))
    ids = array("q", range(10)).tobytes()
    for read_id in rng.sample(range(6), 6):
        where = nixl_messages.Destinations(read_id=read_id, units=0, spans=[(0, 0)], ids=[ids])
        said: list[nixl_messages.NixlMessage] = [
            where,
            where,
            nixl_messages.UseTcp(read_id=read_id),
        ]
        yield nixl_messages.encode(rng.choice([*said, nixl_messages.StopWriting(read_id=read_id)]))
    for read_id in rng.sample(range(6), 6):
        yield nixl_messages.encode(nixl_messages.StopWriting(read_id=read_id))


def _fitting_writes(rng: random.Random, wire: Wire) -> Iterator[bytes]:
    """Yield what a source of them may say, though it wrote nothing: once they have places."""
    told = 0
    while told < 7:  # the unit, and a place for each
        told += sum(isinstance(message, codec.NixlPayload) for message in wire.received())
    for number, read_id in enumerate(rng.sample(range(6), 6)):
        for first in (0, 5):
            message = nixl_messages.PagesWritten(
                read_id=read_id,
                unit=0,
                first=first,
                count=5,
                nbytes=5 * 4096,
                number=2 * number + first // 5,
                seconds=0.1,
                digests=bytes(5 * 8),
            )
            yield nixl_messages.encode(message)


def _expect_pages(victim: Transport) -> None:
    """Give pages to who reads, and expect some of who is to give them."""
    unit, ids = plain_unit(4096), array("q", range(10))
    deadline = time.monotonic() + 0.5  # a greeting that is no offer never comes up
    while time.monotonic() < deadline:
        for event in victim.poll(0.05):
            if isinstance(event, PeerUp) and "nixl" in event.paths:
                for read_id in range(6):
                    if event.inbound:
                        victim.submit(OutgoingPages(event.peer, read_id, 0, unit, 0, ids))
                    else:
                        spans = [(0, ids)]
                        victim.submit(
                            IncomingPages(event.peer, read_id, [unit], spans, None, "nixl")
                        )
                return


def _works(victim: Transport, address: tuple[str, int]) -> bool:
    """Whether pages reach an honest peer over NIXL."""
    from tests.links import NIXL_QUICK

    unit, ids = plain_unit(4096), array("q", range(100))
    with closing(make_transport("nixl", Security(key=KEY), NIXL_QUICK)) as honest:
        pages = PageMemory(1 << 20)
        honest.register(pages)
        peer = honest.connect(*address)
        deadline = time.monotonic() + 5
        got = 0
        while got < 100 and time.monotonic() < deadline:
            for event in victim.poll(0.01):
                if isinstance(event, PeerUp):
                    victim.submit(OutgoingPages(event.peer, 9, 0, unit, 0, ids))
            for event in honest.poll(0.01):
                if isinstance(event, PeerUp) and "nixl" in event.paths:
                    honest.submit(IncomingPages(peer, 9, [unit], [(0, ids)], None, "nixl"))
                elif isinstance(event, PagesReceived):
                    got += event.count
        return (
            got == 100
            and pages.data[: 100 * 4096] == PageMemory(1 << 20, seed=1).data[: 100 * 4096]
        )


def _nixl_message(rng: random.Random) -> bytes:
    read_id = rng.choice([0, 1, 2, 3, 4, 5, rng.choice(_NUMBERS)])
    triple = array("q", rng.choice([[0, 4096, 4096], [-1, 0, 1], [0, 1 << 60, 4096], [0, 0, 0]]))
    place = nixl_messages.UnitLocation(
        address=rng.choice([0, 4096, 1 << 46, (1 << 63) - 1]),
        nbytes=rng.choice([1, 1 << 20, (1 << 62) - 1]),
        device=rng.choice([-1, 0, 7]),
        phases=rng.choice([1, 2, (1 << 31) - 1]),
        block_bytes=rng.choice([4096, 1, 1 << 61]),
        segments=triple.tobytes() * rng.choice([1, 1, 3]) + b"x" * rng.choice([0, 0, 0, 1]),
    )
    ids = array("q", rng.choice([range(10), [-1] * 10, [1 << 62], []])).tobytes()
    spans = [(0, rng.choice([0, 0, 7]))] * rng.choice([1, 1, 2])
    landed = {
        "first": rng.choice([0, 1, 1 << 39]),
        "count": rng.choice([1, 10, (1 << 31) - 1]),
        "nbytes": rng.choice([4096, 40960, 1]),
        "digests": bytes(8 * rng.choice([0, 1, 10])),
        "seconds": 0.1,
    }
    return nixl_messages.encode(
        rng.choice(
            [
                nixl_messages.UnitLocations(
                    number=rng.randrange(3), first=rng.choice([0, 0, 1]), units=[place]
                ),
                nixl_messages.Destinations(
                    read_id=read_id, units=rng.randrange(3), spans=spans, ids=[ids]
                ),
                nixl_messages.UseTcp(read_id=read_id),
                nixl_messages.StopWriting(read_id=read_id),
                nixl_messages.WritesStopped(read_id=read_id),
                nixl_messages.PagesWritten(
                    read_id=read_id, unit=rng.choice([0, 0, 9]), number=1, **landed
                ),
            ]
        )
    )


# Without the key --------------------------------------------------------------------------------


def _play_handshakes(outcome: Outcome, rng: random.Random, count: int) -> None:
    """Garbage, silence, halves of handshakes and recorded ones, then an honest peer."""
    with Engine(sends=True, key=KEY) as p:
        there = table(TOKENS, p.block)
        p.fill(there, seed=1)
        p.step(offers=[OfferBlocks(TRANSFER, (Span(0, 0, there),))])
        address = p.agents[0].address
        assert address
        recorded = _record(address, rng)
        idle: list[socket.socket] = []
        for _ in range(count):
            outcome.cases += 1
            sock = socket.create_connection(address, timeout=DEADLINE_S)
            kind = rng.randrange(4)
            with suppress(OSError):
                if kind == 0:
                    sock.sendall(rng.choice(_GARBAGE) + rng.randbytes(rng.randrange(200)))
                elif kind == 1:
                    idle.append(sock)
                    continue
                elif kind == 2:
                    sock.sendall(recorded[: rng.randrange(len(recorded))])
                elif rng.random() < 0.1:
                    sock.sendall(recorded)
                    said = b"".join(iter(lambda s=sock: s.recv(4096), b""))
                    if not said.endswith(bytes(32)):
                        outcome.smuggled += 1
                        outcome.notes.append("a recorded handshake was taken for a new one")
            sock.close()
        with Engine(key=KEY) as d:
            here = table(TOKENS, d.block)
            d.step(receives=[receive(p.source(), here, TOKENS)])
            _check_pages(outcome, d, p, here, there)
        for sock in idle:
            sock.close()
        _check(outcome, p, "strangers")


_GARBAGE = (b"", b"KVCO", b"GET / HTTP/1.1\r\n\r\n", b"KVCP" + bytes(32), b"KVCC" + bytes(36))


def _record(address: tuple[str, int], rng: random.Random) -> bytes:
    """Return all that an honest peer says in a handshake."""
    opening = Opening("control", rng.randbytes(SESSION_BYTES), 0, 1)
    auth = ClientAuth(KEY, opening, rng.randbytes(NONCE_BYTES))
    with socket.create_connection(address, timeout=DEADLINE_S) as sock:
        said = auth.start()
        sock.sendall(said)
        while not auth.done:
            answer = auth.feed(sock.recv(4096))
            said += answer
            sock.sendall(answer)
    return said


def _play_tickets(outcome: Outcome, rng: random.Random, count: int) -> None:
    now = 1e9
    good = tickets.Ticket(
        transfer=bytes(16),
        engine_id="e",
        epoch=1,
        endpoints=(Endpoint(0, 0, "10.1.2.3", 22),),
        tp=1,
        pp=1,
        tokens=5,
        expires=now + 60,
    )
    text = tickets.issue(good, KEY)
    alphabet = "ABCxyz019-_=+/ \x00\u00e9"
    for _ in range(count):
        outcome.cases += 1
        said: object = rng.choice([None, 5, b"x", ["x"], "", "A" * 9000])
        if rng.random() < 0.9:
            changed = list(text)
            for _ in range(rng.randrange(1, 5)):
                changed[rng.randrange(len(changed))] = rng.choice(alphabet)
            said = "".join(changed)[: rng.choice([len(text), len(text), rng.randrange(len(text))])]
        try:
            if tickets.verify(said, (KEY,), now) and said != text:
                outcome.smuggled += 1
                outcome.notes.append(f"a ticket that nobody issued: {said!r}")
        except Refused:
            continue
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            outcome.crashes += 1
            outcome.notes.append(f"{error!r} from {said!r}")


# Afterwards -------------------------------------------------------------------------------------


def _check(outcome: Outcome, engine: Engine, who: str) -> None:
    """See that all threads live, and that nothing said found a bug."""
    agent = engine.agents[0]
    try:
        agent.poll()
    except TransferFailed as error:
        outcome.crashes += 1
        outcome.notes.append(f"{who}: {error}")
    with agent.stats() as stats:
        bugs = stats.data["counters"].get("handoff_peer_errors", {})
    if bugs:
        outcome.crashes += int(sum(bugs.values()))
        outcome.notes.append(f"{who}: found bugs, see the log")


def _kept(p: Engine) -> int:
    """What is kept of readers that are gone."""
    agent = p.agents[0]
    with agent._lock:
        machine = agent._sending._sender
        readers = sum(map(len, machine._transfers.readers.values()))
        return len(agent._sessions) + readers + len(machine._parked)


def _until(outcome: Outcome, fact: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not fact():
        if time.monotonic() > deadline:
            outcome.hangs += 1
            outcome.notes.append(f"{what}: not within {DEADLINE_S:g} s")
            return
        time.sleep(0.01)
