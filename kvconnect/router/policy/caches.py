"""What targets have cached of a prompt, from the best source there is for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvconnect.router.body import UNIT, Pieces
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.choice import Hits, RoutingChoice, TargetChoice
from kvconnect.router.policy.loads import Role, Target
from kvconnect.router.policy.prefixes import CacheTier, Hit, PrefixIndex, Stored
from kvconnect.router.policy.ranking import RankingPolicy


class Caches:
    """The views of the roles whose policy looks at caches. On the event loop."""

    def __init__(self, options: RouterOptions) -> None:
        policies = {Role.PREFILL: options.prefill_policy, Role.DECODE: options.decode_policy}
        roles = [role for role, policy in policies.items() if policy is RankingPolicy.CACHE_AWARE]
        self.indexes = {role: PrefixIndex() for role in roles}
        self._histories = {role: History() for role in roles}

    def hits(self, pieces: Pieces | None, *, base: bool) -> Hits:
        """Return what is known of a prompt: of token ids what engines' events tell, of the rest
        what was sent where. ``base``: its model is no adapter.

        Engines' events name blocks by their tokens alone, so of a prompt with a salt, or of an
        adapter, they tell nothing.
        """
        if pieces is None:
            return {}
        ids = pieces.ids if base and pieces.plain else []
        found: dict[Role, dict[Target, Hit]] = {}
        for role, index in self.indexes.items():
            told = index.targets() if ids else frozenset()
            guessed = self._histories[role].match(pieces.units)
            found[role] = {target: hit for target, hit in guessed.items() if target not in told}
            found[role] |= index.match(ids)
        return found

    def sent(self, choice: RoutingChoice, pieces: Pieces | None) -> None:
        """A prompt goes to the engines of ``choice``."""
        if pieces is None:
            return
        for role, history in self._histories.items():
            place = choice.prefill if role is Role.PREFILL else choice.decode
            if isinstance(place, TargetChoice):
                history.sent(place.target, pieces.units)

    def forget(self, role: Role, worker: int, ranks: int) -> None:
        """An engine was lost: what it had been sent is no longer there."""
        if role in self._histories:
            for rank in (None, *range(ranks)):
                self._histories[role].forget(Target(worker, rank))


# Where prompts were sent before, for those whose cached blocks no engine tells of: prompts that
# are text, and engines without KV events. A guess, unlike the index. Pure.
#
# A prompt is cut into units of about ``UNIT`` tokens; what a target was sent, it is taken to have,
# until so much was sent since that it is forgotten.


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
        self._index.stored(target, Stored(hashes, None, units, 1, CacheTier.DEVICE))
        for name in reversed(hashes):  # the end of a prompt is forgotten first
            self._sent[target, name] = None
            self._sent.move_to_end((target, name))
        for old, name in list(islice(self._sent, max(0, len(self._sent) - self._most))):
            del self._sent[old, name]
            self._index.removed(old, [name], CacheTier.DEVICE)

    def forget(self, target: Target) -> None:
        """``target`` is another incarnation, or gone."""
        self._index.cleared(target)
