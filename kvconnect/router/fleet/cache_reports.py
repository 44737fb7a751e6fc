"""Reader of what engines' ``/metrics`` say of their caches. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from kvconnect.observability.metrics.catalog import SGLANG, VLLM
from kvconnect.router.fleet.reports import samples
from kvconnect.types import PromptSource, Tier, TransferType

_GAUGES = {
    "host_blocks_used": "",
    "host_blocks_capacity": "",
    "host_bytes_used": "",
    "host_bytes_capacity": "",
    "host_blocks_kept": "hint",
    "tier_bytes_used": "tier",
    "tier_bytes_capacity": "tier",
    "tier_available": "tier",
}
_COUNTERS = {
    "prompt_tokens": "source",
    "cache_hints": "hint",
    "ignored_cache_hints": "reason",
    "cache_hint_blocks": "outcome",
    "transfer_bytes": "transfer_type",
    "peer_refused_blocks": "",
}
"""Metrics of the catalogue that are read -> the label to keep."""
_NAMES = {
    f"{prefix}kvconnect_{name}{end}": (name, label)
    for prefix in (VLLM, SGLANG)
    for end, names in (("", _GAUGES), ("_total", _COUNTERS))
    for name, label in names.items()
}
_NATIVE = {
    f"{SGLANG}prompt_tokens_total": ("native_prompt", ""),
    f"{SGLANG}cached_tokens_total": ("native_cached", "cache_source"),
}
"""SGLang's own counters: it has no request field that tells a connector of a prompt's sources."""

_Found = dict[str, dict[str, float]]
"""Metric -> value of its label -> sum over ranks."""


def cache_stats(text: str) -> dict[str, Any]:
    """Return what the caches of an engine hold and did since its start, summed over its ranks; a
    tier is available if it is on all of them. Figures that the engine does not publish are left
    out, and so are tiers that it does not have.
    """
    names = {**_NAMES, **_NATIVE}
    found: _Found = defaultdict(dict)
    for sample, labels, value in samples(text, tuple(names)):
        if value < 0:  # not a number
            continue
        name, label = names[sample]
        row, key = found[name], labels.get(label, "")
        known = row.get(key)
        if name == "tier_available":
            row[key] = min(value, 1.0 if known is None else known)
        else:
            row[key] = value + (known or 0)
    parts = {
        "host": _host(found),
        "tiers": _tiers(found),
        "prompt_tokens": _prompt_tokens(found),
        "hit_share": _hit_share(found),
        "hints": _hints(found),
        "peers": _peers(found),
    }
    return {name: part for name, part in parts.items() if part not in ({}, None)}


def _host(found: _Found) -> dict[str, float]:
    plain = ("blocks_used", "blocks_capacity", "bytes_used", "bytes_capacity")
    host = {name: found[f"host_{name}"].get("") for name in plain}
    kept = found["host_blocks_kept"]
    host |= {"blocks_pinned": kept.get("pin"), "blocks_retained": kept.get("retain")}
    return {name: value for name, value in host.items() if value is not None}


def _tiers(found: _Found) -> dict[str, dict[str, Any]]:
    """A tier that the engine does not have is published as all zeros."""
    tiers: dict[str, dict[str, Any]] = {}
    moved = found["transfer_bytes"]
    for tier in (Tier.DISK, Tier.PEER, Tier.REMOTE):
        used, capacity, available = (
            found[name].get(tier.value, 0)
            for name in ("tier_bytes_used", "tier_bytes_capacity", "tier_available")
        )
        known = {"bytes_used": used, "bytes_capacity": capacity} if capacity else {}
        if capacity or available or moved.get(f"{tier.name}_to_CPU"):
            tiers[tier.value] = {**known, "available": bool(available)}
    return tiers


def _prompt_tokens(found: _Found) -> dict[str, float]:
    """Return prompt tokens by source."""
    if found["prompt_tokens"]:
        return found["prompt_tokens"]
    prompt, cached = found["native_prompt"].get(""), found["native_cached"]
    if prompt is None:
        return {}
    return {**cached, PromptSource.COMPUTED.value: max(0.0, prompt - sum(cached.values()))}


def _hit_share(found: _Found) -> float | None:
    """Return the share of prompt tokens that were not computed."""
    tokens = _prompt_tokens(found)
    total = sum(tokens.values())
    return round(1 - tokens.get(PromptSource.COMPUTED.value, 0) / total, 4) if total else None


def _hints(found: _Found) -> dict[str, dict[str, float]]:
    rows = {
        "applied": found["cache_hints"],
        "ignored": found["ignored_cache_hints"],
        "blocks": found["cache_hint_blocks"],
    }
    return {name: row for name, row in rows.items() if row}


def _peers(found: _Found) -> dict[str, float]:
    moved = found["transfer_bytes"]
    peers = {
        "bytes_read": moved.get(TransferType.PEER_TO_CPU.value),
        "bytes_served": moved.get(TransferType.CPU_TO_PEER.value),
        "blocks_refused": found["peer_refused_blocks"].get(""),
    }
    return {name: value for name, value in peers.items() if value is not None}
