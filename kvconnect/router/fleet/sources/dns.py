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
_GONE = 3  # answers in a row that lack an address, before it is gone: some name a part of them


async def follow(role: Role, name: str, refuse: OnRefused) -> EngineSource:
    """Look a name up periodically."""
    missed: dict[EngineSpec, int] = {}  # answers in a row that lack an engine
    while True:
        try:
            found = await resolve(name, refuse)
        except (OSError, UnicodeError) as error:
            logger.warning("%s: %s", name, error)
        else:
            if found:
                missed = {spec: times + 1 for spec, times in missed.items()}
                missed.update(dict.fromkeys(found, 0))
                missed = {spec: times for spec, times in missed.items() if times < _GONE}
                yield {role: tuple(missed)}
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
