"""The caches of an engine in lines for a terminal, from what a router's admin API answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvconnect.terminal import plain


def lines_of_engine(engine: Mapping[str, Any]) -> Iterator[str]:
    state = "draining" if engine["draining"] else "up" if engine["up"] else "down"
    names = (engine["role"], engine["url"], engine["engine"], state, ", ".join(engine["models"]))
    yield plain("  ".join(names))
    rows = {
        "error": engine.get("error"),
        "host": _host(engine.get("host", {})),
        **{name: _tier(tier) for name, tier in engine.get("tiers", {}).items()},
        "prompts": _prompts(engine),
        **{f"hints {name}": _counts(row) for name, row in engine.get("hints", {}).items()},
        "peers": _peers(engine.get("peers", {})),
    }
    for name, text in rows.items():
        if text:
            yield plain(f"    {name:<14}  {text}")


def lines_of_prompt(engine: Mapping[str, Any]) -> Iterator[str]:
    rank = "" if engine["rank"] is None else f"  rank {engine['rank']}"
    if "error" in engine:
        said = engine["error"]
    else:
        said = f"{engine['tokens']} of {engine['prompt_tokens']} tokens"
        said = ": ".join(filter(None, (said, _counts(engine["tiers"]))))
    yield plain(f"{engine['role']}  {engine['url']}{rank}  {said}")


def _host(host: Mapping[str, float]) -> str:
    parts = (
        _of(host, "blocks", lambda blocks: f"{blocks:.0f}", " blocks"),
        _of(host, "bytes", _mib, " MiB"),
        *(
            f"{host[f'blocks_{k}']:.0f} {k}"
            for k in ("pinned", "retained")
            if f"blocks_{k}" in host
        ),
    )
    return ", ".join(filter(None, parts))


def _tier(tier: Mapping[str, Any]) -> str:
    used = _of(tier, "bytes", _mib, " MiB")
    return ", ".join(filter(None, (used, "available" if tier["available"] else "not available")))


def _prompts(engine: Mapping[str, Any]) -> str:
    tokens = _counts(engine.get("prompt_tokens", {}))
    return f"tokens {tokens}; {engine['hit_share']:.1%} not computed" if tokens else ""


def _peers(peers: Mapping[str, float]) -> str:
    sizes = (
        f"{k} {_mib(peers[f'bytes_{k}'])} MiB" for k in ("read", "served") if f"bytes_{k}" in peers
    )
    refused = f"{peers['blocks_refused']:.0f} blocks refused" if "blocks_refused" in peers else ""
    return ", ".join(filter(None, (*sizes, refused)))


def _counts(row: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in row.items() if value)


def _of(row: Mapping[str, Any], name: str, show: Callable[[float], str], unit: str) -> str:
    used, capacity = row.get(f"{name}_used"), row.get(f"{name}_capacity")
    if used is None:
        return ""
    return f"{show(used)}{'' if capacity is None else f' of {show(capacity)}'}{unit}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f}"
