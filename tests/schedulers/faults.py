"""What goes wrong on purpose: copies and stores that fail or take their time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvconnect.tiers.backends.base import BlockOutcome, Store, Usage

_LONGEST_S = 0.02  # of a wait for steps: the engine may itself wait for what is late


@dataclass
class Pace:
    """Lets threads wait for an engine's steps, so that they end some steps later."""

    steps: int = 0
    _moved: threading.Condition = field(default_factory=threading.Condition)

    def step(self) -> None:
        with self._moved:
            self.steps += 1
            self._moved.notify_all()

    def wait(self, steps: int) -> None:
        with self._moved:
            until = self.steps + steps
            self._moved.wait_for(lambda: self.steps >= until, _LONGEST_S)


class Gate:
    """Stops calls until it is opened. It is open at first. ``reached``: a call was stopped."""

    def __init__(self) -> None:
        self.reached = False
        self._open = threading.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        self.reached = self.reached or not self._open.is_set()
        if not self._open.wait(60):
            raise TimeoutError("a gate stayed closed")


@dataclass
class Faults:
    """How often what fails, from 0 to 1, and for how many steps calls wait at most. Used by the
    threads of all ranks."""

    random: Random
    copies: float = 0.0
    stores: float = 0.0
    late: int = 0
    pace: Pace = field(default_factory=Pace)
    copy_gate: Gate = field(default_factory=Gate)
    store_gate: Gate = field(default_factory=Gate)
    read_gate: Gate = field(default_factory=Gate)

    def copy_fails(self) -> bool:
        self.copy_gate.wait()
        self._dawdle()
        return bool(self.copies) and self.random.random() < self.copies

    def store_fails(self) -> bool:
        self.store_gate.wait()
        self._dawdle()
        return bool(self.stores) and self.random.random() < self.stores

    def _dawdle(self) -> None:
        if self.late:
            self.pace.wait(self.random.randrange(self.late + 1))


class FaultyCopier:
    """A copier whose calls may fail."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("enqueue_store", "enqueue_load", "enqueue_runs"):
            return found

        def copy(*args: Any) -> Any:
            if self._faults.copy_fails():
                raise RuntimeError(f"injected: {name}")
            return found(*args)

        return copy


class FaultyStore(Store):
    """A store that now and then says that it failed."""

    def __init__(self, inner: Store, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        if self._faults.store_fails():
            return [BlockOutcome.FAILED] * len(keys)
        return self._inner.put(keys, payloads)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        self._faults.read_gate.wait()
        if self._faults.store_fails():
            for buffer in buffers:
                buffer[:] = b"\x5a" * len(buffer)
            return [BlockOutcome.FAILED] * len(keys)
        return self._inner.get(keys, buffers)

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        return [0] * len(keys) if self._faults.store_fails() else self._inner.exists(keys)

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        if self._faults.store_fails():
            return [BlockOutcome.FAILED] * len(keys)
        return self._inner.remove(keys)

    def usage(self) -> Usage:
        return self._inner.usage()

    def take_stats(self) -> Any:
        return self._inner.take_stats()

    def close(self) -> None:
        self._inner.close()
