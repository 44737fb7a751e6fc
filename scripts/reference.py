"""Tables of the documentation that are made from the code and from benchmark results.

``python -m scripts.reference`` writes them into the pages, between the lines
``<!-- generated: NAME -->`` and ``<!-- end -->``, and draws the plot of the README.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from benchmarks import settings as benchmark_settings
from kvconnect.settings import Settings, schema
from kvconnect.settings.sharing import PeerSettings
from kvconnect.settings.stores import DiskSettings, MooncakeSettings, ObjectSettings, ValkeySettings
from kvconnect.settings.validation import is_size, types_of
from scripts import aims, differences, headlines, knobs, measured

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)

# Settings ---------------------------------------------------------------------------------------

_KINDS = {str: "text", int: "number", float: "number", bool: "`true`, `false`", tuple: "list"}
_PARTS = {"host": "config_file", "tiers": "disk", "network": "listen"}
"""Part of the page -> the first of its settings."""


def part(name: str) -> str:
    """Return the table of one part of an engine's settings."""
    names, firsts = Settings.__struct_fields__, list(_PARTS.values())
    here = firsts.index(_PARTS[name])
    after = firsts[here + 1] if here + 1 < len(firsts) else None
    return settings(Settings, names[names.index(firsts[here]) : after and names.index(after)])


def settings(struct: type[Any], names: Sequence[str] = ()) -> str:
    """Return a table of the fields of a struct, or of those in ``names``, from its docstring."""
    rows = ["| setting | value | default | meaning |", "|---|---|---|---|"]
    texts, hints = schema.descriptions(struct), types_of(struct)
    for field in msgspec.structs.fields(struct):
        if not names or field.name in names:
            text = texts[field.name].replace("``", "`").replace("|", "\\|")
            value, default = _value(hints[field.name]), _default(field, hints[field.name])
            rows.append(f"| `{field.name}` | {value} | {default} | {text[0].upper()}{text[1:]} |")
    return "\n".join(rows)


def _value(hint: Any) -> str:
    if is_size(hint):
        return "size"
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return ", ".join(f'`"{choice}"`' for choice in get_args(hint))
    return _KINDS.get(get_origin(hint) or hint, "object")


def _default(field: msgspec.structs.FieldInfo, hint: Any) -> str:
    if field.required:
        return ""
    value = field.default
    if isinstance(value, int) and is_size(hint) and value:
        value = f"{value >> 30}GiB" if value >= 1 << 30 else f"{value >> 20}MiB"
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"`{json.dumps({} if value is None else value)}`"


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
_RANKS = 8  # of a tensor-parallel engine
_LINKS = (10, 25, 100, 400)  # Gbit/s


def token_bytes(model: Model) -> int:
    """Return the bytes of KV of one token, all layers together, once."""
    row = model.latent or 2 * model.kv_heads * model.head_dim  # keys and values
    return model.layers * row * _ITEM


def copies(model: Model, ranks: int) -> int:
    """Return how often tensor-parallel ranks together have the KV of a token."""
    return ranks if model.latent else max(1, ranks // model.kv_heads)


def sizing() -> str:
    """Return how much host memory what takes."""
    many = f"tokens in 64 GiB | conversations of that length | on {_RANKS} ranks of SGLang"
    rows = [f"| model | a token | {_CONTEXT:,} tokens | {many} |", "|---|---|---|---|---|---|"]
    for model in MODELS:
        one = token_bytes(model)
        whole = one * _CONTEXT
        rows.append(
            f"| {model.name} | {one / 2**10:.0f} KiB | {whole / 2**30:.2f} GiB "
            f"| {2**36 // one:,} | {2**36 // whole} | {2**36 // (one * copies(model, _RANKS)):,} |"
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
    **{f"settings-{name}": partial(part, name) for name in _PARTS},
    "settings-disk": lambda: settings(DiskSettings),
    "settings-peers": lambda: settings(PeerSettings),
    "settings-valkey": lambda: settings(ValkeySettings),
    "settings-object": lambda: settings(ObjectSettings),
    "settings-mooncake": lambda: settings(MooncakeSettings),
    "knobs": knobs.table,
    "sizing": sizing,
    "links": links,
    "headlines": headlines.table,
    "aims": aims.table,
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
    """Write the plot, the schema of the settings, and all pages that changed."""
    schema.FILE.write_text(schema.text(), encoding="utf-8")
    headlines.PLOT.write_text(headlines.plot(), encoding="utf-8")
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
