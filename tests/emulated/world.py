"""Threads that take turns, so that whoever holds the random numbers decides their order.

Code under test runs on threads of the system, one at a time. Where it would block, or now and then
between, its turn ends, and the world picks who goes on: another thread, or a device. Time hardly
passes until nobody can go on. There is no sleep, and the same numbers give the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol

from kvconnect import threads
from tests.turns import Turns

SHORT_S = 0.01  # waits up to this long may end before other things happen
TURNS = 20_000  # of one run; more is a loop that does not end


class Machine(Protocol):
    """Something that goes on by itself, such as a stream of a device."""

    def ready(self) -> bool:
        """Whether it can go on now."""

    def step(self) -> None:
        """Go on by the smallest step."""


class Ended(BaseException):
    """The world ends: raised in threads that are still there."""


class Task:
    """A thread of the world."""

    def __init__(self, world: World, name: str, body: Callable[[], None]) -> None:
        self.name = name
        self.ready: Callable[[], bool] = lambda: True
        self.deadline: float | None = None
        self.is_short = False
        self.over = False
        self.error: BaseException | None = None
        self.weight = world.draw_weight()
        self.local: dict[str, Any] = {}
        self.turns = Turns(self._run)
        self._world, self._body = world, body

    def _run(self) -> None:
        try:
            if not self._world.ended:
                self._body()
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
            self.error = error
        finally:
            self.over = True


class World:
    """``random`` decides everything. Some threads and machines are favoured for a whole run, and
    turns end often or rarely: what a bug needs is mostly that one of them is very late."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.ended = False
        self.machines: list[Machine] = []
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self._now = 0.0
        self._weights: dict[int, float] = {}
        self._restless = random.choice((0.0, 0.1, 0.5))
        self.threading = SimpleNamespace(
            Thread=self.bound(Thread),
            Lock=self.bound(Lock),
            RLock=self.bound(Lock),
            Condition=self.bound(Condition),
            Event=self.bound(Event),
        )
        self.time = SimpleNamespace(monotonic=self.now, perf_counter=self.now, time=self.now)
        self.simple_queue = self.bound(Queue)
        self.future = self.bound(Future)

    def bound(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """Return a class as code under test calls it."""
        return lambda *args, **more: kind(self, *args, **more)

    def now(self) -> float:
        return self._now

    def draw_weight(self) -> float:
        return self.random.choice((0.01, 1.0, 1.0, 10.0))

    def run(self, body: Callable[[], None]) -> None:
        """Run ``body`` as a thread until it returns; then end all that it started. Raises what any
        thread raised."""
        threads.take_failures()  # those of runs before
        first = self.spawn("main", body)
        try:
            for _ in range(TURNS):
                if first.over:
                    break
                self._turn()
                if first.error is None and any(task.error for task in self.tasks):
                    break
            else:
                raise AssertionError(f"no end after {TURNS} turns: {self._waiting()}")
        finally:
            self._end()
        errors = [task.error for task in self.tasks if task.error]
        if errors:
            raise errors[0]
        assert not threads.take_failures(), "a thread ended with an error"

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        task = Task(self, name, body)
        self.tasks.append(task)
        return task

    def block(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """End the turn until ``ready``; return False if time ran out first."""
        if self.ended:
            raise Ended
        task = self.current
        assert task is not None, "only threads of the world wait"
        task.ready = ready
        task.deadline = None if timeout is None else self._now + timeout
        task.is_short = timeout is not None and timeout <= SHORT_S
        task.turns.pause()
        if self.ended:
            raise Ended
        return bool(ready())

    def pause(self) -> None:
        """End the turn, or not."""
        if self.current is not None and self.random.random() < self._restless:
            self.block(lambda: True)

    def _turn(self) -> None:
        """Let one of those who can go on do so."""
        alive = [task for task in self.tasks if not task.over]
        able: list[tuple[Task | Machine, float]] = [
            (task, task.weight) for task in alive if task.ready()
        ]
        for machine in self.machines:
            if machine.ready():
                weight = self._weights.setdefault(id(machine), self.draw_weight())
                able.append((machine, weight))
        timed = [task for task in alive if task.deadline is not None and not task.ready()]
        hasty = [task for task in timed if task.is_short]
        able += [(task, 0.1) for task in hasty]
        if not able:
            assert timed, f"nobody can go on: {self._waiting()}"
            able = [(min(timed, key=lambda task: task.deadline or 0.0), 1.0)]
        (chosen,) = self.random.choices(*zip(*able, strict=True))
        if not isinstance(chosen, Task):
            chosen.step()
            return
        if chosen.deadline is not None and not chosen.ready():
            left = chosen.deadline - self._now
            self._now += left / 100 if chosen.is_short and len(able) > 1 else max(0.0, left)
        self._resume(chosen)

    def _resume(self, task: Task) -> None:
        self.current = task
        task.turns.resume()
        self.current = None

    def _end(self) -> None:
        self.ended = True
        for task in self.tasks:
            while not task.over:
                self._resume(task)

    def _waiting(self) -> list[str]:
        return [task.name for task in self.tasks if not task.over]


class Thread:
    """``threading.Thread``."""

    def __init__(
        self,
        world: World,
        target: Callable[..., None],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        daemon: bool = False,
    ) -> None:
        self._world, self._name = world, name
        self._body = lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._world.spawn(self._name, self._body)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.over

    def join(self, timeout: float | None = None) -> None:
        self._world.block(lambda: not self.is_alive(), timeout)


class Lock:
    """``threading.Lock`` and ``RLock``: who holds it may take it again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self) -> bool:
        if self._owner is not self._world.current:
            self._world.pause()
            if self._owner is not None:
                self._world.block(lambda: self._owner is None)
            self._owner = self._world.current
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """``threading.Condition`` with a lock of its own."""

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self._world.pause()
        if timeout == 0 or predicate():
            return predicate()
        depth, self._depth, self._owner = self._depth, 0, None
        try:
            self._world.block(lambda: bool(predicate()) and self._owner is None, timeout)
            if self._owner is not None:
                self._world.block(lambda: self._owner is None)
        finally:
            self._owner, self._depth = self._world.current, depth
        return predicate()

    def notify(self, n: int = 1) -> None: ...

    notify_all = notify


class Event:
    """``threading.Event``."""

    def __init__(self, world: World) -> None:
        self._world, self._set = world, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._world.pause()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._set or self._world.block(self.is_set, timeout)


class Queue:
    """``queue.SimpleQueue``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._world.pause()

    def get(self) -> Any:
        self._world.block(lambda: bool(self._items))
        return self._items.popleft()


class Future:
    """``concurrent.futures.Future``, as far as it is used."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._done = False
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._done

    def set_result(self, result: None) -> None:
        assert not self._done
        self._done = True
        self._world.pause()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self.set_result(None)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._done and not self._world.block(self.done, timeout):
            raise TimeoutError
        return self._error
