"""Which requests are tried again after an engine was lost. Pure.

An engine that is lost may have been ended by the request itself. So such a request reaches one more
engine at most, and a request during which two engines crashed reaches no further one for a while.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

import msgspec
from msgspec import Raw

from kvconnect.router.requests.body import Body

WINDOW_S = 60.0
"""Two engines that crash within this time during one body make it deadly."""
REFUSED_S = 600.0
"""Time for which a deadly body is refused."""
MOST_BODIES = 4096
"""Limit of bodies that are remembered; beyond it, the oldest is forgotten."""
LEAST_RETRIES = 10
"""Retries after losses that are possible within ``WINDOW_S`` beside one for each open request."""

_IDS = ("rid", "request_id")


class Withheld(StrEnum):
    """Why a request was not sent to another engine."""

    LOST_AGAIN = "lost_again"  # it has lost two engines
    DEADLY = "deadly"  # two engines crashed during its body within a minute
    BUDGET = "budget"  # too many requests were tried again within a minute


@dataclass
class _Crashes:
    """Engines that crashed during one body: name -> time."""

    engines: dict[str, float] = field(default_factory=dict)
    refused_until: float = float("-inf")


class Retries:
    """Losses of one router's engines. Not thread-safe."""

    def __init__(self) -> None:
        self._bodies: OrderedDict[bytes, _Crashes] = OrderedDict()  # the oldest first
        self._spent: deque[float] = deque()
        self._open = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Count a request as open during the block."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def refuses(self, digest: Callable[[], bytes], now: float) -> bool:
        """Return whether a body is deadly. ``digest`` is called only if any body may be."""
        if not self._bodies:
            return False
        found = self._bodies.get(digest())
        return found is not None and now < found.refused_until

    def crashed(self, digest: bytes, engine: str, now: float) -> None:
        """Note that an engine crashed by itself during a body."""
        found = self._bodies.setdefault(digest, _Crashes())
        self._bodies.move_to_end(digest)
        found.engines = {e: at for e, at in found.engines.items() if now - at < WINDOW_S}
        found.engines[engine] = now
        if len(found.engines) > 1:
            found.refused_until = now + REFUSED_S
        if len(self._bodies) > MOST_BODIES:
            self._bodies.popitem(last=False)

    def again(self, losses: int, digest: Callable[[], bytes], now: float) -> Withheld | None:
        """Return why a request that lost its engine is not tried again; None: it is.

        ``losses``: engines that it has lost.
        """
        if self.refuses(digest, now):
            return Withheld.DEADLY
        if losses > 1:
            return Withheld.LOST_AGAIN
        while self._spent and now - self._spent[0] >= WINDOW_S:
            self._spent.popleft()
        if len(self._spent) >= LEAST_RETRIES + self._open:
            return Withheld.BUDGET
        self._spent.append(now)
        return None


def digest_of(path: str, body: Body) -> bytes:
    """Return a digest of a client's request: its path and fields, without its ids."""
    made = blake2b(path.encode(), digest_size=16)
    for name, value in body.items():
        if name not in _IDS:
            raw = bytes(value) if isinstance(value, Raw) else msgspec.json.encode(value)
            key = name.encode("utf-8", "surrogatepass")
            made.update(b"%d %d " % (len(key), len(raw)) + key)
            made.update(raw)
    return made.digest()
