"""What an engine writes into ``kv_transfer_params``, and what it believes of what stands there."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any

from kvconnect.disaggregation.messages import PrefillSource
from kvconnect.errors import Refused
from kvconnect.protocol.tickets import (
    STANDING_TICKET_KEY,
    TICKET_KEY,
    HandoffRequest,
    Ticket,
    issue,
    verify,
)
from kvconnect.transport.security import Keys
from kvconnect.types import TransferId

STANDING_TICKET_S = 120.0  # routers fetch a new one in time; a restart makes it worthless at once
CARD_EXPIRY_KEY = "kvconnect_card_expires_in"


def _transfer_id(raw: bytes, content: bytes) -> TransferId:
    """Return the id of a transfer of this content. Both sides work it out for themselves, so
    blocks of one prompt can never be taken for those of another."""
    return TransferId(hashlib.sha256(raw + content).digest()[:16])


class TicketIssuer:
    """Issues tickets in the name of ``source``, this engine, and checks those of others.

    ``rank`` is that of this engine if vLLM chooses among several for whoever names none; else -1.
    """

    def __init__(self, keys: Keys, rank: int, lease_s: float, source: PrefillSource) -> None:
        self.source = source
        self._keys = keys
        self._rank = rank
        self._lease_s = lease_s
        self._cards: set[str] = set()  # requests that asked for a card instead of a hand-off
        self._raw: dict[str, bytes] = {}  # by request: the transfer id as the dispatcher knows it

    def want_card(self, req_id: str, rank: int) -> None:
        """A request asks for a card, of an engine by its rank or of any (-1).

        Raises:
            Refused: it has to name this engine's rank.
        """
        if self._rank not in (-1, rank):
            fix = "of several data-parallel engines behind one address, name the one you ask"
            raise Refused("params", f"no card: {fix}")
        self._cards.add(req_id)

    def name_transfer(self, req_id: str, asked: HandoffRequest, content: bytes) -> TransferId:
        """Return the id of a hand-off that starts here, of a prompt with this content."""
        raw = self._raw[req_id] = asked.transfer_id or secrets.token_bytes(16)
        return _transfer_id(raw, content)

    def answer(
        self, req_id: str, transfer: TransferId | None, tokens: int, alone: bool = True
    ) -> dict[str, Any] | None:
        """Return what the answer to a request that is over carries: a card, a ticket for the
        ``transfer`` if its blocks stay available, or nothing. Of two connectors that use the same
        word in one answer, MultiConnector makes an error that ends the engine, so one that is not
        ``alone`` leaves out what others say."""
        raw = self._raw.pop(req_id, b"")
        if req_id in self._cards:
            self._cards.remove(req_id)
            return {
                STANDING_TICKET_KEY: self._issue(TransferId(b""), 0, STANDING_TICKET_S),
                CARD_EXPIRY_KEY: STANDING_TICKET_S,
            }
        if transfer is None:
            return None
        ticket = {
            "transfer_id": raw.hex(),
            TICKET_KEY: self._issue(transfer, tokens, self._lease_s),
        }
        if not alone:
            return ticket
        first = self.source.endpoints[0]
        return {  # what proxies know from vLLM's own connectors, and the ticket, which alone counts
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.source.engine_id,
            "remote_request_id": req_id,
            "remote_block_ids": [],  # nobody but this engine has a use for them
            "remote_host": first.host,
            "remote_port": first.port,
            "tp_size": self.source.tp,
            **ticket,
        }

    def admit(
        self, asked: HandoffRequest, tokens: int, content: bytes
    ) -> tuple[TransferId, PrefillSource, bool]:
        """Return the transfer that a request may receive, from whom, and whether it asks before
        the other side has computed (it shows a card).

        A request with nothing to load (``tokens`` 0) is not compared with its ticket: so look
        those that vLLM's front end rejected, and the other side must hear of them.

        Raises:
            Refused: the ticket is not valid, or not for this prompt.
        """
        key, also = self._keys.current()
        ticket = verify(asked.ticket, key, time.time(), self.source.engine_id, also)
        if not asked.transfer_id:
            raise Refused("params", "transfer_id is missing: pass on what came with the ticket")
        transfer = _transfer_id(asked.transfer_id, content)
        if ticket.transfer and tokens and (ticket.transfer, ticket.tokens) != (transfer, tokens):
            raise Refused("ticket", "the ticket is for another prompt: send the one it came with")
        source = PrefillSource(
            ticket.engine_id, ticket.epoch, ticket.endpoints, ticket.tp, ticket.pp
        )
        return TransferId(ticket.transfer or transfer), source, not ticket.transfer

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
