"""Servers on one machine that stand for machines of their own.

Two engines that want the same two cores slow each other down, as two machines never do: a decode
engine that polls for its KV takes the time from the prefill engine that computes it. So servers
that stand for different machines are measured twice: sharing all cores, and *apart*, where each
machine has cores that the others do not use. All processes of a server are moved, with all of their
threads; what they start later inherits it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

APART = "_apart"
"""How names of figures end that were measured so."""


def cores(machines: int, apart: bool) -> list[set[int]]:
    """Return the cores of each machine: its part of all there are, or all of them.

    Raises:
        SystemExit: there are fewer cores than machines.
    """
    there = sorted(os.sched_getaffinity(0))
    if not apart:
        return [set(there)] * machines
    each = len(there) // machines
    if not each:
        raise SystemExit(
            f"{machines} machines need {machines} cores to be apart, this process may use "
            f"{len(there)}"
        )
    return [set(there[number * each :][:each]) for number in range(machines)]


def move(pids: Iterable[int], allowed: set[int]) -> None:
    """Move processes to some cores. They must be stopped, or a thread that starts meanwhile may
    be missed."""
    for pid in pids:
        with suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), allowed)
