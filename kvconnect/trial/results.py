"""What a trial found: four lines for people, JSON for programs, and a report for an issue."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvconnect import engine_versions
from kvconnect.trial.engine_api import AskedEngine

_SMI = ("nvidia-smi", "--format=csv,noheader")
_SMI_QUERY = "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max"
_SMI_S = 10.0
_LOCAL = ("127.0.0.1", "localhost", "::1")
_VERSION = re.compile(r"[\w.+-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class NoGain:
    """Why nothing is gained, and what to do."""

    text: str
    fix: str


@dataclass(frozen=True)
class Measurement:
    """One line: times to the first token, in seconds, and what was asked."""

    name: str
    seconds: Sequence[float]
    asked: str

    @property
    def median_ms(self) -> float:
        """The median, in milliseconds."""
        return median(self.seconds) * 1000


@dataclass(frozen=True)
class TrialResult:
    """What a trial found.

    Attributes:
        info: the engine that answered.
        measurements: cold, loaded and control, in this order.
        outputs_equal: whether cold and loaded prompts had the same answers.
        problem: None if all is well.
        good: the verdict without a problem.
        figures: more for programs; names contain units. No prompts, keys or addresses.
    """

    info: AskedEngine
    measurements: tuple[Measurement, Measurement, Measurement]
    outputs_equal: bool
    problem: NoGain | None
    good: str
    figures: Mapping[str, object] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Control over loaded."""
        _, loaded, control = self.measurements
        return control.median_ms / loaded.median_ms

    def text(self) -> str:
        """Return four lines for people."""
        lines = [
            f"{each.name:<9}{each.median_ms:>9,.1f} ms  {each.asked}" for each in self.measurements
        ]
        if self.problem is None:
            verdict = f"ok: {self.good}; tokens equal"
        else:
            verdict = f"fail: {self.problem.text}  -> {self.problem.fix}"
        return "\n".join([*lines, f"{'verdict':<12}{verdict}"])

    def record(self) -> dict[str, Any]:
        """Return the result for programs."""
        names = ("cold", "loaded", "control")
        measured = {
            f"{name}_ms": round(each.median_ms, 3)
            for name, each in zip(names, self.measurements, strict=True)
        }
        return {
            "ok": self.problem is None,
            "engine": self.info.name.value,
            "engine_version": _plain_version(self.info.version),
            **measured,
            "ratio": round(self.ratio, 3),
            "tokens_equal": self.outputs_equal,
            "problem": self.problem.text if self.problem else "",
            "fix": self.problem.fix if self.problem else "",
            **self.figures,
        }

    def report(self, host: str) -> str:
        """Return what to send with an issue: versions, GPU, link and figures.

        Args:
            host: of the engine. The GPU of this machine is named only if the engine is on it.
        """
        machine = {
            "kvconnect": engine_versions.installed("kvconnect") or "a checkout",
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "gpus": gpus() if host in _LOCAL else "unknown: the engine is on another machine",
        }
        return json.dumps({"machine": machine, "result": self.record()}, indent=2) + "\n"


def gpus() -> list[dict[str, str]]:
    """Return name, driver and PCIe link of each NVIDIA GPU here; empty if none can be asked."""
    try:
        done = subprocess.run(
            [*_SMI, _SMI_QUERY], capture_output=True, text=True, timeout=_SMI_S, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    rows = [[part.strip() for part in row.split(",")] for row in done.stdout.splitlines()]
    return [
        {"name": row[0], "driver": row[1], "link": f"PCIe {row[2]} x{row[3]}"}
        for row in rows
        if len(row) == 4
    ]


def _plain_version(text: str) -> str:
    """Return a version that a server named; "" if it names something else."""
    return text if _VERSION.fullmatch(text) else ""
