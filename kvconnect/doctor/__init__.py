"""``kvconnect doctor``: checks whether KVConnect can work here, and measures how fast.

Every command answers with a :class:`FindingsReport`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from kvconnect.terminal import plain

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of ``doctor``.

    Attributes:
        name: the thing checked.
        status: ``fail`` means it cannot work, ``warn`` that it works less well.
        value: the observation.
        fix: the remedy; empty when ``status`` is ``ok``.
    """

    name: str
    status: Status
    value: str
    fix: str = ""


@dataclass(frozen=True)
class FindingsReport:
    """All findings of one command.

    Attributes:
        findings: in reading order.
        good, bad: the last line, without and with a failure.
        measured: figures by name, for programs; the names contain the units.
    """

    findings: tuple[Finding, ...]
    good: str
    bad: str
    measured: Mapping[str, object] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings are allowed."""
        return all(finding.status != "fail" for finding in self.findings)

    def text(self) -> str:
        """Return the report for people, one line per finding."""
        lines = []
        for finding in self.findings:
            line = f"{finding.status:<5} {finding.name:<16} {finding.value}"
            lines.append(plain(f"{line}  -> {finding.fix}" if finding.fix else line))
        return "\n".join([*lines, self.good if self.ok else self.bad])

    def json(self) -> str:
        """Return the report for programs, as one JSON object."""
        findings = [asdict(finding) for finding in self.findings]
        return json.dumps({"ok": self.ok, "findings": findings, "measured": dict(self.measured)})


def rate(bytes_per_s: float) -> str:
    """Return a rate for people, in GB/s or MB/s."""
    return (
        f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e7 else f"{bytes_per_s / 1e6:.2f} MB/s"
    )
