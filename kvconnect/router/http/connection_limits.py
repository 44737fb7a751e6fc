"""How many connections clients may have open, and how much may wait on them: files and memory are
left for engines, and for other clients. What the relay opens for their streams counts as theirs.

With TLS, a connection counts from the end of its handshake on. Event loop only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

_CLIENTS_SHARE = 0.75  # of all files: requests to engines need the others
_ADDRESS_SHARE = 0.75  # of the clients' files
_LEAST = 8
_WARN_S = 60.0
_FILES = ", the most; raise the limit of open files"
_WHY = b"too many connections are open"
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (len(_WHY), _WHY)
)


class Endable(Protocol):
    """A client's connection; hashed by identity."""

    def end(self) -> object:
        """End now."""


class ConnectionLimits:
    """Limits the open connections of all clients together, and of each network address, and the
    bytes of requests that wait on all of them."""

    def __init__(
        self,
        files: int,
        memory: int,
        refused: Callable[[str], None],
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        """``files``: descriptors that the process may have. ``memory``: bytes that may wait.
        ``refused``: is told the reason for which a connection is refused or closed. ``held``:
        returns how many more files clients' streams take than their connections."""
        self.most = max(_LEAST, int(files * _CLIENTS_SHARE))
        self.most_of_address = max(_LEAST, int(self.most * _ADDRESS_SHARE))
        self._refused, self._held = refused, held
        self._waiting: dict[Endable, int] = {}
        self._memory_left = memory
        self._address_of: dict[Endable, str] = {}
        self._of_address: Counter[str] = Counter()
        self._warn_at = 0.0

    def opened(self, connection: Endable, address: str) -> bool:
        """Count a connection; return False for one too many."""
        if self._of_address[address] >= self.most_of_address:
            self._refuse("address", f"{address} has {self.most_of_address} connections{_FILES}")
            return False
        if len(self._address_of) + self._held() >= self.most:
            self._refuse("files", f"clients have {self.most} files{_FILES}")
            return False
        self._address_of[connection] = address
        self._of_address[address] += 1
        return True

    def waits(self, connection: Endable, nbytes: int) -> None:
        """Record the bytes that wait on a connection: heads that are not complete, and requests
        before whose answer others are due. While all take too much, end the one with the most."""
        self._memory_left += self._waiting.pop(connection, 0) - nbytes
        if nbytes:
            self._waiting[connection] = nbytes
        while self._memory_left < 0:
            largest = max(self._waiting, key=self._waiting.__getitem__)
            self._memory_left += self._waiting.pop(largest)
            self._refuse("memory", "requests that wait on them take too much memory")
            largest.end()

    def closed(self, connection: Endable) -> None:
        """Count a connection out that was counted in."""
        self._memory_left += self._waiting.pop(connection, 0)
        address = self._address_of.pop(connection, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def _refuse(self, reason: str, why: str) -> None:
        self._refused(reason)
        if (now := time.monotonic()) >= self._warn_at:
            self._warn_at = now + _WARN_S
            logger.warning("connections are refused: %s", why)
