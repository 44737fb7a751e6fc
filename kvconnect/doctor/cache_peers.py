"""``kvconnect doctor peers``: whether workers that share their host memory answer from here."""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from kvconnect.doctor import Finding, FindingsReport
from kvconnect.doctor.transfer_findings import REFUSAL_FIXES
from kvconnect.errors import ProtocolError, Refused
from kvconnect.offload.host_arena import HostArena
from kvconnect.protocol.cache_messages import (
    NONCE_BYTES,
    Ask,
    CacheHello,
    CacheMessage,
    Found,
    HostTierAddresses,
    decode,
    encode,
)
from kvconnect.protocol.codec import PROTOCOL, common_protocol
from kvconnect.protocol.hello import Reject
from kvconnect.settings import Settings
from kvconnect.settings.sharing import PeerSettings
from kvconnect.tiers.peers.arena_memory import ArenaMemory
from kvconnect.tiers.peers.connection_owner import check_other_end
from kvconnect.tiers.peers.same_machine import SourceMemory, is_this_machine
from kvconnect.transport import ConnectionOptions, make_transport
from kvconnect.transport.base import (
    Ends,
    Event,
    MessageReceived,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Transport,
)
from kvconnect.transport.security import security_of

_GOOD = "engines with the same settings can read from these workers"
_BAD = "some workers cannot be read from: see the fail lines"
_WAIT_S = 10.0
_NOT_THERE = (
    "start the engine with serve in cache_peers and this address as listen, and open its port"
)
_NO_WORKER = "use the port that serves blocks, and a kvconnect of the same version"
_SILENT = "restart the engine: its connections work, its worker does not answer"
_ALONE = (
    "use the same weights, types and block size (or page_tokens); workers that keep whole blocks "
    "share with the same rank of other engines"
)
_CLOSED = (
    "run engines as one user in one container, with kernel.yama.ptrace_scope 0; or leave it: their "
    "blocks come over the network"
)
_ANY_KEY = bytes(18)


@dataclass
class _Worker:
    """A worker and what it said."""

    address: str
    host: str
    hello: CacheHello | None = None
    paths: str = ""
    finding: Finding | None = None  # why it cannot be read from
    nonce: bytes = b""
    ends: Ends | None = None
    memory: HostTierAddresses | None = None

    def fail(self, value: str, fix: str) -> None:
        if self.hello is None and self.finding is None:
            self.finding = Finding(self.address, "fail", value, fix)

    def take(self, event: Event, say: Callable[[CacheMessage], None]) -> bool:
        """Take an event; return whether no more is to be waited for."""
        if isinstance(event, PeerUp):
            self.paths, self.ends = "+".join(event.paths), event.ends
            return False
        if isinstance(event, PeerDown):
            self.fail(event.reason, REFUSAL_FIXES.get(event.refused, _NOT_THERE))
            return True
        if not isinstance(event, MessageReceived):
            return False
        try:
            message = self._read(event.payload)
        except Refused as error:
            self.fail(str(error), REFUSAL_FIXES.get(error.field, _NO_WORKER))
            return True
        except ProtocolError as error:
            self.fail(str(error), _NO_WORKER)
            return True
        if not isinstance(message, CacheHello):
            return isinstance(message, Found)
        if not is_this_machine(self.host):
            return True
        # As an engine with the same blocks, it is told of the memory before its question is
        # answered.
        self.nonce = os.urandom(NONCE_BYTES)
        say(msgspec.structs.replace(message, engine=os.urandom(16), nonce=self.nonce))
        say(Ask(1, [_ANY_KEY]))
        return False

    def _read(self, payload: bytes) -> CacheMessage:
        """Return a message, and note what it says.

        Raises:
            Refused: the worker does not agree.
            ProtocolError: a worker does not say this.
        """
        message = decode(payload)
        if isinstance(message, Reject):
            raise Refused(message.field, message.message)
        if isinstance(message, CacheHello):
            common_protocol(PROTOCOL, message.protocol)
            self.hello = message
        elif isinstance(message, HostTierAddresses):
            self.memory = message
        elif self.hello is None:
            raise ProtocolError(f"{type(message).__name__} before its hello")
        return message


def examine(
    addresses: Sequence[str], key_file: str, tls_dir: str, wait_s: float = _WAIT_S
) -> FindingsReport:
    """Connect to workers as an engine does, and wait ``wait_s`` seconds for their answers.

    ``addresses`` are those of ``cache_peers.ask``. No block is read.

    Raises:
        ConfigError: an address, the key or the certificates cannot be used.
    """
    to_ask = PeerSettings(ask=tuple(addresses)).addresses()
    network = Settings(key_file=key_file, tls_dir=tls_dir)
    options = ConnectionOptions(local=not key_file, service="share")
    transport = make_transport("tcp", security_of(network), options)
    memory = HostArena(1, mmap.PAGESIZE, "off")
    try:
        transport.register(ArenaMemory(memory))
        workers = {
            transport.connect(host, port): _Worker(f"{host}:{port}", host) for host, port in to_ask
        }
        deadline = time.monotonic() + wait_s
        waiting = set(workers)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for event in transport.poll(left):
                if event.peer in workers:
                    say = partial(_say, transport, event.peer)
                    if workers[event.peer].take(event, say):
                        waiting.discard(event.peer)
        for peer in waiting:
            workers[peer].fail(f"no answer within {wait_s:g} s", _SILENT)
        findings = tuple(_findings(list(workers.values()), memory))
    finally:
        transport.close()
        memory.close()
    return FindingsReport(findings, _GOOD, _BAD)


def _say(transport: Transport, peer: PeerId, message: CacheMessage) -> None:
    transport.submit(PeerMessage(peer, encode(message)))


def _findings(workers: Sequence[_Worker], here: HostArena) -> list[Finding]:
    """Return one line per worker; those that share with nobody here get a warning."""
    alike = Counter(worker.hello.format for worker in workers if worker.hello)
    several = sum(alike.values()) > 1
    findings = []
    for worker in workers:
        if worker.hello is None:
            findings.extend([worker.finding] if worker.finding else [])
            continue
        form = worker.hello.format
        value = f"answers; {worker.paths}; blocks of format {form.hex()[:8]}"
        if several and alike[form] == 1:
            value += ", which nobody else here keeps"
            findings.append(Finding(worker.address, "warn", value, _ALONE))
            continue
        if worker.memory is None:
            findings.append(Finding(worker.address, "ok", value))
            continue
        try:
            check_other_end(worker.memory.pid, worker.ends)
            SourceMemory(worker.memory, worker.nonce, here)
        except OSError as error:
            value += f"; its memory cannot be read: {error.strerror}"
            findings.append(Finding(worker.address, "warn", value, _CLOSED))
        else:
            findings.append(Finding(worker.address, "ok", f"{value}; its memory can be read"))
    return findings
