"""What benchmarks set of KVConnect that is not its default, and why.

A benchmark sets such a thing by :func:`chosen` alone, which asks for a reason in :data:`REASONS`.
Which tiers and peers there are is what a benchmark measures: there are none by default.
"""

from __future__ import annotations

from typing import Any

_SIZED = "the prompts of a run are to fit it, or not to fit it, on every machine"
_ROLE = "a prefill or decode engine that only hands off: a tier would answer for the other engine"
_LINK = "the addresses of the measured link"
_KEY = "engines in other network namespaces than loopback"
_COMPARED = "is what is compared"
_ALWAYS = "what a load costs is measured, not what the cost model chooses"
_PROOF = "a wrong byte is to be found, not timed"

REASONS: dict[str, dict[str, str]] = {
    "chaos": {
        "host_bytes": _ROLE,
        "transport": "faults of the link are put into TCP",
        "listen": "the ports whose packets are dropped",
        "key_file": "engines are started again, the key stays",
        "deadline_s": "cuts longer than it are to fit into the run",
        "lease_s": "cuts longer than it are to fit into the run",
        "digest": _PROOF,
    },
    "choosing": {"host_bytes": _SIZED},
    "continue_streams": {"host_bytes": _ROLE},
    "disaggregate": {"host_bytes": _SIZED},
    "handoff": {"host_bytes": _ROLE, "transport": _COMPARED, "listen": _LINK, "key_file": _KEY},
    "hybrids": {
        "host_bytes": _SIZED,
        "transport": "NIXL is measured by the hand-off's benchmark",
        "load_when": _ALWAYS,
    },
    "metrics": {"host_bytes": _SIZED},
    "models": {
        "host_bytes": _SIZED,
        "transport": "NIXL has tests of its own",
        "load_when": _PROOF,
        "digest": "`full` finds another prompt's pages, `off` shows that they change the tokens",
        "listen": "engines that hand nothing off",
    },
    "offload_engine": {
        "host_bytes": _SIZED,
        "sync_load_bytes": "one of two engines loads inside the step: " + _COMPARED,
    },
    "overhead": {"host_bytes": _SIZED},
    "serve": {"host_bytes": _SIZED},
    "sglang_handoff": {"transport": _COMPARED, "listen": _LINK, "peers": _LINK},
    "sglang_hooks": {"transport": "both halves are in one process"},
    "sharing": {
        "host_bytes": _SIZED,
        "load_when": f"{_ALWAYS}; `rule` has the default",
    },
    "tiers": {"host_bytes": _SIZED, "load_when": f"{_ALWAYS}; `rule` has the default"},
    "tiers_default": {"host_bytes": _SIZED},
    "transport": {"digest": _COMPARED},
}
"""Benchmark -> setting -> reason."""


def chosen(benchmark: str, **settings: Any) -> dict[str, Any]:
    """Return settings that a benchmark uses in place of the defaults.

    Raises:
        KeyError: there is no reason for one of them.
    """
    for name in settings:
        if name not in REASONS.get(benchmark, {}):
            raise KeyError(
                f"benchmarks.{benchmark} sets {name}: leave the default, or give a reason in "
                f"benchmarks/settings.py"
            )
    return settings


def table() -> str:
    """Return all of it as a Markdown table."""
    rows = ["| benchmark | setting | why |", "|---|---|---|"]
    for benchmark, reasons in REASONS.items():
        for setting, reason in reasons.items():
            rows.append(f"| `{benchmark}` | `{setting}` | {reason} |")
    return "\n".join(rows)
