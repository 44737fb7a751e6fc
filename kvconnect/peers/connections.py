"""How a worker connects to workers of other engines, by the settings of its engine: which path its
pages take, and the transport of a service."""

from __future__ import annotations

import logging

from kvconnect.errors import ConfigError
from kvconnect.protocol.auth import Service
from kvconnect.settings import Settings
from kvconnect.transport import make_transport
from kvconnect.transport.base import ConnectionOptions, Memory, Transport
from kvconnect.transport.security import security_of
from kvconnect.transport.tcp.shared_port import SharedPort

logger = logging.getLogger(__name__)


def page_path(settings: Settings, *, measures: bool) -> str:
    """Return which path pages take: its name, or ``auto`` for the fastest that both sides have.
    ``measures``: the service finds out which one that is."""
    if settings.transport != "auto":
        return settings.transport
    # NIXL does not encrypt: with TLS, it is used only if the setting names it.
    return "auto" if measures and not settings.tls_dir else "tcp"


def open_transport(
    settings: Settings,
    service: Service,
    port: SharedPort | None,
    path: str,
    memory: Memory,
    *,
    reads: bool = True,
    serves: bool = True,
) -> Transport:
    """Return the transport of a service for ``memory``, over a path as of :func:`page_path`;
    ``auto``: over every path that works here. ``port``: where the process listens for its other
    services too; None if it has no other. ``reads``, ``serves``: what the service does here.

    Raises:
        ConfigError: a key, certificate or transport that cannot be used.
    """
    options = ConnectionOptions(
        connections=settings.connections,
        max_peers=settings.max_peers,
        backend=settings.nixl_backend,
        local=not (settings.key_file or settings.peers),
        digest=settings.digest,
        stall_s=settings.deadline_s,
        service=service,
        port=port,
        reads=reads,
        serves=serves,
    )
    name = "tcp" if path == "tcp" else "nixl"
    transport = make_transport(name, security_of(settings), options)
    try:
        transport.register(memory)
    except ConfigError as error:
        transport.close()
        if path != "auto":
            raise
        logger.info("pages go over tcp only: %s", error)
        return open_transport(settings, service, port, "tcp", memory, reads=reads, serves=serves)
    return transport
