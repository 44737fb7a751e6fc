"""How soon a prompt's first token is expected: with a hand-off, and from decode alone. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvconnect.router.policy.prompt_times import LinearTime


class Disaggregate(StrEnum):
    """Whether prompts are handed off; values of the flag and of the header."""

    ALWAYS = "always"
    AUTO = "auto"  # where the first token is expected sooner
    NEVER = "never"


class HandoffReason(StrEnum):
    """Why a prompt is handed off, or computed by the decode engine alone."""

    RULE = "rule"  # --disaggregate
    ASKED = "asked"  # by the client
    SOONER = "sooner"  # the first token is expected sooner than the other way
    NO_DATA = "no_data"  # too little was measured: as with "always"
    NO_HANDOFF = "no_handoff"  # no pair of engines is left that can hand off
    ENGINE = "engine"  # SGLang's decode servers compute no prompts


class WaitingPrompt(NamedTuple):
    """A prompt before an engine that may compute it.

    Attributes:
        compute: the engine's time; None: unknown.
        waiting_tokens: of other prompts that it computes before.
        tokens: of the prompt itself that it has not cached.
    """

    compute: LinearTime | None
    waiting_tokens: float
    tokens: float

    def seconds(self, compute: LinearTime) -> float:
        """Return the seconds until the prompt is computed."""
        return compute.seconds(self.waiting_tokens + self.tokens)


class PromptHandoff(NamedTuple):
    """A prompt that may be handed off.

    Attributes:
        prefill: it, before the prefill engine.
        decode: the decode engine's time to compute prompts; None: unknown.
        decode_waiting_tokens: of prompts that the decode engine computes itself: the first token
            waits for them too.
        arrival: time from the end of prefill to the first token; None: unknown.
        moved_tokens: of the prompt that the decode engine has not cached.
    """

    prefill: WaitingPrompt
    decode: LinearTime | None
    decode_waiting_tokens: float
    arrival: LinearTime | None
    moved_tokens: float


class ExpectedTtft(NamedTuple):
    """Expected seconds until the first token. ``decode_free_s``: until the decode engine has
    computed the prompts that it has; a part of ``handoff_s``."""

    handoff_s: float
    alone_s: float
    decode_free_s: float

    @property
    def alone(self) -> bool:
        """Whether decode alone is expected to be sooner."""
        return self.alone_s < self.handoff_s


def expected_ttft(handoff: PromptHandoff, alone: WaitingPrompt) -> ExpectedTtft | None:
    """Return what is expected; None if too little is known.

    A decode engine that has not computed prompts lately is taken to be as fast as the prefill
    engine, so it is tried now and then.
    """
    prefill, arrival = handoff.prefill.compute, handoff.arrival
    if prefill is None or arrival is None:
        return None
    decode_free_s = (handoff.decode or prefill).token_s * handoff.decode_waiting_tokens
    computed_s = max(handoff.prefill.seconds(prefill), decode_free_s)
    return ExpectedTtft(
        computed_s + arrival.seconds(handoff.moved_tokens),
        alone.seconds(alone.compute or prefill),
        decode_free_s,
    )


class HandoffDecision(NamedTuple):
    """Whether a prompt is handed off, why, and what was expected where that was known."""

    handed_off: bool
    reason: HandoffReason
    expected: ExpectedTtft | None = None

    @property
    def decision(self) -> str:
        """What was decided, in a word."""
        return _HANDED_OFF if self.handed_off else _ALONE


_HANDED_OFF, _ALONE = "handed_off", "alone"

HANDOFF_DECISIONS: tuple[tuple[str, HandoffReason], ...] = (
    (_HANDED_OFF, HandoffReason.RULE),
    (_HANDED_OFF, HandoffReason.ASKED),
    (_HANDED_OFF, HandoffReason.SOONER),
    (_HANDED_OFF, HandoffReason.NO_DATA),
    (_HANDED_OFF, HandoffReason.ENGINE),
    (_ALONE, HandoffReason.RULE),
    (_ALONE, HandoffReason.ASKED),
    (_ALONE, HandoffReason.SOONER),
    (_ALONE, HandoffReason.NO_HANDOFF),
)
"""Every decision and reason that the router can report."""
