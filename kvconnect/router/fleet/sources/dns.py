"""A source without third-party packages: the addresses of a DNS name."""

from __future__ import annotations

import asyncio
import logging
import socket

from kvconnect.router.engine_spec import EngineSpec, engine_spec
from kvconnect.router.fleet.sources import EngineSource, OnRefused, at_addresses
from kvconnect.router.metrics import InputKind
from kvconnect.router.policy.fleet_view import Role

logger = logging.getLogger(__name__)

DNS_EVERY_S = 5.0


async def follow(role: Role, name: str, refuse: OnRefused) -> EngineSource:
    """Look a name up periodically."""
    while True:
        try:
            found = await resolve(name, refuse)
        except (OSError, UnicodeError) as error:
            logger.warning("%s: %s", name, error)
        else:
            if found:
                yield {role: found}
        await asyncio.sleep(DNS_EVERY_S)


async def resolve(name: str, refuse: OnRefused) -> tuple[EngineSpec, ...]:
    """Return an engine per address of the host in ``name``, an engine as on the command line.

    Raises:
        OSError, UnicodeError: the host cannot be looked up.
    """
    model = engine_spec("dns", name)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(model.hostname, None, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(address[0]) for *_, address in found)
    return at_addresses(model, addresses, InputKind.DNS, refuse)
