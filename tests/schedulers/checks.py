"""What must be true of an engine at any time, and once it has nothing to do."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kvconnect.tiers.cost_model import CostModel

if TYPE_CHECKING:
    from tests.schedulers.engine import Engine


T = TypeVar("T")
SETTLE_S = 30.0
"""For which the last stores may be under way; they have a deadline of a few seconds."""


class Fault(AssertionError):
    """Something that must not be."""


class WrongTokens(Fault):
    """A request got KV or tokens that are not its own."""


class WrongStep(Fault):
    """A step's time was taken for that of another step."""


class Stuck(Fault):
    """An engine does not come to an end."""

    def __init__(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        requests = [
            f"{request.request_id} {request.status.name} {request.num_computed_tokens} of "
            f"{request.num_tokens} tokens"
            for request in scheduler.requests.values()
        ]
        half = engine.connector.scheduler
        super().__init__(f"requests: {requests}; busy: {half.busy}; jobs: {half.plan.jobs!r}")


class Leaked(Fault):
    """Something outlived what it belongs to."""


def watch_cost_model(half: Any, step_tokens: list[int]) -> None:
    """Have each measurement compared with the step that is reported: ``step_tokens`` are the
    numbers of prompt tokens of its requests."""
    for model in (value for value in vars(half.tiers or half).values()):
        if isinstance(model, CostModel):
            take = model.prefilled

            def prefilled(tokens: int, *rest: Any, take: Any = take, **named: Any) -> None:
                if tokens != sum(step_tokens):
                    said = f"the time of a step of {sum(step_tokens)} prompt tokens"
                    raise WrongStep(f"{said} is learned as that of {tokens}")
                take(tokens, *rest, **named)

            model.prefilled = prefilled  # type: ignore[method-assign]


def check_at_rest(engine: Engine) -> None:
    """Check that an engine without requests holds nothing.

    Raises:
        Leaked: a block, slot, job or record of a request is still there.
    """
    half = engine.connector.scheduler
    half.plan.check()
    _settle(engine)
    if half.busy:
        raise Leaked("the connector is busy without requests")
    if half.plan.index.slots.busy:
        raise Leaked(f"{half.plan.index.slots.busy} slots are in use without jobs")
    pool = engine.scheduler.kv_cache_manager.block_pool
    held = engine.shape.blocks - 1 - pool.get_num_free_blocks()  # block 0 is never used
    if held:
        raise Leaked(f"{held} device blocks are held without requests")
    ended = engine.answers.keys() - engine.scheduler.requests.keys()
    found = list(mentions(half, ended))
    if found:
        raise Leaked(f"requests that are over are still known: {found}")


def _settle(engine: Engine) -> None:
    """Have the last stores answered: an idle engine is not stepped for them."""
    until = time.monotonic() + SETTLE_S
    for number in itertools.count():
        engine.drain()
        if not len(engine.connector.scheduler.plan.jobs):
            return
        if time.monotonic() > until:
            raise Stuck(engine)
        engine.add_last(f"last-{number}")


def mentions(root: object, req_ids: Collection[str]) -> Iterator[str]:
    """Yield where a part of KVConnect keeps an id of these requests: a key, an item or a field of
    the objects that ``root`` holds."""
    seen: set[int] = set()
    todo: deque[tuple[str, object]] = deque([("", root)])
    while todo:
        path, found = todo.popleft()
        if isinstance(found, str):
            if found in req_ids:
                yield f"{path} {found}"
            continue
        if id(found) in seen or len(path) > 300:
            continue
        seen.add(id(found))
        if isinstance(found, Mapping):
            todo.extend((f"{path} key", key) for key in list(found))
            todo.extend((f"{path}[...]", value) for value in list(found.values()))
        elif isinstance(found, list | tuple | set | frozenset | deque):
            todo.extend((f"{path}[...]", item) for item in list(found))
        elif type(found).__module__.startswith("kvconnect."):
            todo.extend((f"{path}.{name}", value) for name, value in _fields(found))


def _fields(found: object) -> Iterator[tuple[str, object]]:
    yield from getattr(found, "__dict__", {}).items()
    for kind in type(found).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if isinstance(name, str) and hasattr(found, name):
                yield name, getattr(found, name)


def parts_of(root: object, kind: type[T]) -> Iterator[T]:
    """Yield the objects of a class that a part of KVConnect holds."""
    seen: set[int] = set()
    todo = deque([root])
    while todo:
        found = todo.popleft()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, kind):
            yield found
        if isinstance(found, Mapping):
            todo.extend(found.values())
        elif isinstance(found, list | tuple | set | frozenset | deque):
            todo.extend(found)
        elif type(found).__module__.startswith("kvconnect."):
            todo.extend(value for _, value in _fields(found))
