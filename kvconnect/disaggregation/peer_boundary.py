"""Where what peers say is applied: an error that it raises ends one connection, and no more."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from functools import partial

from kvconnect.disaggregation.sessions import Sessions
from kvconnect.disaggregation.states import SessionState
from kvconnect.errors import KVConnectError, Refused, contained
from kvconnect.transport.base import Disconnect, PeerId

logger = logging.getLogger(__name__)


def guard(links: Sessions, peer: PeerId) -> AbstractContextManager[None]:
    """Do what one peer is the cause of. Whatever it raises ends that peer's connection: others'
    transfers, the agent's thread and the engine's go on."""
    return contained(partial(end, links, peer))


def end(links: Sessions, peer: PeerId, error: Exception) -> None:
    """End a connection over an error. One that nobody foresaw is a bug here that the peer found:
    it is logged and counted."""
    link = links.get(peer)
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, Refused):
        links.refuse(peer, error)
        return
    if not isinstance(error, KVConnectError) and (
        link is None or link.state is not SessionState.CLOSING
    ):
        name = link.name if link is not None else "a peer"
        logger.error("%s: an error of KVConnect's own; its connection ends", name, exc_info=error)
        links.stats.count("handoff_peer_errors")
    if link is None:
        links.transport.submit(Disconnect(peer, reason))
    else:
        links.hang_up(peer, reason)
