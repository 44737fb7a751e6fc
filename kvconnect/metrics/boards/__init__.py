"""Generates the Grafana dashboards from the catalogues of metrics.

``python -m kvconnect.metrics.boards`` writes ``kvconnect/metrics/dashboards/*.json``; it needs
``grafana-foundation-sdk``, which is one of the developer tools. One file per board says what is on
it, in the words of :mod:`~kvconnect.metrics.boards.board`;
:mod:`~kvconnect.metrics.boards.promql` has the expressions and
:mod:`~kvconnect.metrics.boards.grafana` turns a board into Grafana's JSON.
"""

from __future__ import annotations

from kvconnect.metrics.catalog import CATALOG


def helps() -> dict[str, str]:
    """Return what every metric of KVConnect means, engines' and router's, by its bare name."""
    from kvconnect.router.metrics import ROWS

    found = {f"kvconnect_{row.name}": row.help for row in CATALOG}
    return found | {f"kvconnect_router_{row.name}": row.text for row in ROWS}
