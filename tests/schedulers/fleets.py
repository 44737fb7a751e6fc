"""Random runs of two engines: they share host memory, or one prefills for the other."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from kvconnect.tiers.peers.sources import CacheSources
from tests.schedulers.checks import check_at_rest, parts_of
from tests.schedulers.engine import Engine, Prompt
from tests.schedulers.shapes import EngineShape
from tests.schedulers.workload import (
    STEPS,
    Actions,
    Prompts,
    random_faults,
    random_shape,
    running,
    with_disk,
)

HERE = "127.0.0.1"


def run_sharing(seed: int, steps: int = STEPS, **changes: Any) -> list[Engine]:
    """Run two engines that read one another's host memory, and check them."""
    random = Random(seed)
    with ExitStack() as stack:
        shapes = _sharing_shapes(random, stack, changes)
        engines = [Engine(shape, random, random_faults(random)) for shape in shapes]
        stack.enter_context(running(*engines))
        for engine in engines:
            engine.step_until(lambda engine=engine: _knows_all(engine))
        actions = Actions(random, Prompts(random))
        for _ in range(steps):
            engine = random.choice(engines)
            actions.act(engine)
            engine.step()
        for engine in engines:
            engine.drain()
        for engine in engines:
            check_at_rest(engine)
    return engines


def _sharing_shapes(random: Random, stack: ExitStack, changes: Any) -> list[EngineShape]:
    first = random_shape(random, **changes)
    ports = free_ports(2 * first.tp)
    block_tokens = 32 if first.kind == "full" and random.random() < 0.3 else 16
    way, digest = random.choice(("memory", "network")), first.settings["digest"]
    shapes = []
    for number in range(2):
        own, others = ports[number * first.tp], ports[(1 - number) * first.tp :][: first.tp]
        peers = {
            "listen": f"{HERE}:{own}",
            "ask": [f"{HERE}:{port}" for port in others],
            "same_machine": way,
            "page_tokens": 16 if block_tokens == 32 else 0,
        }
        settings = {
            **first.settings,
            "digest": digest,
            "cache_peers": peers,
            "listen": "off",
            "load_when": random.choice(("always", "faster")),
            "wait_s": 2.0,
        }
        tokens = block_tokens if number else 16
        shape = replace(first, settings=settings, block_tokens=tokens)
        if random.random() < 0.3:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvconnect-run-"))
            shape = with_disk(random, shape, Path(folder))
        shapes.append(shape)
    return shapes


def _knows_all(engine: Engine) -> bool:
    """Whether each rank of an engine that shares has met all workers that do."""
    sources = [found for rank in engine.workers for found in parts_of(rank.worker, CacheSources)]
    workers = engine.shape.tp // engine.shape.replicas
    return all(len(each) == workers for each in sources)


def free_ports(count: int) -> list[int]:
    """Return ports in a row that nobody uses. They are none that the system gives to others."""
    for first in itertools.count(20_000 + os.getpid() % 1000 * 10, count):
        ports = range(first, first + count)
        with contextlib.suppress(OSError), ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.create_server((HERE, port)))
            return list(ports)
    raise AssertionError("unreachable")


@dataclass
class HandOff:
    """A prompt that one engine prefills and the other decodes. ``ask``: the decode engine's part of
    it that is not sent yet."""

    number: int
    prompt: Prompt
    push: bool
    sent: bool = False
    offered: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def at_prefill(self) -> str:
        return f"p{self.number}"

    @property
    def at_decode(self) -> str:
        return f"d{self.number}"


class Pair:
    """A prefill and a decode engine, and the router between them."""

    def __init__(self, prefill: Engine, decode: Engine, random: Random) -> None:
        self.prefill, self.decode = prefill, decode
        self.under_way: list[HandOff] = []
        self._random, self._count = random, 0
        self._standing = ""

    def ask_standing_ticket(self) -> None:
        """Ask the prefill engine for the ticket that pushes use."""
        params = {"do_remote_decode": True, "kvconnect_card": True}
        answer = self.prefill.run("standing", Prompt([1, 1], new=1, params=params))
        assert answer.params
        self._standing = answer.params["kvconnect_card"]

    def start(self, prompt: Prompt, push: bool) -> None:
        """Begin a hand-off: by pull, with a ticket that prefill gives when it is done, or by push,
        with both engines asked at about the same time."""
        self._count += 1
        made = HandOff(self._count, prompt, push)
        if push:
            transfer = f"{self._random.getrandbits(128):032x}"
            ticket = {"transfer_id": transfer, "kvconnect_ticket": self._standing}
            made.params = {"do_remote_prefill": True, "do_remote_decode": False, **ticket}
        self.under_way.append(made)

    def go_on(self) -> None:
        """Send what can be sent of the hand-offs under way; some of it later."""
        for each in list(self.under_way):
            if not each.sent and self._random.random() < 0.5:
                each.sent = True
                asks: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
                if each.push:
                    asks["transfer_id"] = each.params["transfer_id"]
                prompt = replace(each.prompt, new=1, params=asks)
                self.prefill.add(each.at_prefill, prompt)
            if not each.push and each.sent and not each.params:
                answer = self.prefill.answers[each.at_prefill]
                each.params = dict(answer.params or {})
                if answer.reason is not None and not each.params:
                    self.under_way.remove(each)  # aborted; the router would tell the client
                    continue
            if each.params and not each.offered and self._random.random() < 0.5:
                each.offered = True
                self.decode.add(each.at_decode, replace(each.prompt, params=each.params))
            if each.sent and each.offered:
                self.under_way.remove(each)

    def drain(self) -> None:
        """Step both until neither has anything to do."""
        while self.under_way:
            self.step()
        self.decode.step_until(lambda: not self._step_both())

    def step(self) -> None:
        self.go_on()
        self._step_both()

    def _step_both(self) -> bool:
        """Step both engines once. Return whether one of them is busy."""
        self.prefill.step()
        self.decode.step()
        return self.prefill.busy or self.decode.busy


def run_handoffs(seed: int, steps: int = STEPS, **changes: Any) -> list[Engine]:
    """Run a prefill and a decode engine, and check them."""
    random = Random(seed)
    shapes = _handoff_shapes(random, changes)
    engines = [Engine(shape, random, random_faults(random)) for shape in shapes]
    with running(*engines):
        pair = Pair(engines[0], engines[1], random)
        pair.ask_standing_ticket()
        prompts = Prompts(random, roots=12)
        for _ in range(2 * steps):
            dice = random.random()
            if dice < 0.25 and len(pair.decode.live()) < 8 and len(pair.under_way) < 6:
                pair.start(_handed_off(prompts), push=random.random() < 0.5)
            elif dice < 0.30:
                engine = random.choice(engines)
                for req_id in random.sample(engine.live(), min(1, len(engine.live()))):
                    random.choice((engine.abort, engine.to_abort.append))(req_id)
            elif dice < 0.31:
                pair.drain()
                for engine in engines:
                    engine.forget_device()
            pair.go_on()
            random.choice(engines).step()
        pair.drain()
        for engine in engines:
            check_at_rest(engine)
    return engines


def _handed_off(prompts: Prompts) -> Prompt:
    """Return a prompt of tokens that may read caches: others are not handed off."""
    made = prompts.prompt(new=(1, 2, 5, 20))
    tokens = made.tokens or made.rows
    return replace(made, tokens=tokens, rows=[], skips_cache=False, params=None)


def _handoff_shapes(random: Random, changes: Any) -> list[EngineShape]:
    """Return a prefill and a decode engine. They differ in what may differ."""
    first = random_shape(random, drafts=0, **changes)
    second = random_shape(random, drafts=0, **{**changes, "kind": first.kind})
    if first.kind == "states":
        second = replace(second, tp=first.tp)
    elif first.kind == "full":
        second = replace(second, block_tokens=random.choice((16, 32)))
    prefill = replace(first, role=random.choice(("kv_producer", "kv_both")))
    return [prefill, replace(second, role="kv_both")]
