"""What became of the blocks of prompts with hints: the names, and their only counter."""

from __future__ import annotations

from collections.abc import Mapping

from kvconnect.offload.retention import KeepOutcome
from kvconnect.protocol.cache_hints import CacheHint
from kvconnect.stats import OffloadingConnectorStats

RELEASED = {CacheHint.DEMOTE: "demoted", CacheHint.DROP: "dropped"}
MISSING, PENDING = "missing", "pending"
STAYED = "stayed"

CACHE_HINT_OUTCOMES = (
    *(outcome.value for outcome in KeepOutcome),
    *RELEASED.values(),
    MISSING,
    STAYED,
)
"""Values of the label ``outcome`` of ``cache_hint_blocks``."""


class HintOutcomes:
    """Counts the outcomes of one engine. Owned by the scheduler's thread."""

    def __init__(self, stats: OffloadingConnectorStats) -> None:
        self._stats = stats

    def count(self, outcomes: Mapping[str, int]) -> None:
        """Count blocks by outcome. Those that are pending are counted once it is known."""
        for outcome, blocks in outcomes.items():
            if outcome != PENDING:
                self._stats.count("cache_hint_blocks", blocks, label=outcome)
