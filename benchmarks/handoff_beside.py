"""Hand-offs of an engine while others read its shared blocks, without models.

    python -m benchmarks.handoff_beside [--rounds N]

A worker hands off prompts of 7.9 MB over loopback, one after the other, to a worker in another
process: timed from asking until the worker that asked has all of it. Meanwhile nothing happens
(``alone``), or a third process reads shared blocks of 1 MiB as fast as it gets them, 16 at a time,
from the worker that hands off (``beside``), or from a fourth process that hands nothing off
(``elsewhere``). The last is the same load of cores, memory and loopback, but touches no connection,
queue or thread of the hand-offs: what is left between the two is what sharing in one process costs.
The three take turns, each with a share of every round.

- ``p50_ms_*``, ``p99_ms_*``: of a hand-off.
- ``p99_beside_over_alone``, ``p99_beside_over_elsewhere``, and the same of ``p50``.
- ``shared_gbps_*``: bytes that were read meanwhile, and ``cpu_cores_*``: CPU seconds per second of
  all processes.

Each prompt and each block that was read last in its turn is compared with what was sent.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from benchmarks.common import emit, end_when_terminated, progress
from kvconnect.cache.head_shards import HeadUnit
from kvconnect.disaggregation.messages import OfferBlocks, PrefillSource
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.transport.tcp.shared_port import SharedPort
from kvconnect.types import Endpoint, Span, TransferId
from tests.fakes import handoff_engine
from tests.fakes.handoff_engine import EPOCH, receive, table
from tests.unit.tiers import peer_engines

KEY = b"k" * 16
TOKENS = 256  # of a prompt
ROW = 640  # values of one head's token
BLOCK_BYTES = 1 << 20
BLOCKS = 16  # read at a time
ROUNDS = 10
HANDOFFS = 100  # of each kind in a round
WAIT_S = 60.0
SEED = 1
LAYOUT = [[[HeadUnit(0, ((0, BLOCK_BYTES),))]]]
KINDS = ("alone", "beside", "elsewhere")
"""What happens meanwhile."""


class Source:
    """A worker that shares blocks and, if it ``sends``, hands off prompts, at one port."""

    def __init__(self, sends: bool) -> None:
        port = SharedPort()
        self.prefill: handoff_engine.Engine | None = None
        where = "127.0.0.1:0"
        if sends:
            self.prefill = handoff_engine.Engine(
                sends=True, key=KEY, row=ROW, digest="sampled", port=port
            ).__enter__()
            where = "{}:{}".format(*self.address)
            self.blocks = table(TOKENS, self.prefill.block)
            self.prefill.fill(self.blocks, SEED)
        self.tier = peer_engines.Engine(
            layouts=LAYOUT, port=port, slots=BLOCKS, digest="sampled", listen=where
        )
        for slot in range(BLOCKS):
            self.tier.keep(slot, slot, content(slot))

    @property
    def address(self) -> tuple[str, int]:
        """Where hand-offs are asked for."""
        assert self.prefill is not None
        address = self.prefill.agents[0].address
        assert address is not None
        return address

    def offer(self, transfer: TransferId) -> None:
        """Offer the prompt, all of which is computed."""
        assert self.prefill is not None
        self.prefill.step(offers=[OfferBlocks(transfer, (Span(0, 0, self.blocks),))])

    def close(self) -> None:
        self.tier.close()
        if self.prefill is not None:
            self.prefill.__exit__()


def serve_source(pipe: Connection, sends: bool) -> None:
    """Serve as a :class:`Source`, in a process of its own: offer each transfer that is named."""
    source = Source(sends)
    pipe.send((source.tier.where, source.address if sends else None))
    while (said := pipe.recv()) is not None:
        if isinstance(said, bytes):
            source.offer(TransferId(said))
            pipe.send(None)
        else:
            pipe.send(time.process_time())
    source.close()


def serve_reader(pipe: Connection, sources: list[str]) -> None:
    """Read blocks from the source that is named by its number, until the next message; then say how
    many bytes came and the CPU seconds that it took."""
    readers = [
        peer_engines.Engine([where], LAYOUT, slots=BLOCKS, digest="sampled").sources(1)
        for where in sources
    ]
    pipe.send(None)
    while (number := pipe.recv()) is not None:
        came, started = 0, time.process_time()
        while number >= 0 and not pipe.poll():
            outcomes = readers[number].get(range(BLOCKS))
            came += sum(outcome is BlockOutcome.OK for outcome in outcomes) * BLOCK_BYTES
        pipe.recv()
        for slot in range(BLOCKS) if came else ():
            if bytes(readers[number].host.view(slot, BLOCK_BYTES)) != content(slot):
                raise SystemExit(f"block {slot} is another one")
        pipe.send((came, time.process_time() - started))
    for reader in readers:
        reader.close()


def content(number: int) -> bytes:
    """Return the bytes of a shared block."""
    return random.Random(number).randbytes(BLOCK_BYTES)


@contextmanager
def process(serve: Callable[..., None], *arguments: Any) -> Iterator[tuple[Connection, Any]]:
    """Start a process that serves; yield its pipe and what it said first."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=serve, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours, answer(ours)
        ours.send(None)
        child.join(WAIT_S)
    finally:
        child.kill()
        child.join()


def answer(pipe: Connection) -> Any:
    """Return what a process answers.

    Raises:
        SystemExit: it does not, or has died.
    """
    if not pipe.poll(WAIT_S):
        raise SystemExit("a process hangs")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("a process died") from None


def call(pipe: Connection, what: object) -> Any:
    """Tell a process something; return what it answers."""
    pipe.send(what)
    return answer(pipe)


class Decode:
    """The worker that asks for prompts. ``pipe``: to the process that offers them."""

    def __init__(self, pipe: Connection, address: tuple[str, int]) -> None:
        self.engine = handoff_engine.Engine(key=KEY, row=ROW, digest="sampled").__enter__()
        self._pipe = pipe
        self._source = PrefillSource("sender", EPOCH, (Endpoint(0, 0, *address),), 1, 1)
        self._blocks = table(TOKENS, self.engine.block)
        self._number = 0
        reference = handoff_engine.Engine(row=ROW).__enter__()
        reference.fill(self._blocks, SEED)
        self._wanted = reference.content(self._blocks, TOKENS)
        reference.__exit__()

    def take(self) -> float:
        """Ask for a prompt; return the seconds until it was there."""
        self._number += 1
        transfer = TransferId(self._number.to_bytes(16, "big"))
        call(self._pipe, bytes(transfer))
        (agent,) = self.engine.agents
        wanted = replace(receive(self._source, array("q", self._blocks), TOKENS), transfer=transfer)
        start = time.perf_counter()
        self.engine.step(receives=[wanted])
        while not (reports := agent.poll()[0]):
            if not agent.news.wait(WAIT_S):
                raise SystemExit("a hand-off hangs")
        seconds = time.perf_counter() - start
        if failures := reports[0][0].failures:
            raise SystemExit(f"a hand-off failed: {failures}")
        return seconds

    def check(self) -> None:
        """End the benchmark if the last prompt is not what was sent; forget it."""
        if not torch.equal(self.engine.content(self._blocks, TOKENS), self._wanted):
            raise SystemExit("another prompt was handed off")
        self.engine.caches[0].zero_()


class Turn(NamedTuple):
    """What was measured in one turn of a kind."""

    handoffs: list[float]
    seconds: float
    cpu_s: float
    nbytes: int


class Bench:
    """All processes: the worker that hands off and shares, one that only shares, a reader."""

    def __init__(self, decode: Decode, sources: list[Connection], reader: Connection) -> None:
        self._decode = decode
        self._sources = sources
        self._reader = reader

    def turn(self, kind: str, handoffs: int) -> Turn:
        """Hand off prompts while what the kind says happens."""
        self._reader.send(KINDS.index(kind) - 1)
        cpu = self._cpu_s()
        started = time.perf_counter()
        taken = [self._decode.take() for _ in range(handoffs)]
        seconds = time.perf_counter() - started
        self._reader.send(None)
        nbytes, reading = answer(self._reader)
        self._decode.check()
        return Turn(taken, seconds, self._cpu_s() - cpu + reading, nbytes)

    def _cpu_s(self) -> float:
        return time.process_time() + sum(call(source, "cpu") for source in self._sources)


def figures(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Return all figures by their names."""
    found: dict[str, float] = {}
    for kind, each in turns.items():
        taken = [seconds for turn in each for seconds in turn.handoffs]
        cuts = statistics.quantiles(taken, n=100, method="inclusive")
        found[f"p50_ms_{kind}"], found[f"p99_ms_{kind}"] = cuts[49] * 1e3, cuts[98] * 1e3
        seconds = sum(turn.seconds for turn in each)
        found[f"shared_gbps_{kind}"] = sum(turn.nbytes for turn in each) / seconds / 1e9
        found[f"cpu_cores_{kind}"] = sum(turn.cpu_s for turn in each) / seconds
    for cut in ("p50", "p99"):
        for other in ("alone", "elsewhere"):
            ratio = found[f"{cut}_ms_beside"] / found[f"{cut}_ms_{other}"]
            found[f"{cut}_beside_over_{other}"] = ratio
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    end_when_terminated()
    turns: dict[str, list[Turn]] = defaultdict(list)
    with (
        process(serve_source, True) as (sender, (shared, address)),
        process(serve_source, False) as (other, (elsewhere, _)),
        process(serve_reader, [shared, elsewhere]) as (reader, _),
    ):
        decode = Decode(sender, address)
        try:
            bench = Bench(decode, [sender, other], reader)
            for kind in KINDS:
                bench.turn(kind, 3)
            for number in range(rounds):
                for kind in KINDS[:: -1 if number % 2 else 1]:
                    turns[kind].append(bench.turn(kind, HANDOFFS))
                shown = {kind: max(turns[kind][-1].handoffs) * 1e3 for kind in KINDS}
                longest = ", ".join(f"{kind} {shown[kind]:.1f} ms" for kind in KINDS)
                progress(f"round {number + 1}: the longest {longest}")
        finally:
            decode.engine.__exit__()
    emit("handoff_beside", figures(turns))


if __name__ == "__main__":
    main()
