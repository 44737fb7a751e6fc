"""Every architecture of vLLM's CPU engine through KVConnect, against the same engine without it.

    python -m benchmarks.models [--only TEXT]... [--jobs N] [--again]

What was found is kept in ``build/models.json``, from which an interrupted run goes on; `--again`
starts over. Without `--only`, ``benchmarks/results/models.json`` and ``docs/models.md`` are
written. The last line is the figures as JSON, see :mod:`benchmarks.models.page`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import machine, origin, progress
from benchmarks.models import drafts, engine
from benchmarks.models.dense import DENSE, THROUGH_TRANSFORMERS
from benchmarks.models.experts import MIXTURES
from benchmarks.models.hybrids import HYBRIDS
from benchmarks.models.latent import LATENT
from benchmarks.models.page import PAGE, RESULTS, figures, page, with_bytes
from benchmarks.models.proof import prove, rehearsal
from benchmarks.models.windows import WINDOWS

ARCHITECTURES = (*LATENT, *WINDOWS, *MIXTURES, *DENSE, *HYBRIDS, *THROUGH_TRANSFORMERS)
ALL: tuple[Any, ...] = (
    *ARCHITECTURES,
    *drafts.drafted({model.name: model for model in ARCHITECTURES}),
)
KEPT = Path(__file__).resolve().parents[2] / "build" / "models.json"


class Found:
    """What was found so far, by architecture; kept in a file. Thread-safe."""

    def __init__(self, again: bool) -> None:
        self._lock = threading.Lock()
        kept = KEPT.exists() and not again
        self.all: dict[str, Any] = json.loads(KEPT.read_text()) if kept else {}

    def add(self, name: str, one: dict[str, Any]) -> None:
        with self._lock:
            self.all[name] = one
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(self.all))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="part of a name; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="architectures at a time")
    parser.add_argument("--again", action="store_true", help="forget what an earlier run found")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds per architecture")
    parser.add_argument("--budget", type=float, default=3600.0, help="start none after so many s")
    options = parser.parse_args()

    names = [text.lower() for text in options.only]
    chosen = [m for m in ALL if not names or any(text in m.key.lower() for text in names)]
    found = Found(options.again and not names)
    ends = time.monotonic() + options.budget

    def one(model: Any) -> None:
        if time.monotonic() > ends:
            return
        how = drafts.prove if isinstance(model, drafts.Drafting) else prove
        result = how(model, options.timeout)
        found.add(model.key, result)
        said = "; ".join(result.get("problems", [])) or result.get("error", "")
        progress(f"{model.key}: {result['verdict']}, {result['seconds']:.0f} s  {said}")

    todo = [m for m in chosen if options.again or m.key not in found.all]
    if todo:
        with tempfile.TemporaryDirectory() as folder:
            engine.preload(rehearsal(Path(folder)))
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, todo))
    results = {m.key: found.all[m.key] for m in ALL if m.key in found.all}
    left = len(ALL) - len(results)
    results = with_bytes(results)
    counts = figures(results)
    if not names:
        record = {"benchmark": "models", **origin(), "machine": machine(), "figures": counts}
        record["architectures"] = results
        RESULTS.write_text(_compact(record) + "\n")
        PAGE.write_text(page(record))
    if left:
        progress(f"{left} models are left: run it again")
    print(json.dumps({"benchmark": "models", **counts}), flush=True)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    progress(f"{spent.ru_utime + spent.ru_stime:.0f} s of CPU")
    sys.stderr.flush()
    # Not by way of the interpreter's end, which a library uses to complain about another one.
    os._exit(bool(counts["wrong"] or counts["crashed"]))


def _compact(record: dict[str, Any]) -> str:
    """One line for each model; the rest as other results have it."""
    rows = record["architectures"].items()
    lines = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in rows)
    head = json.dumps({**record, "architectures": 0}, indent=1)
    return head.replace('"architectures": 0', f'"architectures": {{\n  {lines}\n }}')


if __name__ == "__main__":
    main()
