"""Grafana dashboards, and the alerts that go with them, as files. The dashboards are generated:
``python -m scripts.dashboards``."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def export(folder: Path) -> list[Path]:
    """Write every dashboard and ``alerts.yaml`` into ``folder``, which is made if need be.

    Returns what was written; files of these names are replaced.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(resources.files(__name__).iterdir(), key=lambda file: file.name):
        if source.name.endswith((".json", ".yaml")):
            target = folder / source.name
            target.write_bytes(source.read_bytes())
            written.append(target)
    return written
