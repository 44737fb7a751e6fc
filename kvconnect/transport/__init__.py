"""Ways to move pages between workers of different processes: ``tcp`` and ``nixl``."""

from __future__ import annotations

from kvconnect.errors import ConfigError
from kvconnect.extras import what_to_install
from kvconnect.transport.base import ConnectionOptions, Security, Transport

__all__ = ["PAGE_PATHS", "ConnectionOptions", "Security", "Transport", "make_transport"]

PAGE_PATHS = ("tcp", "nixl")
"""Every path that pages may take to a peer, the one that all transports have first."""


def make_transport(name: str, security: Security, options: ConnectionOptions) -> Transport:
    """Return a new transport by name; nothing of the others is loaded.

    Raises:
        ConfigError: no transport is called that, or it cannot be used with these settings.
    """
    if name == "tcp":
        from kvconnect.transport.tcp import TcpTransport

        return TcpTransport(security, options)
    if name == "nixl":
        if lacking := what_to_install(["nixl"]):
            raise ConfigError("transport", name, f"{lacking}, or use 'tcp'")
        from kvconnect.transport.nixl import NixlTransport

        return NixlTransport(security, options)
    raise ConfigError("transport", name, "use tcp or nixl")
