"""Everything that clients, engines, peers, sources and folders may say wrongly: the whole of every
corpus in `tests/hostile`, against the real code.

    python -m benchmarks.hostile [--only NAME...]

`cases` were played; of `crashes`, `hangs`, `smuggled` and `wrong` there must be none, see
`tests/hostile/__init__.py`. `bomb_mib` is the memory that a router gained by ten requests of 60 kB
at a time that would grow, `bomb_health_gap_ms` the longest silence of its `/health` meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import logging
import pkgutil
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import emit, progress
from tests import hostile
from tests.hostile import Outcome

COUNTS = ("cases", "crashes", "hangs", "smuggled", "wrong")
_SHOWN = 10  # notes of a corpus


def corpora() -> dict[str, Callable[..., Any]]:
    """Return the `run` of every module that has one, by name."""
    modules = {
        found.name: importlib.import_module(f"{hostile.__name__}.{found.name}")
        for found in pkgutil.iter_modules(hostile.__path__)
    }
    return {name: module.run for name, module in modules.items() if hasattr(module, "run")}


def played(run: Callable[..., Any]) -> Outcome:
    """Play a corpus; one that ends with an error has crashed."""
    try:
        found = run()
        return asyncio.run(found) if inspect.iscoroutine(found) else found
    except Exception as error:  # noqa: BLE001  # whatever it is, the others are played
        return Outcome(crashes=1, notes=[f"the corpus itself: {error!r}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of corpora")
    only = parser.parse_args().only
    logging.disable(logging.CRITICAL)  # a corpus says by notes what went wrong
    figures: dict[str, float] = dict.fromkeys(COUNTS, 0)
    for name, run in corpora().items():
        if only and name not in only:
            continue
        began = time.monotonic()
        outcome = played(run)
        for count in COUNTS:
            figures[count] += getattr(outcome, count)
            figures[f"{name}_{count}"] = getattr(outcome, count)
        figures |= outcome.figures
        bad = {count: getattr(outcome, count) for count in COUNTS[1:] if getattr(outcome, count)}
        progress(f"{name}: {outcome.cases} cases in {time.monotonic() - began:.0f} s {bad or ''}")
        for note in outcome.notes[:_SHOWN]:
            progress(f"  {note}")
    emit("hostile", figures)


if __name__ == "__main__":
    main()
