"""Small requests that would grow: ten at a time, held open by an engine that takes its time.

Figures: ``bomb_mib``, the most memory that the router gained meanwhile; ``bomb_health_gap_ms``, the
longest time from one answer of ``/health`` to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.hostile import Outcome
from tests.hostile.fleet import Routed, Session, routed

_AT_ONCE = 10
_SENT = 60_000  # bytes of a request
_GROWN = 60 * 2**20  # of one that is encoded
_EVERY_S = 0.005
_HELD_S = 0.5  # by the engine that takes its time


class Bomb(NamedTuple):
    """A body, how it is encoded, and what answers it may get."""

    name: str
    body: Callable[[], bytes]
    encoding: bytes
    statuses: tuple[int, ...]


def filled(begin: bytes, item: bytes, end: bytes, size: int) -> bytes:
    return begin + item * ((size - len(begin) - len(end)) // len(item)) + end


def _encoded(encode: Callable[[bytes], bytes], begin: bytes, item: bytes, end: bytes) -> bytes:
    return encode(filled(begin, item, end, _GROWN))


def bombs() -> Iterator[Bomb]:
    """Yield all bombs."""
    prompt = b'{"model":"fake","prompt":"a"'
    kinds = {
        "objects": (prompt + b',"x":[', b"{},", b"1]}"),
        "numbers": (b'{"model":"fake","prompt":[', b"1,", b"1]}"),
        "text": (b'{"model":"fake","prompt":"', b"a", b'"}'),
        "messages": (b'{"model":"fake","prompt":"a","messages":[', b"{},", b"{}]}"),
        "parts": (b'{"model":"fake","messages":[{"content":[', b'{"text":""},', b"{}]}]}"),
        "texts": (b'{"model":"fake","prompt":[', b'"",', b'""]}'),
        "samplings": (prompt + b',"sampling_params":[', b'{"n":1},', b"{}]}"),
        "brackets": (prompt + b',"x":[', b"[[[[[[[[]]]]]]]],", b"[]]}"),
        "fields": (prompt + b',"vllm_xargs":{', b'"a":1,', b'"b":1}}'),
    }
    encoders = {
        b"gzip": lambda raw: gzip.compress(raw, 9),
        b"deflate": lambda raw: zlib.compress(raw, 9),
    }
    for name, parts in kinds.items():
        yield Bomb(f"{name}, plain", partial(filled, *parts, _SENT), b"", (200, 400, 503))
        for encoding, encode in encoders.items():
            body = partial(_encoded, encode, *parts)
            yield Bomb(f"{name}, {encoding.decode()}", body, encoding, (415,))
    keys = b",".join(b'"%d":1' % number for number in range(6000))
    yield Bomb("names, plain", lambda: b"{" + keys + b"}", b"", (400,))
    deep = _SENT // 2
    yield Bomb("nested, plain", lambda: b'{"x":' + b"[" * deep + b"]" * deep + b"}", b"", (400,))


class _Watch:
    """Asks ``/health`` again and again; how long it did not answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.longest_s = 0.0

    async def during(self, wave: Awaitable[object]) -> None:
        """Look until ``wave`` has passed.

        Raises:
            TimeoutError: no answer comes at all.
        """
        session, passing = Session(self._port), asyncio.ensure_future(wave)
        await session.get("/health")
        last = time.monotonic()
        while not passing.done():
            await session.get("/health")
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - last)
            last = now
            await asyncio.sleep(_EVERY_S)
        session.close()
        await passing


def memory_of(pid: int, what: str) -> float:
    """Return a process's resident memory, or its most. Unit: MiB."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def _wave(router: Routed, bomb: Bomb, watch: _Watch, outcome: Outcome) -> float:
    """Send ten at a time; return how much memory the router gained at most. Unit: MiB."""
    with contextlib.suppress(OSError):  # not allowed everywhere: then the most since the start
        Path(f"/proc/{router.pid}/clear_refs").write_text("5")
    before, body = memory_of(router.pid, "VmRSS"), bomb.body()
    header = (b"Content-Encoding: " + bomb.encoding,) if bomb.encoding else ()

    async def send() -> None:
        session = Session(router.port)
        try:
            status, said = await session.post("/v1/completions", body, *header)
        except TimeoutError:
            outcome.hangs += 1
            outcome.notes.append(f"{bomb.name}: no answer")
            return
        finally:
            session.close()
        if status not in bomb.statuses:
            outcome.wrong += 1
            outcome.notes.append(f"{bomb.name}: {status} {said!r:.100}")

    try:
        await watch.during(asyncio.gather(*(send() for _ in range(_AT_ONCE))))
    except TimeoutError:
        outcome.hangs += 1
        outcome.notes.append(f"{bomb.name}: /health does not answer")
    return memory_of(router.pid, "VmHWM") - before


async def run(limit: int | None = None) -> Outcome:
    """Play all, or ``limit`` of them, spread."""
    cases = list(bombs())
    if limit is not None:
        cases = cases[:: max(1, len(cases) // limit)]
    outcome = Outcome(len(cases) * _AT_ONCE)
    async with routed("--prefill-policy", "cache_aware") as router:
        router.decode.hold_s = _HELD_S
        watch = _Watch(router.port)
        gained = [await _wave(router, bomb, watch, outcome) for bomb in cases]
        crashes = router.crashes()
        outcome.crashes += len(crashes)
        outcome.notes += crashes
    outcome.figures = {
        "bomb_mib": max(gained),
        "bomb_health_gap_ms": 1000 * watch.longest_s,
    }
    return outcome
