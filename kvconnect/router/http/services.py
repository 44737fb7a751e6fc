"""What all requests of a router share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvconnect.router.connections.pool import ConnectionPool
from kvconnect.router.connections.relay import StreamRelay
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.fleet.receipts import OwedReceipts
from kvconnect.router.http.admission import Admission, BodyMemory, ClientConcurrency
from kvconnect.router.http.draining import DrainingPrefills
from kvconnect.router.http.request_reader import RequestReader
from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.caches import Caches
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.requests.retries import Retries
from kvconnect.router.tracing import RouterSpans


class Services(NamedTuple):
    """Services that all exchanges of a router share."""

    options: RouterOptions
    rules: RoutingRules
    fleet: Fleet
    metrics: RouterMetrics
    client: ConnectionPool
    relay: StreamRelay | None
    admission: Admission
    in_flight: ClientConcurrency
    bodies: BodyMemory
    answers: BodyMemory
    intake: RequestReader
    caches: Caches
    spans: RouterSpans
    draining_prefills: DrainingPrefills
    receipts: Mapping[Engine, OwedReceipts]
    retries: Retries
