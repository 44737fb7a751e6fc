"""One port of a process, at which its transports listen, each for its service."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Protocol

from kvconnect.errors import ConfigError
from kvconnect.protocol.auth import Opening, Service
from kvconnect.transport.tcp.frame_priority import FramePriority

if TYPE_CHECKING:
    from kvconnect.transport.tcp.listener import PendingConnection

_BACKLOG = 512
_LAST_PORT = 65535


class PortMember(Protocol):
    """A transport, as its port sees it. Both methods are for any thread, and do not wait."""

    def accept_from(self, listener: socket.socket) -> None:
        """Accept connections from a listening socket from now on; takes ownership of it."""

    def take(self, pending: PendingConnection, opening: Opening) -> None:
        """Take over an authenticated connection that another member has accepted."""


class SharedPort:
    """The transports of one process that listen at one address. Thread-safe.

    The first that listens accepts all connections, and gives those of other services to their
    transports. When it closes, another one goes on with its socket.

    Attributes:
        priority: of the frames that these transports send.
    """

    def __init__(self) -> None:
        self.priority = FramePriority()
        self._lock = threading.Lock()
        self._members: dict[Service, PortMember] = {}
        self._accepting: PortMember | None = None
        self._address = ("", 0)

    def join(self, service: Service, member: PortMember, host: str, port: int) -> tuple[str, int]:
        """Listen for a service; return the address in use. Port 0 picks one if none is in use.

        Raises:
            ConfigError: the address cannot be used, or the process listens at another one.
        """
        with self._lock:
            if self._accepting is None:
                listener = _bind(host, port)
                address = listener.getsockname()
                self._address = str(address[0]), int(address[1])
                self._accepting = member
                member.accept_from(listener)
            elif (host, port or self._address[1]) != self._address:
                fix = "use {}:{}, where this process listens already".format(*self._address)
                raise ConfigError("listen", f"{host}:{port}", fix)
            self._members[service] = member
            return self._address

    def find(self, service: Service) -> PortMember | None:
        """Return who listens for a service."""
        with self._lock:
            return self._members.get(service)

    def services(self) -> tuple[Service, ...]:
        """Return the services that somebody listens for."""
        with self._lock:
            return tuple(self._members)

    def leave(self, member: PortMember, listener: socket.socket | None) -> None:
        """A member closes; ``listener`` is the socket that it accepts from, if it does."""
        with self._lock:
            self._members = {key: each for key, each in self._members.items() if each is not member}
            if self._accepting is member:
                self._accepting = next(iter(self._members.values()), None)
            if listener is None:
                return
            if self._accepting is None:
                listener.close()
            else:
                self._accepting.accept_from(listener)


def _bind(host: str, port: int) -> socket.socket:
    if port > _LAST_PORT:
        fix = "each worker has a port of its own, and ports end at 65535: use a lower one"
        raise ConfigError("listen", f"{host}:{port}", fix)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted worker gets its port back while old connections are still fading.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        fix = f"use an address of this machine and a free port: {error}"
        raise ConfigError("listen", f"{host}:{port}", fix) from error
    return listener
