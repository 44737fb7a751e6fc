"""What KV depends on besides weights and their names: configuration, quantisation and scales."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_model

from kvconnect.cache.model_identity import model_folder

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

# Written into the configuration by flags in which prefill and decode may differ: none changes KV.
_OF_FLAGS = ("context_len", "encoder_only", "language_only", "language_model_only")
_PRIVATE = re.compile(r"_|.*_version$")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of an object without one of its own
_QUANTISED = ("hf_quant_config.json", "quant_model_description.json")
_AGAIN = ("quark_mxfp4", "nvfp4_online")
"""Methods that quantise weights anew, whatever the checkpoint says of them."""


def architecture(config: ModelConfig) -> str:
    """Return a digest of a model's configuration with SGLang's overrides, without private fields,
    versions and what flags write."""
    fields = _plain(config.hf_config.to_dict())
    kept = {name: value for name, value in fields.items() if name not in _OF_FLAGS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def quantization(config: ModelConfig) -> str:
    """Return how SGLang quantises weights as it loads them; "" if it does not, or if the checkpoint
    says how they are: engines have several names for one checkpoint's method."""
    told = getattr(config.hf_config, "quantization_config", None)
    told = told or getattr(config.hf_config, "compression_config", None)
    method = str(config.quantization or "")
    anew = method in _AGAIN or (method == "modelopt_fp4" and _method(told) == "fp8")
    if not anew and (told or _has_quantised_files(config)):
        return ""
    return method or str(get_model().modelopt_quant or "")


def scales() -> str:
    """Return a digest of the file with the scales of an 8-bit cache; "" if none is given."""
    path = get_model().quantization_param_path
    return file_digest(Path(path)) if path else ""


def states(config: ModelConfig) -> str:
    """Return the types of recurrent layers' states, which have flags of their own; "" if the model
    has none. Their sizes do not tell float16 from bfloat16."""
    params = getattr(mambaish_config(config), "mamba2_cache_params", None)
    if params is None:
        return ""
    types = params.dtype.conv, params.dtype.temporal
    return "+".join(str(each).removeprefix("torch.") for each in types)


def file_digest(path: Path) -> str:
    """Return a digest of a file, "" if there is none."""
    if not path.is_file():
        return ""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, the same in all processes."""
    if isinstance(value, Mapping):
        named = {str(name): each for name, each in value.items()}
        return {name: _plain(each) for name, each in named.items() if not _PRIVATE.match(name)}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if value is None or isinstance(value, str | int | float):
        return value
    return _ADDRESS.sub("", str(value))


def _method(told: Any) -> str:
    found = told.get("quant_method") if isinstance(told, Mapping) else None
    return str(found or "")


def _has_quantised_files(config: ModelConfig) -> bool:
    folder = model_folder(str(config.model_path), config.revision)
    return folder is not None and any((folder / name).is_file() for name in _QUANTISED)
