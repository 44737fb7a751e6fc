"""Generates the Grafana dashboards from the catalogues of metrics.

``python -m scripts.dashboards`` writes ``kvconnect/observability/metrics/dashboards``; it needs
``grafana-foundation-sdk``, which is one of the developer tools. One file per board says what is on
it, ``promql`` has the expressions, and ``grafana`` turns a board into Grafana's JSON.
"""

from __future__ import annotations

from kvconnect.observability.metrics.catalog import CATALOG
from kvconnect.observability.metrics.router_catalog import ROUTER_CATALOG


def helps() -> dict[str, str]:
    """Return what every metric of KVConnect means, engines' and router's, by its bare name."""
    found = {f"kvconnect_{row.name}": row.help for row in CATALOG}
    return found | {f"kvconnect_router_{row.name}": row.help for row in ROUTER_CATALOG}
