"""Where prompts were sent before, for those whose cached blocks no engine tells of: prompts that
are text, and engines without KV events. A guess, unlike the index. Pure.

A prompt is cut into units of about ``UNIT`` tokens; what a target was sent, it is taken to have,
until so much was sent since that it is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvconnect.router.body import UNIT
from kvconnect.router.prefixes import Hit, PrefixIndex, Stored, Tier
from kvconnect.router.view import Target

_MOST = 500_000  # units remembered, of all targets: some 200 MB


class History:
    """Prefixes that were sent to targets. Not thread-safe."""

    def __init__(self, most: int = _MOST) -> None:
        self._index = PrefixIndex()
        self._sent: OrderedDict[tuple[Target, int], None] = OrderedDict()
        self._most = most

    def match(self, units: Sequence[int]) -> dict[Target, Hit]:
        """Return what each target was sent of a prompt's beginning, if anything."""
        found = self._index.match(units)
        return {target: Hit(hit.tokens * UNIT, hit.worth * UNIT) for target, hit in found.items()}

    def sent(self, target: Target, units: Sequence[int]) -> None:
        """A prompt goes to ``target``."""
        hashes: list[int] = []
        for unit in units:
            hashes.append(hash((hashes[-1] if hashes else 0, unit)))
        self._index.stored(target, Stored(hashes, None, units, 1, Tier.DEVICE))
        for name in reversed(hashes):  # the end of a prompt is forgotten first
            self._sent[target, name] = None
            self._sent.move_to_end((target, name))
        for old, name in list(islice(self._sent, max(0, len(self._sent) - self._most))):
            del self._sent[old, name]
            self._index.removed(old, [name], Tier.DEVICE)

    def forget(self, target: Target) -> None:
        """``target`` is another incarnation, or gone."""
        self._index.cleared(target)
