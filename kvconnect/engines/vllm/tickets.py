"""Tickets in ``kv_transfer_params``: issues those of this engine and verifies those of others."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from kvconnect.disaggregation.messages import PrefillSource
from kvconnect.engines.vllm.shares import ShareTickets
from kvconnect.errors import Refused
from kvconnect.protocol.handoff_request import (
    STANDING_TICKET_EXPIRY_KEY,
    STANDING_TICKET_KEY,
    TICKET_KEY,
    HandoffRequest,
)
from kvconnect.protocol.tickets import Ticket, issue, verify
from kvconnect.transport.security import Keys
from kvconnect.types import TransferId

STANDING_TICKET_S = 120.0  # routers renew it in time; an engine restart ends it at once


class AdmittedTransfer(NamedTuple):
    """A transfer that a request may receive. ``early``: it comes from a standing ticket, so the
    prefill engine may not know it yet."""

    transfer: TransferId
    source: PrefillSource
    early: bool


class TicketIssuer:
    """Issues tickets for ``source``, this engine, and verifies tickets of other engines.

    ``rank``: this engine's data-parallel rank if vLLM picks one of several engines for requests
    without a rank; otherwise -1. ``shares``: the tickets for cached blocks.
    """

    def __init__(
        self, keys: Keys, rank: int, lease_s: float, source: PrefillSource, shares: ShareTickets
    ) -> None:
        self.source = source
        self.shares = shares
        self._keys = keys
        self._rank = rank
        self._lease_s = lease_s
        self._standing: set[str] = set()  # requests for a standing ticket

    def request_standing_ticket(self, req_id: str, rank: int) -> None:
        """Note a request for a standing ticket of the engine with this rank, or of any (-1).

        Raises:
            Refused: the request must name this engine's rank.
        """
        if self._rank not in (-1, rank):
            fix = f"several data-parallel engines share this address, so name rank {self._rank}"
            raise Refused("params", f"no standing ticket: {fix}")
        self._standing.add(req_id)

    def answer(
        self, req_id: str, transfer: TransferId | None, tokens: int, alone: bool = True
    ) -> dict[str, Any] | None:
        """Return the ``kv_transfer_params`` of a finished request: a standing ticket, a ticket for
        ``transfer`` if its blocks stay available, or None. MultiConnector ends the engine if two
        connectors return the same key, so without ``alone`` the keys are only KVConnect's.
        """
        if req_id in self._standing:
            self._standing.remove(req_id)
            return {
                STANDING_TICKET_KEY: self._issue(TransferId(b""), 0, STANDING_TICKET_S),
                STANDING_TICKET_EXPIRY_KEY: STANDING_TICKET_S,
            }
        if transfer is None:
            return None
        ticket = {
            "transfer_id": transfer.hex(),
            TICKET_KEY: self._issue(transfer, tokens, self._lease_s),
        }
        if not alone:
            return ticket
        first = self.source.endpoints[0]
        return {  # keys of vLLM's own connectors, for proxies; KVConnect reads only the ticket
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.source.engine_id,
            "remote_request_id": req_id,
            "remote_block_ids": [],  # only this engine can use block ids
            "remote_host": first.host,
            "remote_port": first.port,
            "tp_size": self.source.tp,
            **ticket,
        }

    def admit(self, asked: HandoffRequest) -> AdmittedTransfer:
        """Verify a request's ticket; return the transfer that it may receive. The prefill engine
        compares the prompts.

        Raises:
            Refused: the ticket is invalid, or for another transfer.
        """
        key, also = self._keys.current()
        ticket = verify(asked.ticket, (key, *also), time.time(), self.source.engine_id)
        if not asked.transfer_id:
            raise Refused(
                "params", "transfer_id is missing: pass on the one that came with the ticket"
            )
        if ticket.transfer not in (b"", asked.transfer_id):
            raise Refused(
                "ticket", "the ticket is for another transfer_id: send the one it came with"
            )
        source = PrefillSource(
            ticket.engine_id, ticket.epoch, ticket.endpoints, ticket.tp, ticket.pp
        )
        return AdmittedTransfer(asked.transfer_id, source, early=not ticket.transfer)

    def _issue(self, transfer: TransferId, tokens: int, lifetime_s: float) -> str:
        source = self.source
        ticket = Ticket(
            transfer=transfer,
            engine_id=source.engine_id,
            epoch=source.epoch,
            endpoints=source.endpoints,
            tp=source.tp,
            pp=source.pp,
            tokens=tokens,
            expires=time.time() + lifetime_s,
        )
        return issue(ticket, self._keys.current()[0])
