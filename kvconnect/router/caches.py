"""What targets have cached of a prompt, from the best source there is for it."""

from __future__ import annotations

from kvconnect.router.body import Pieces
from kvconnect.router.history import History
from kvconnect.router.options import Options
from kvconnect.router.pick import Policy
from kvconnect.router.policy import Choice, Hits, Place
from kvconnect.router.prefixes import Hit, PrefixIndex
from kvconnect.router.view import Role, Target


class Caches:
    """The views of the roles whose policy looks at caches. On the event loop."""

    def __init__(self, options: Options) -> None:
        policies = {Role.PREFILL: options.prefill_policy, Role.DECODE: options.decode_policy}
        roles = [role for role, policy in policies.items() if policy is Policy.CACHE_AWARE]
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

    def sent(self, choice: Choice, pieces: Pieces | None) -> None:
        """A prompt goes to the engines of ``choice``."""
        if pieces is None:
            return
        for role, history in self._histories.items():
            place = choice.prefill if role is Role.PREFILL else choice.decode
            if isinstance(place, Place):
                history.sent(place.target, pieces.units)

    def forget(self, role: Role, worker: int, ranks: int) -> None:
        """An engine was lost: what it had been sent is no longer there."""
        if role in self._histories:
            for rank in (None, *range(ranks)):
                self._histories[role].forget(Target(worker, rank))
