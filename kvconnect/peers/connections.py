"""How a worker connects to workers of other engines, by the settings of its engine."""

from __future__ import annotations

from kvconnect.protocol.auth import Service
from kvconnect.settings import Settings
from kvconnect.transport.base import ConnectionOptions
from kvconnect.transport.tcp.shared_port import SharedPort


def connection_options(
    config: Settings, service: Service, port: SharedPort | None
) -> ConnectionOptions:
    """Return the options of the transport for a service. ``port``: where the process listens for
    its other services too; None if it has no other."""
    return ConnectionOptions(
        connections=config.connections,
        max_peers=config.max_peers,
        backend=config.nixl_backend,
        local=not (config.key_file or config.peers),
        digest=config.digest,
        stall_s=config.deadline_s,
        service=service,
        port=port,
    )
