"""Why nothing is gained, as the engine's own metrics tell it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvconnect.tiers.cost_model import LoadReason
from kvconnect.trial.counters import Change, named
from kvconnect.trial.engine_api import EngineName
from kvconnect.trial.results import NoGain
from kvconnect.types import Tier, TransferType

GAIN = 1.1
"""Control over loaded: what is less is no gain."""
_MOST = 0.5  # share of the prompts' tokens that must have come from KVConnect
_TURN_ON = {
    EngineName.VLLM: (
        'start it with --kv-transfer-config \'{"kv_connector": "KVConnect", "kv_role": "kv_both"}\''
    ),
    EngineName.SGLANG: (
        "start it with the linker and --enable-metrics, as docs/quickstart-sglang.md says"
    ),
}
DIFFERENT = NoGain(
    "the tokens differ: the same prompts had other answers after they were loaded",
    "try once more on an idle engine, since batches of other sizes can change an engine's own "
    "tokens; if it stays, send the file of --report with an issue",
)


@dataclass(frozen=True)
class OffloadEvidence:
    """What is known of prompts that were evicted and asked again.

    Attributes:
        engine: which one was asked.
        prompt_tokens: of all those prompts together.
        device_tokens: tokens of them that the device still had.
        outputs_equal: whether their answers were the same as before.
        ratio: control over loaded.
        stored: what changed while they were computed.
        loaded: what changed while they were asked again.
        evicted_by: how they were evicted.
    """

    engine: EngineName
    prompt_tokens: int
    device_tokens: float
    outputs_equal: bool
    ratio: float
    stored: Change
    loaded: Change
    evicted_by: str

    @property
    def hits(self) -> Mapping[str, float]:
        """Tokens that KVConnect had, by tier."""
        return self.loaded.by("hit_tokens_total", "tier")


def problem_of_offload(found: OffloadEvidence) -> NoGain | None:
    """Return why offloading gains nothing; None if it gains."""
    if not found.outputs_equal:
        return DIFFERENT
    after = found.loaded.after
    if after.missing:
        if found.ratio >= GAIN and found.device_tokens < found.prompt_tokens * _MOST:
            return None
        metrics = "--enable-metrics" if found.engine is EngineName.SGLANG else "/metrics"
        return NoGain(
            "nothing is gained, and its metrics cannot be read, so the reason is unknown",
            f"make {metrics} reachable and try again",
        )
    if not after.of_kvconnect:
        return NoGain(
            "the engine runs without KVConnect: its metrics have none of KVConnect's",
            _TURN_ON[found.engine],
        )
    if sum(found.hits.values()) < found.prompt_tokens * _MOST:
        return _missed(found)
    if found.ratio < GAIN:
        return NoGain(
            "prompts were loaded, and loading took as long as computing",
            "try longer prompts (--tokens) on an idle engine; kvconnect doctor copy measures "
            "the copies",
        )
    return None


def _missed(found: OffloadEvidence) -> NoGain:
    """Return why KVConnect did not have the prompts."""
    after = found.loaded.after
    if found.device_tokens >= found.prompt_tokens * _MOST:
        return NoGain(
            f"the prompts were still on the device after {found.evicted_by}",
            "start vLLM with VLLM_SERVER_DEV_MODE=1, so that its cache can be emptied"
            if found.engine is EngineName.VLLM
            else "give it fewer --max-total-tokens for the trial",
        )
    tiers = after.by("tier_available", "tier")
    if not after.total("host_bytes_capacity") and not sum(tiers.values()):
        return NoGain("the host tier is off, and there is no other", "set host_bytes to a size")
    return _not_stored(found) or _not_loaded(found) or _too_small(found)


def _not_stored(found: OffloadEvidence) -> NoGain | None:
    stored = found.stored.total("transfer_bytes_total", transfer_type=TransferType.GPU_TO_CPU.value)
    skipped = found.stored.by("skipped_store_blocks_total", "reason")
    if stored:
        return None
    if skipped:
        return NoGain(
            f"blocks were not stored: {named(skipped)}",
            "raise host_bytes for no_space; try again on an idle engine for busy",
        )
    block = found.stored.after.block_tokens
    return NoGain(
        "nothing was stored: a prompt is shorter than a block, or its blocks are not kept"
        + (f" (a block has {block} tokens)" if block else ""),
        "ask for longer prompts (--tokens); turn the engine's prefix caching on",
    )


def _not_loaded(found: OffloadEvidence) -> NoGain | None:
    failed = found.loaded.by("failed_blocks_total", "cause")
    if failed:
        return NoGain(f"loads failed: {named(failed)}", "see the engine's log and docs/failures.md")
    decisions = found.loaded.by("tier_decisions_total", "reason")
    if decisions.get(LoadReason.RECOMPUTE.value):
        return NoGain(
            "the cost model computes: it expects loads from that tier to take longer",
            "try longer prompts, or measure the tier with kvconnect doctor disk",
        )
    if decisions:
        return NoGain(
            f"a tier was not used for all of the prompts: {named(decisions)}",
            "try again: the first loads measure a tier",
        )
    if not found.loaded.total("lookups_total"):
        return NoGain(
            "the engine did not look up the prompts in KVConnect",
            "turn its prefix caching on",
        )
    return None


def _too_small(found: OffloadEvidence) -> NoGain:
    evicted = found.loaded.after.total("evicted_blocks_total", tier=Tier.HOST.value)
    evicted -= found.stored.before.total("evicted_blocks_total", tier=Tier.HOST.value)
    if evicted:
        return NoGain(
            "host memory had evicted the prompts too: it holds less than the device's cache",
            "raise host_bytes above the size of the device's KV cache",
        )
    hits = named(found.hits) or "none"
    return NoGain(
        f"of {found.prompt_tokens} tokens, these were found by tier: {hits}",
        "try again on an idle engine; if it stays, send the file of --report with an issue",
    )
