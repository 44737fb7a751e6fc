"""Which engines serve a request, and how they hand over. Pure: the same view, the same choice."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from kvconnect.router.legs import Prompt
from kvconnect.router.options import Options
from kvconnect.router.view import Role, UpstreamView, View

Cause = Literal["unreachable", "error"]
"""Why a leg failed: no connection, or one that broke; or the engine answered with an error."""


class Mode(str, Enum):
    """How KV gets from prefill to decode."""

    PUSH = "push"  # both engines are asked at once
    PULL = "pull"  # decode is asked when prefill has answered
    PLAIN = "plain"  # decode does all of it


class Reason(str, Enum):
    """Why a mode was taken."""

    DEFAULT = "default"
    FORCED = "forced"  # --pull
    SHORT = "short"  # under --push-min-tokens
    NO_CARD = "no_card"  # the prefill engine has no standing offer (yet)
    MULTI = "multi"  # several prompts or answers: one transfer id names one prompt
    NO_TICKET = "no_ticket"  # the prefill engine offered nothing


MODES: tuple[tuple[Mode, Reason], ...] = (
    (Mode.PUSH, Reason.DEFAULT),
    (Mode.PULL, Reason.FORCED),
    (Mode.PULL, Reason.SHORT),
    (Mode.PULL, Reason.NO_CARD),
    (Mode.PLAIN, Reason.MULTI),
    (Mode.PLAIN, Reason.NO_TICKET),
)
"""All that happens."""


class Choice(NamedTuple):
    """Engines by index. ``prefill`` is None for a request with several prompts or answers;
    ``card`` is that of the prefill engine when pushing."""

    mode: Mode
    reason: Reason
    prefill: int | None
    decode: int
    card: str = ""


@dataclass
class Tried:
    """What one request's attempts have shown so far: engines not to try (again)."""

    prefill: set[int] = field(default_factory=set)
    decode: set[int] = field(default_factory=set)
    handoff_failed: bool = False

    def note(self, choice: Choice, role: Role, cause: Cause) -> bool:
        """An attempt failed; return whether another may fare better.

        A decode engine that answers with an error may have lost its hand-off, so once another
        prefill engine is tried. The same error without a hand-off, or again, is the answer.
        """
        if role is Role.DECODE and cause == "unreachable":
            self.decode.add(choice.decode)
            return True
        if choice.prefill is None:
            return False
        self.prefill.add(choice.prefill)
        again = role is Role.PREFILL or not self.handoff_failed
        self.handoff_failed = self.handoff_failed or role is Role.DECODE
        return again


def choose(view: View, turn: int, tried: Tried, prompt: Prompt, options: Options) -> Choice | None:
    """Return where the request goes; None if no engine is left of a role that it needs.

    ``turn`` counts requests, and attempts of one request.
    """
    decode = round_robin(view.decode, turn, tried.decode)
    if decode is None:
        return None
    if not prompt.single:
        return Choice(Mode.PLAIN, Reason.MULTI, None, decode.index)
    prefill = round_robin(view.prefill, turn, tried.prefill)
    if prefill is None:
        return None
    mode, reason = _handover(prefill, prompt, options)
    card = prefill.card if mode is Mode.PUSH else None
    return Choice(mode, reason, prefill.index, decode.index, card or "")


def round_robin(
    upstreams: Sequence[UpstreamView], turn: int, tried: Collection[int]
) -> UpstreamView | None:
    """Return the one whose turn it is among those that are up and not tried."""
    left = [upstream for upstream in upstreams if upstream.up and upstream.index not in tried]
    return left[turn % len(left)] if left else None


def _handover(prefill: UpstreamView, prompt: Prompt, options: Options) -> tuple[Mode, Reason]:
    if options.pull:
        return Mode.PULL, Reason.FORCED
    if prompt.tokens < options.push_min_tokens:
        return Mode.PULL, Reason.SHORT
    if prefill.card is None:
        return Mode.PULL, Reason.NO_CARD
    return Mode.PUSH, Reason.DEFAULT
