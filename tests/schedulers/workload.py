"""Random requests, and random runs of one engine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.schedulers.checks import check_at_rest
from tests.schedulers.contents import VOCABULARY
from tests.schedulers.engine import Engine, Prompt
from tests.schedulers.faults import Faults
from tests.schedulers.shapes import EngineShape

STEPS = 150
_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 64, 80, 96, 100, 128, 150)
_HINTS: tuple[dict[str, Any], ...] = (
    {"pin": 5},
    {"retain": 5},
    {"drop": True},
    {"demote": True},
    {"prefetch": True},
)
_MOST_LIVE = 10


def tokens(random: Random, count: int) -> list[int]:
    """Return random tokens; 0 would stand for an embedding."""
    return [random.randrange(1, VOCABULARY) for _ in range(count)]


@cache
def adapters() -> tuple[LoRARequest, ...]:
    """Return two adapters with files of their own."""
    found = []
    for number in (1, 2):
        folder = Path(tempfile.mkdtemp(prefix="kvconnect-adapter-"))
        (folder / "adapter_config.json").write_text(json.dumps({"r": number}))
        save_file({"weight": torch.full((8,), float(number))}, folder / "adapter_model.safetensors")
        found.append(LoRARequest(f"adapter-{number}", number, str(folder)))
    return tuple(found)


class Prompts:
    """Prompts that share beginnings, as conversations do."""

    def __init__(self, random: Random, roots: int | None = None) -> None:
        self._random = random
        drawn = random.choice((2, 4))
        self._roots = [tokens(random, 160) for _ in range(roots or drawn)]

    def text(self) -> list[int]:
        random = self._random
        found = random.choice(self._roots)[: random.choice(_LENGTHS)]
        if random.random() < 0.4:
            found = found + tokens(random, random.choice((1, 3, 16, 20)))
        return found

    def prompt(self, new: Sequence[int] = (1, 1, 2, 5, 20, 40)) -> Prompt:
        random = self._random
        text, hint = self.text(), random.choice((None,) * 10 + _HINTS)
        embedded = random.random() < 0.05
        return Prompt(
            tokens=[] if embedded else text,
            rows=text if embedded else [],
            new=random.choice(new),
            salt=random.choice((None, None, None, "salt")),
            adapter=random.choice((None,) * 10 + adapters()),
            priority=random.randrange(3),
            params={"kvconnect": {**hint, "receipt": True}} if hint else None,
            skips_cache=random.random() < 0.05,
        )


def random_shape(random: Random, **changes: Any) -> EngineShape:
    """Return an engine that a seed chooses. ``changes``: fields that are given."""
    kind = random.choice(("full", "full", "full", "windows", "states"))
    shape = EngineShape(
        kind=kind,
        blocks=random.choice((20, 24, 40)),
        slots=random.choice((6, 20, 60, 120)),
        tp=random.choice((1, 1, 1, 2, 2, 4)),
        overlap=random.random() < 0.5,
        order=random.choice(("fcfs", "priority")),
        step_tokens=random.choice((32, 48, 128)),
        drafts=random.choice((0, 0, 3)),
        settings={
            "sync_load_bytes": random.choice(("auto", 0, 1 << 30)),
            "policy": random.choice(("lru", "s3fifo")),
            "digest": random.choice(("off", "full", "sampled")),
        },
    )
    shape = replace(shape, **changes)
    if shape.kind != "full":  # a request needs blocks of both groups
        shape = replace(shape, blocks=60)
    return replace(shape, drafts=0) if shape.kind == "states" else shape


def random_faults(random: Random, late: int | None = None) -> Faults:
    """Return faults that a seed chooses; often there are none. ``late``: given."""
    drawn = random.choice((0, 2, 8))
    return Faults(
        Random(random.random()),
        copies=random.choice((0, 0, 0.02, 0.1)),
        stores=random.choice((0, 0, 0.05, 0.3)),
        late=drawn if late is None else late,
    )


def with_disk(random: Random, shape: EngineShape, folder: Path) -> EngineShape:
    """Return the same engine with a disk, and room for what is read from it."""
    settings = {
        **shape.settings,
        "disk": {"path": str(folder), "capacity": "64MiB"},
        "load_when": random.choice(("always", "faster")),
        "spill": random.choice(("all", "reused")),
        "wait_s": 2.0,
    }
    return replace(shape, slots=max(shape.slots, 20), settings=settings)


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """Close engines in the end."""
    try:
        yield
    finally:
        for engine in engines:
            engine.close()


class Actions:
    """What clients and operators do to an engine, at random."""

    def __init__(self, random: Random, prompts: Prompts, resets: bool = True) -> None:
        self._random, self._prompts, self._resets = random, prompts, resets
        self._added = 0

    def act(self, engine: Engine) -> None:
        """Do something or nothing before the engine's next step."""
        random, dice, live = self._random, self._random.random(), engine.live()
        if dice < 0.3 and len(live) < _MOST_LIVE:
            self._added += 1
            engine.add(f"r{self._added}", self._prompts.prompt())
        elif dice < 0.34 and live:
            engine.abort(random.choice(live))
        elif dice < 0.37 and live:
            engine.to_abort.append(random.choice(live))
        elif dice < 0.40:  # a lull, after which prompts come from other tiers
            engine.drain()
            engine.forget_device()
        elif dice < 0.407 and self._resets:
            engine.reset(self._weights(), running=random.random() < 0.5)
        elif dice < 0.41 and self._resets:
            engine.pause()
            engine.drain()
            if random.random() < 0.5:
                engine.reset(self._weights(), running=True)
            elif engine.reset(running=True):
                engine.drain()  # the workers look at the weights before these change
                engine.change_weights(self._weights())
            engine.resume()

    def _weights(self) -> str:
        self._added += 1
        return f"weights-{id(self)}-{self._added}"


def run_alone(
    seed: int,
    steps: int = STEPS,
    disk: bool | None = None,
    late: int | None = None,
    resets: bool = True,
    **changes: Any,
) -> Engine:
    """Run an engine that a seed chooses, and check it. ``changes``: fields of its shape. ``disk``,
    ``late``, ``resets``: whether it has a disk, by how many steps copies are late, and whether the
    weights change."""
    random = Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvconnect-run-") as folder:
        shape = random_shape(random, **changes)
        drawn = random.random() < 0.4
        if drawn if disk is None else disk:
            shape = with_disk(random, shape, Path(folder))
        engine = Engine(shape, random, random_faults(random, late))
        actions = Actions(random, Prompts(random), resets)
        with running(engine):
            for _ in range(steps):
                actions.act(engine)
                engine.step()
            engine.drain()
            check_at_rest(engine)
    return engine
