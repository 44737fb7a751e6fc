"""From settings and a described KV cache to a worker that hands blocks off."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvconnect.config import Config
from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.disaggregation.bandwidth_probe import ProbedMemory
from kvconnect.disaggregation.sessions import GroupPages, PathPreference, Sessions
from kvconnect.errors import ConfigError
from kvconnect.offload.streams import make_streams
from kvconnect.protocol.messages import Hello
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport import make_transport
from kvconnect.transport.base import ConnectionOptions, Memory, Security, Transport
from kvconnect.transport.security import read_key, tls_files

logger = logging.getLogger(__name__)


class Cache(NamedTuple):
    """A worker's KV cache: what it says of it to others, where each layer of each group has its
    pages, and how a transport reaches them. ``device`` is the model's."""

    hello: Hello
    pages: Sequence[GroupPages]
    memory: Memory
    device: torch.device


def start_agent(
    config: Config,
    cache: Cache,
    address: tuple[str, int] | None,
    deadline_s: float,
    alone: bool = False,
    traced: bool = False,
) -> HandoffAgent:
    """Return the running agent of a worker's hand-offs, listening at ``address`` if there is one.

    ``deadline_s``: how long readers may ask before this side knows of what they ask for.
    ``alone``: this worker is told other things than its engine's first one, so it speaks for
    itself. ``traced``: the engine traces, so its hand-offs are told with their times.

    Raises:
        ConfigError: an address, key, certificate or transport that cannot be used.
    """
    network = config.network
    tls = tls_files(network.tls_dir)
    security = Security(read_key(network), network.peers, *tls, key_file=network.key_file)
    options = ConnectionOptions(
        connections=network.connections,
        digest=config.digest,
        backend=network.nixl_backend,
        local=not (network.key_file or network.peers),
        stall_s=config.deadline_s,
    )
    memory = ProbedMemory(cache.memory, cache.device)
    # NIXL does not encrypt: who wants TLS has to ask for NIXL by name.
    name = "tcp" if network.transport == "auto" and network.tls_dir else network.transport
    transport = _make_transport(name, security, options, memory)
    found = None
    if address:
        found = transport.listen(*address)
        logger.info("handing out KV blocks at %s:%d", *found)
    choice = PathPreference(name, network.min_rate)
    links = Sessions(cache.hello, cache.pages, transport, OffloadingConnectorStats(), choice)
    links.is_first, links.traced = links.is_first or alone, traced
    return HandoffAgent(links, deadline_s, make_streams(cache.device).mark, found)


def _make_transport(
    name: str, security: Security, options: ConnectionOptions, memory: Memory
) -> Transport:
    """Return a transport that serves ``memory`` over the path called ``name``; for ``auto``, over
    as many as work here."""
    transport = make_transport("tcp" if name == "tcp" else "nixl", security, options)
    try:
        transport.register(memory)
    except ConfigError as error:
        transport.close()
        if name != "auto":
            raise
        logger.info("pages are handed off over tcp alone: %s", error)
        return _make_transport("tcp", security, options, memory)
    return transport
