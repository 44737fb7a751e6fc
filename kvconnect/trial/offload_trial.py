"""Asks new prompts, evicts them, asks them again, and beside them others that are new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from kvconnect.trial.counters import Change, Counters, settled
from kvconnect.trial.engine_api import (
    NEW_TOKENS,
    AskedEngine,
    EngineClient,
    EngineName,
    TrialReply,
)
from kvconnect.trial.eviction import evict
from kvconnect.trial.http_client import TrialFailed
from kvconnect.trial.plain_words import PromptMaker
from kvconnect.trial.results import Measurement, TrialResult
from kvconnect.trial.verdicts import OffloadEvidence, problem_of_offload
from kvconnect.types import TransferType

_SHORTEST = 64  # tokens of a prompt that can show anything
_MOST_COUNTED = 0.9  # of the tokens that were sent; a prompt's last block is computed
_ROOM = 0.9  # of the longest prompt, since words are not of one length


@dataclass(frozen=True)
class _Asked:
    """All that was asked, and what changed while new prompts were computed and then loaded."""

    cold: list[TrialReply]
    cached: list[TrialReply]
    loaded: list[TrialReply]
    control: list[TrialReply]
    stored: Change
    reloaded: Change
    evicted_by: str

    @property
    def rounds(self) -> int:
        return len(self.cold)

    @property
    def outputs_equal(self) -> bool:
        """Whether loaded prompts had the answers of those found on the device, or of new ones.

        In half precision these two may differ, since an engine computes them in other shapes.
        """
        return all(
            loaded.output in (cached.output, cold.output)
            for loaded, cached, cold in zip(self.loaded, self.cached, self.cold, strict=True)
        )


def prompt_size(
    ask: Callable[[str], TrialReply], info: AskedEngine, maker: PromptMaker, tokens: int
) -> int:
    """Calibrate ``maker`` and return the tokens of a trial's prompts: ``tokens``, or what fits.

    Raises:
        TrialFailed: the engine fails, or takes only shorter prompts.
    """
    counted = ask(maker.calibration()).prompt_tokens
    if not counted:
        raise TrialFailed("the engine does not say how many tokens a prompt has (usage)")
    maker.calibrate(counted)
    longest = longest_prompt(info)
    if min(tokens, longest) < _SHORTEST:
        raise TrialFailed(
            f"prompts of {min(tokens, longest)} tokens are too short to show anything: use an "
            f"engine with a larger max_model_len, and --tokens of at least {_SHORTEST}"
        )
    return min(tokens, longest)


def longest_prompt(info: AskedEngine) -> int:
    """Return the tokens of the longest prompt to send."""
    return int(((info.longest or 2**20) - NEW_TOKENS) * _ROOM)


def run(client: EngineClient, maker: PromptMaker, tokens: int, rounds: int) -> TrialResult:
    """Measure what one engine gains by offloading; takes ``rounds`` prompts of each kind.

    Raises:
        TrialFailed: the engine fails, is late, or answers what is no completion.
    """
    if client.info.half:
        raise TrialFailed(
            f"the server is the {client.info.half} half of a hand-off: name both, with --prefill "
            "and --decode"
        )
    engine, http = client.info.name, client.http
    size = prompt_size(client.ask, client.info, maker, tokens)
    fresh = settled(http, engine)
    prompts = [maker.new(size) for _ in range(rounds)]
    cold = [client.ask(prompt) for prompt in prompts]
    cached = [client.ask(prompt) for prompt in prompts]
    stored = settled(http, engine)
    evicted_by = evict(client, maker, stored, longest_prompt(client.info))

    before = settled(http, engine)
    loaded, control = [], []
    for prompt in prompts:
        loaded.append(client.ask(prompt))
        control.append(client.ask(maker.new(size)))
    sent = sum(reply.prompt_tokens for reply in loaded)

    def counted(now: Counters) -> bool:
        """Say whether all is counted: engines publish counts later than answers."""
        change = Change(before, now)
        hits = sum(change.by("hit_tokens_total", "tier").values())
        return change.total("lookups_total") >= 2 * rounds and hits >= sent * _MOST_COUNTED

    after = settled(http, engine, counted)
    stores, loads = Change(fresh, stored), Change(before, after)
    asked = _Asked(cold, cached, loaded, control, stores, loads, evicted_by)
    return _result(client.info, asked)


def _result(info: AskedEngine, asked: _Asked) -> TrialResult:
    cold, loaded, control = (
        [reply.first_s for reply in replies]
        for replies in (asked.cold, asked.loaded, asked.control)
    )
    device: float = sum(reply.device_tokens or 0 for reply in asked.loaded)
    if info.name is EngineName.VLLM:
        device = asked.reloaded.after.device_hits - asked.reloaded.before.device_hits
    evidence = OffloadEvidence(
        engine=info.name,
        prompt_tokens=sum(reply.prompt_tokens for reply in asked.cold),
        device_tokens=device,
        outputs_equal=asked.outputs_equal,
        ratio=median(control) / median(loaded),
        stored=asked.stored,
        loaded=asked.reloaded,
        evicted_by=asked.evicted_by,
    )
    rounds, each = asked.rounds, evidence.prompt_tokens // asked.rounds
    hits = {tier: round(n / rounds) for tier, n in evidence.hits.items()}
    origin = " and ".join(f"{n} tokens each from {tier}" for tier, n in hits.items()) or "no hit"
    return TrialResult(
        info,
        (
            Measurement("cold", cold, f"{rounds} new prompts of {each} tokens, median"),
            Measurement("loaded", loaded, f"the same, evicted by {asked.evicted_by}; {origin}"),
            Measurement("control", control, "other new prompts of that length"),
        ),
        asked.outputs_equal,
        problem_of_offload(evidence),
        f"loading is {evidence.ratio:.1f} times as fast as computing",
        {
            "what": "offload",
            "rounds": rounds,
            "prompt_tokens": each,
            "device_tokens": round(device / rounds),
            "hit_tokens": hits,
            "evicted_by": asked.evicted_by,
            "load_bytes_per_s": _rate(asked.reloaded),
        },
    )


def _rate(change: Change) -> int:
    """Return the bytes per second of loads; 0 if there was none."""
    up = TransferType.CPU_TO_GPU.value
    seconds = change.total("transfer_seconds_total", transfer_type=up)
    return round(change.total("transfer_bytes_total", transfer_type=up) / seconds) if seconds else 0
