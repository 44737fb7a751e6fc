"""Kinds of KV cache, what KVConnect does with each on each engine, and which models have which.

This table is the one place for both: engines refuse by it before they load weights, and ``kvconnect
doctor --model`` reads it where no engine is installed. What it does not list is told from the
model's ``config.json``. An engine's own KV cache has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

Engine = Literal["vllm", "sglang"]

ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
FEATURES = ("offload", "hand-off", "sharing")
RUN_WITHOUT = "run it without KVConnect"


@dataclass(frozen=True)
class Support:
    """What works with one kind of cache on one engine.

    Attributes:
        refused: by feature (of ``FEATURES``), why it does not work.
        shared_with: who reads the blocks that this engine puts into a shared store.
        fix: the way out of a refusal.
    """

    refused: Mapping[str, str]
    shared_with: str = ""
    fix: str = RUN_WITHOUT


@dataclass(frozen=True)
class CacheKind:
    """One kind of KV cache: ``text`` for people, and the support by engine."""

    text: str
    vllm: Support
    sglang: Support

    def on(self, engine: Engine) -> Support:
        """Return the support on one engine."""
        return self.vllm if engine == "vllm" else self.sglang


def _works(shared_with: str) -> Support:
    return Support({}, shared_with)


def _refused(why: str, fix: str = RUN_WITHOUT) -> Support:
    return Support(dict.fromkeys(FEATURES, why), fix=fix)


_ANY = "vLLM and SGLang of any tensor parallelism"
_ANY_VLLM = "vLLM of any tensor parallelism"
_SAME_VLLM = "vLLM with the same ranks"
_SGLANG = "SGLang with the same ranks"
_UNTRIED = _refused("never tried on this engine")
_NO_LINKER = dict.fromkeys(("offload", "sharing"), "SGLang's linker keeps no such cache")
_RING = "keys that are not compressed yet are kept in a ring per request, not in token blocks"

KINDS: Mapping[str, CacheKind] = {
    "full": CacheKind("full attention", _works(_ANY), _works(_ANY)),
    "window": CacheKind("sliding-window attention", _works(_ANY_VLLM), _works(_SGLANG)),
    "chunk": CacheKind("chunked attention", _works(_ANY_VLLM), _works(_SGLANG)),
    "latent": CacheKind("latent attention (MLA)", _works(_ANY_VLLM), _works(_SGLANG)),
    "indexer": CacheKind("a sparse index", _works(_ANY_VLLM), _works(_SGLANG)),
    "compressed": CacheKind("compressed attention", _works(_SAME_VLLM), _works(_SGLANG)),
    "block sparse": CacheKind(
        "a sparse index beside heads",
        _works(_SAME_VLLM),
        Support(_NO_LINKER, fix="hand it off only"),
    ),
    "state": CacheKind("states (Mamba, linear attention)", _works(_SAME_VLLM), _works(_SGLANG)),
    "ring": CacheKind(
        "a ring of keys", _refused(_RING), Support(_NO_LINKER, fix="hand it off only")
    ),
    "generated window": CacheKind(
        "a window of generated tokens",
        _refused("KV of generated tokens depends on where the prompt ended"),
        _UNTRIED,
    ),
    "prefix": CacheKind(
        "attention to later tokens of the prompt",
        _refused("non-causal attention, whose KV no other prompt can use"),
        _UNTRIED,
    ),
    "diffusion": CacheKind(
        "tokens that change until a block of them is final",
        _refused("KV of tokens that may still change cannot be kept"),
        _UNTRIED,
    ),
    "cross": CacheKind(
        "cross attention (encoder and decoder)",
        _refused("vLLM runs no KV connector with encoder-decoder models"),
        _UNTRIED,
    ),
    "none": CacheKind(
        "no KV cache",
        Support(dict.fromkeys(FEATURES, "nothing to keep; the engine starts, KVConnect is idle")),
        Support(dict.fromkeys(FEATURES, "nothing to keep")),
    ),
}
"""By name of the kind."""

IDLE = frozenset({"none"})
"""Kinds with which an engine starts although nothing works: its connector is idle."""

_LISTED = msgspec.json.decode(
    Path(__file__).with_name("architectures.json").read_bytes(), type=dict[str, list[str]]
)

ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    name: tuple(kinds.split(", ")) for kinds, names in _LISTED.items() for name in names
}
"""Kinds of cache by architecture, as ``config.json`` names it; from ``architectures.json``, which
lists architectures by their kinds."""


def names_of(config: Mapping[str, Any]) -> list[str]:
    """Return the architectures that a model's configuration names."""
    found = config.get("architectures")
    return [str(name) for name in found] if isinstance(found, list) else []


def kinds_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of cache that a model has, by its architecture or else by its fields.

    ``config``: of ``config.json``.
    """
    for name in names_of(config):
        if name in ARCHITECTURES:
            return _with_window(ARCHITECTURES[name], config)
    return _by_fields(config)


def refusal(engine: Engine, kinds: Iterable[str], feature: str) -> tuple[str, str] | None:
    """Return why a feature is refused for a model with these kinds of cache, and the way out; None
    if it is not."""
    for name in kinds:
        support = KINDS[name].on(engine)
        if feature in support.refused:
            return f"{KINDS[name].text}: {support.refused[feature]}", support.fix
    return None


def shared_with(engine: Engine, kinds: Iterable[str]) -> str:
    """Return who reads what an engine stores of a model with these kinds: the fewest of any."""
    order = (_ANY, _ANY_VLLM, _SAME_VLLM, _SGLANG)
    found = {KINDS[name].on(engine).shared_with for name in kinds}
    return max(found & set(order), key=order.index, default="")


_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_STATE_FIELDS = {
    *("mamba_d_state", "ssm_state_size", "mamba_d_conv", "linear_attn_config", "conv_L_cache"),
    *("linear_num_value_heads", "hybrid_override_pattern", "state_size", "attn_layer_period"),
}


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    for name in _TEXT_PARTS:
        if isinstance(config.get(name), Mapping):
            return text_part(config[name])
    return config


def _layer_kinds(text: Mapping[str, Any]) -> set[str]:
    found = text.get("layer_types")
    return {str(kind) for kind in found} if isinstance(found, list) else set()


def _has_window(text: Mapping[str, Any]) -> bool:
    layers = _layer_kinds(text)
    if layers:
        return any("sliding" in kind for kind in layers)
    return bool(text.get("sliding_window")) and text.get("use_sliding_window", True) is not False


def _with_window(kinds: tuple[str, ...], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds with the window that a model's configuration asks for, or without."""
    if not {*kinds} <= {"full", "window"}:
        return kinds
    if not _has_window(text_part(config)):
        return ("full",)
    return ("full", "window") if "full" in kinds else kinds


def _by_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    text = text_part(config)
    layers = _layer_kinds(text)
    plain = {kind for kind in layers if "attention" in kind and "linear" not in kind}
    found = {
        "latent": bool(text.get("kv_lora_rank")),
        "compressed": bool(text.get("compress_ratios")),
        "indexer": bool(text.get("index_topk")),
        "window": _has_window(text),
        "chunk": any("chunk" in kind for kind in layers),
        "state": bool(_STATE_FIELDS & text.keys() or layers - plain),
        "diffusion": text.get("canvas_length") is not None,
        "cross": bool(config.get("is_encoder_decoder")),
    }
    kinds = tuple(name for name, present in found.items() if present)
    whole = not layers or any("full" in kind or kind == "attention" for kind in layers)
    only_windows = found["window"] and not layers
    if not found["latent"] and not found["compressed"] and whole and not only_windows:
        return ("full", *kinds)
    return kinds
