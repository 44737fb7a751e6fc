"""Corpora of hostile input. `benchmarks/hostile.py` runs all of them and adds the outcomes up.

Each module has `async def run(limit: int | None = None) -> Outcome` (or a plain function): it plays
at most `limit` of its cases (all of them without a limit) against the real code. The tests play a
few of the same cases, so that a corpus cannot rot unseen.
"""

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What a corpus did. Every count but `cases` should be 0.

    crashes: a process, thread or task ended, or an exception left its connection.
    hangs: no answer before the deadline.
    smuggled: one party's bytes were taken for another's.
    wrong: any other answer than the contract promises; `notes` says which.
    figures: measured values for the report, by key.
    """

    cases: int = 0
    crashes: int = 0
    hangs: int = 0
    smuggled: int = 0
    wrong: int = 0
    notes: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
