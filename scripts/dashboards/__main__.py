"""``python -m scripts.dashboards`` writes the dashboards' JSON."""

from __future__ import annotations

from pathlib import Path

from kvconnect.observability.metrics import dashboards
from scripts.dashboards import disaggregation, overview, router, tiers
from scripts.dashboards.grafana import to_json

BOARDS = (overview.BOARD, disaggregation.BOARD, tiers.BOARD, router.BOARD)


def main() -> None:
    """Write every board beside the alerts."""
    folder = Path(dashboards.__file__).parent
    for board in BOARDS:
        (folder / f"{board.uid}.json").write_text(to_json(board), encoding="utf-8")


if __name__ == "__main__":
    main()
