"""The runs see what is broken on purpose, and nothing otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvconnect.errors import KVConnectError
from tests.schedulers import controls
from tests.schedulers.checks import Fault, Leaked, Stuck, WrongTokens
from tests.schedulers.fleets import run_handoffs
from tests.schedulers.workload import run_alone

MOST_SEEDS = 40
"""Of which one must show it; most need a few."""

SMALL = {"kind": "full", "blocks": 24, "slots": 200}
DISK = {**SMALL, "slots": 20, "disk": True, "resets": False}
UNCHECKED = {"kind": "full", "settings": {"digest": "off"}}
CONTROLS: list[tuple[controls.Control, type[Fault], Callable[..., object], dict[str, Any]]] = [
    (controls.swapped_slots, WrongTokens, run_alone, SMALL),
    (controls.swapped_keys, WrongTokens, run_alone, DISK),
    (controls.reset_clears_nothing, WrongTokens, run_alone, SMALL),
    (controls.updates_unseen, WrongTokens, run_alone, {**DISK, "resets": True}),
    (controls.nothing_held, WrongTokens, run_alone, {**SMALL, "late": 8}),
    (controls.stored_early, WrongTokens, run_alone, SMALL),
    (controls.unshared_tier, WrongTokens, run_alone, {**SMALL, **UNCHECKED, "tp": 4, "drafts": 0}),
    (controls.salts_ignored, WrongTokens, run_alone, DISK),
    (
        controls.swapped_pages,
        WrongTokens,
        run_handoffs,
        {"kind": "full", "settings": {"digest": "off"}},
    ),
    (controls.requests_stay, Leaked, run_alone, SMALL),
    (controls.never_idle, Stuck, run_alone, SMALL),
]


@pytest.mark.parametrize(
    ("control", "fault", "run", "changes"), CONTROLS, ids=[c[0].__name__ for c in CONTROLS]
)
def test_what_is_broken_on_purpose_is_seen(
    control: controls.Control,
    fault: type[Fault],
    run: Callable[..., object],
    changes: dict[str, Any],
) -> None:
    seen: list[Exception | None] = []
    with control():
        for seed in range(MOST_SEEDS):
            found = fault_of(lambda seed=seed: run(seed, **changes))
            if isinstance(found, fault):
                return
            seen.append(found)
    pytest.fail(f"no run of {MOST_SEEDS} ended in {fault.__name__}, but in {seen}")


def fault_of(run: Callable[[], object]) -> Exception | None:
    """Return what a run raised. What is broken may also break the engine in other ways."""
    try:
        run()
    except (AssertionError, KVConnectError, LookupError, RuntimeError, ValueError) as error:
        return error
    return None
