"""Tables of the documentation that are made from the code and from benchmark results.

``python -m scripts.reference`` writes them into the pages, between the lines
``<!-- generated: NAME -->`` and ``<!-- end -->``, and draws the plot of the README.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from benchmarks import settings as benchmark_settings
from kvconnect.config import (
    Config,
    DisaggregationConfig,
    NetworkConfig,
    OffloadConfig,
    TierConfig,
)
from kvconnect.tiers.backends.disk.folder import DiskOptions
from kvconnect.tiers.backends.mooncake import MooncakeOptions
from kvconnect.tiers.backends.object import ObjectOptions
from kvconnect.tiers.backends.valkey import ValkeyOptions
from kvconnect.tiers.peers.peer_options import PeerOptions
from scripts import differences, headlines, measured

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)

# Settings ---------------------------------------------------------------------------------------

_SIZES = {"host_bytes", "min_rate", "store_rate", "sync_load_bytes"}
_SIZES |= {"serve_rate", "capacity", "daily_write_bytes", "min_free", "buffer"}
_KINDS = {str: "text", int: "number", float: "number", bool: "`true`, `false`", tuple: "list",
          dict: "object"}  # fmt: skip


def settings(*structs: type[Any]) -> str:
    """Return a table of all fields of some structs, from their docstrings."""
    rows = ["| setting | value | default | meaning |", "|---|---|---|---|"]
    for struct in structs:
        hints = get_type_hints(struct)
        fields = {field.name: field for field in msgspec.structs.fields(struct)}
        for name, text in _attributes(struct):
            rows.append(
                f"| `{name}` | {_value(name, hints[name])} | {_default(fields[name])} | {text} |"
            )
    return "\n".join(rows)


def _attributes(struct: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the fields that a class documents."""
    section = inspect.cleandoc(struct.__doc__ or "").partition("Attributes:\n")[2]
    for name, text in re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section, re.M | re.S):
        plain = re.sub(r"\s+", " ", text).strip().replace("``", "`").replace("|", "\\|")
        yield name, plain[0].upper() + plain[1:]


def _value(name: str, hint: Any) -> str:
    if name in _SIZES:
        return "size"
    if get_origin(hint) is Literal:
        return ", ".join(f'`"{choice}"`' for choice in get_args(hint))
    return _KINDS[get_origin(hint) or hint]


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if field.name in ("host_bytes", "sync_load_bytes"):
        value = "auto"
    elif field.name in _SIZES and value:
        value = f"{value >> 30}GiB" if value >= 1 << 30 else f"{value >> 20}MiB"
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"`{json.dumps(value)}`"


# Sizing -----------------------------------------------------------------------------------------


class Model(NamedTuple):
    """What decides how much KV a token takes. ``latent``: numbers per token and layer of latent
    attention, instead of heads."""

    name: str
    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0


MODELS = (
    Model("Llama 3.1 8B", 32, 8, 128),
    Model("Qwen3 8B", 36, 8, 128),
    Model("Qwen3 30B-A3B", 48, 4, 128),
    Model("Qwen3 32B", 64, 8, 128),
    Model("Llama 3.3 70B", 80, 8, 128),
    Model("DeepSeek V3, R1", 61, latent=576),
)
_ITEM = 2  # bytes of bfloat16 and float16
_CONTEXT = 8192  # tokens
_LINKS = (10, 25, 100, 400)  # Gbit/s


def token_bytes(model: Model) -> int:
    """Return the bytes of KV of one token, all layers and ranks together."""
    row = model.latent or 2 * model.kv_heads * model.head_dim  # keys and values
    return model.layers * row * _ITEM


def sizing() -> str:
    """Return how much host memory what takes."""
    many = "tokens in 64 GiB | conversations of that length"
    rows = [f"| model | a token | {_CONTEXT:,} tokens | {many} |", "|---|---|---|---|---|"]
    for model in MODELS:
        one = token_bytes(model)
        whole = one * _CONTEXT
        rows.append(
            f"| {model.name} | {one / 2**10:.0f} KiB | {whole / 2**30:.2f} GiB "
            f"| {2**36 // one:,} | {2**36 // whole} |"
        )
    return "\n".join(rows)


def links() -> str:
    """Return how long a hand-off is on the wire."""
    head = " | ".join(f"{rate} Gbit/s" for rate in _LINKS)
    rows = [f"| {_CONTEXT:,} tokens of | {head} |", "|---" * (len(_LINKS) + 1) + "|"]
    for model in MODELS:
        bits = token_bytes(model) * _CONTEXT * 8
        times = " | ".join(f"{bits / rate / 1e6:,.0f} ms" for rate in _LINKS)
        rows.append(f"| {model.name} | {times} |")
    return "\n".join(rows)


# Pages ------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    "settings-host": lambda: settings(OffloadConfig, Config, DisaggregationConfig),
    "settings-tiers": lambda: settings(TierConfig),
    "settings-network": lambda: settings(NetworkConfig),
    "settings-disk": lambda: settings(DiskOptions),
    "settings-peers": lambda: settings(PeerOptions),
    "settings-valkey": lambda: settings(ValkeyOptions),
    "settings-object": lambda: settings(ObjectOptions),
    "settings-mooncake": lambda: settings(MooncakeOptions),
    "sizing": sizing,
    "links": links,
    "headlines": headlines.table,
    "choosing": measured.choosing,
    "serving": measured.serving,
    "routing": measured.routing,
    "judged": measured.judged,
    "handed-off": measured.handed_off,
    "push-pays": measured.push_pays,
    "benchmark-settings": benchmark_settings.table,
    "differences": differences.table,
}


def pages() -> list[Path]:
    """Return the pages that may have such tables."""
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.glob("*.md"))]


def filled(text: str) -> str:
    """Return a page with its tables made anew; raise :class:`KeyError` for an unknown one."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def main() -> None:
    """Write the plot, and all pages that changed."""
    headlines.PLOT.write_text(headlines.plot(), encoding="utf-8")
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
