"""Share tickets of vLLM's requests: issues this engine's, and verifies those of other engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvconnect.disaggregation.messages import PrefillSource
from kvconnect.engines.vllm.messages import WorkerHello, endpoints_of
from kvconnect.errors import Refused
from kvconnect.protocol.addresses import Addresses
from kvconnect.protocol.cache_hints import IgnoredHint
from kvconnect.protocol.options import (
    OPTIONS_KEY,
    SHARE,
    SHARE_EXPIRY_KEY,
    SHARE_TICKET_KEY,
    SOURCE,
)
from kvconnect.protocol.tickets import MOST_SHARING, Scope, Ticket, issue, verify
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport.security import Keys
from kvconnect.types import Endpoint

logger = logging.getLogger(__name__)

SHARE_TICKET_S = 120.0  # routers renew it in time


class ShareTickets:
    """Owned by the scheduler's thread. A ticket that is not valid is ignored and counted: it never
    makes a request fail."""

    def __init__(self, keys: Keys, stats: OffloadingConnectorStats) -> None:
        self._keys = keys
        self._stats = stats
        self._own: PrefillSource | None = None  # None: it issues no tickets
        self._asked: set[str] = set()  # requests for a ticket
        self._sources: dict[str, Addresses] = {}  # by request
        self._logged = False

    def greet(self, hellos: Mapping[tuple[int, int], WorkerHello], engine: PrefillSource) -> None:
        """Take the addresses of the workers of ``engine``, which is this one."""
        found = endpoints_of({place: hello.serves for place, hello in hellos.items()})
        signs = bool(self._keys.current()[0]) and 0 < len(found) <= MOST_SHARING
        serves = signs and len(found) == sum(hello.stores for hello in hellos.values())
        self._own = replace(engine, endpoints=found) if serves else None

    def add_request(self, req_id: str, params: Mapping[str, Any]) -> None:
        """Note what a new request's ``kv_transfer_params`` ask for, and the source that they
        name."""
        options = params.get(OPTIONS_KEY)
        if not isinstance(options, Mapping):
            return
        if options.get(SHARE) is True and self._own:
            self._asked.add(req_id)
        if SOURCE not in options:
            return
        key, also = self._keys.current()
        try:
            ticket = verify(options[SOURCE], (key, *also), time.time(), scope=Scope.SHARE)
        except Refused as error:
            self._stats.count("ignored_cache_hints", label=IgnoredHint.INVALID.value)
            level = logging.DEBUG if self._logged else logging.WARNING
            logger.log(level, "request %s: its source is ignored: %s", req_id, error)
            self._logged = True
            return
        named = _addresses(ticket.endpoints)
        if self._own is None or not set(named) & set(_addresses(self._own.endpoints)):
            self._sources[req_id] = named

    def source(self, req_id: str) -> Addresses:
        """Return where the workers of a request's source serve blocks; () if it names none."""
        return self._sources.get(req_id, ())

    def finish(self, req_id: str, answer: dict[str, Any] | None) -> dict[str, Any] | None:
        """End a request. Return ``answer``, its response's ``kv_transfer_params``, with a ticket if
        the request asked for one."""
        self._sources.pop(req_id, None)
        if req_id not in self._asked:
            return answer
        self._asked.remove(req_id)
        own = self._own
        assert own is not None  # else the request was not noted
        ticket = Ticket(
            engine_id=own.engine_id,
            epoch=own.epoch,
            endpoints=own.endpoints,
            tp=own.tp,
            pp=own.pp,
            expires=time.time() + SHARE_TICKET_S,
            scope=Scope.SHARE,
        )
        text = issue(ticket, self._keys.current()[0])
        return {**(answer or {}), SHARE_TICKET_KEY: text, SHARE_EXPIRY_KEY: SHARE_TICKET_S}


def _addresses(endpoints: tuple[Endpoint, ...]) -> Addresses:
    return tuple((endpoint.host, endpoint.port) for endpoint in endpoints)
