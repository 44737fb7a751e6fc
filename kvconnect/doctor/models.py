"""Says what works with a model: offload, hand-off and sharing, on each engine.

Reads the model's ``config.json`` and the table of :mod:`kvconnect.cache.architectures`. No engine
is imported; of an installed one, the version and the text of its model registry are read.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvconnect.cache.architectures import (
    ARCHITECTURES,
    ENGINES,
    FEATURES,
    KINDS,
    Engine,
    kinds_of,
    names_of,
    refusal,
    shared_with,
    text_part,
)
from kvconnect.doctor import Finding, FindingsReport, Status, engines

_MOST_BYTES = 16 << 20
"""Size of a ``config.json`` that is not read any more."""

_GOOD = "KVConnect can serve this model"
_BAD = "not everything works with this model: see the fail lines"
_REGISTRIES: Mapping[Engine, str] = {
    "vllm": "model_executor/models/registry.py",
    "sglang": "srt/models/*.py",
}
"""Sources of each engine that name the architectures it has code for."""


def examine(folder: str) -> FindingsReport:
    """Return what works with the model in a local folder. Reads files only."""
    try:
        config = _config(Path(folder))
    except (OSError, ValueError, RecursionError) as error:
        fix = "give the folder that has the model's config.json"
        return FindingsReport((Finding("model", "fail", f"{folder}: {error}", fix),), _GOOD, _BAD)
    kinds = kinds_of(config)
    names = names_of(config)
    findings = [_model(names, kinds)]
    known = {engine: engines.version_of(engine) for engine in ENGINES}
    for engine in [e for e in ENGINES if known[e]] or ENGINES:
        findings.append(_engine(engine, known[engine], names))
        findings += [_feature(engine, feature, kinds, config) for feature in FEATURES]
    measured = {"architectures": names, "kinds": list(kinds)}
    return FindingsReport(tuple(findings), _GOOD, _BAD, measured)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"config.json has more than {_MOST_BYTES >> 20} MiB")
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("config.json is not a JSON object")
    return found


def _model(names: Sequence[str], kinds: Sequence[str]) -> Finding:
    value = f"{', '.join(names) or 'no architecture'}: {', '.join(KINDS[k].text for k in kinds)}"
    if any(name in ARCHITECTURES for name in names):
        return Finding("model", "ok", value)
    fix = "not in the table, judged by the fields of config.json: try it, the engine decides"
    return Finding("model", "warn", value, fix)


def _engine(engine: Engine, version: str, names: Sequence[str]) -> Finding:
    """Return whether the installed version is supported and knows the architecture."""
    if not version:
        value = f"not installed; the lines below are about {engines.supported(engine)}"
        return Finding(engine, "ok", value)
    found = engines.check_version(engine, version)
    if found.status == "ok" and names and not _names_any(engine, names):
        fix = "use a version of the engine that lists it, or its Transformers backend"
        return Finding(engine, "warn", f"{found.value}, which has no code of its own for it", fix)
    return found


def _names_any(engine: Engine, names: Sequence[str]) -> bool:
    """Return whether an installed engine's sources name one of the architectures; True if they
    cannot be read."""
    spec = importlib.util.find_spec(engine)  # does not import a package at the top level
    places = (spec and spec.submodule_search_locations) or ()
    files = [path for place in places for path in Path(place).glob(_REGISTRIES[engine])]
    try:
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    except OSError:
        return True
    return not texts or any(name in text for name in names for text in texts)


def _feature(
    engine: Engine, feature: str, kinds: Sequence[str], config: Mapping[str, Any]
) -> Finding:
    name = f"{engine} {feature}"
    found = refusal(engine, kinds, feature)
    if found:
        status: Status = "warn" if "none" in kinds else "fail"
        return Finding(name, status, found[0], found[1])
    if feature != "sharing":
        return Finding(name, "ok", "works")
    own = _apart(config)
    if own:
        kinds = (*kinds, "latent")  # shared as widely as this: not between vLLM and SGLang
    with_whom = f"with {shared_with(engine, kinds)}"
    return Finding(name, "ok", f"{with_whom}, because of {own}" if own else with_whom)


def _apart(config: Mapping[str, Any]) -> str:
    """Return what keeps vLLM and SGLang from sharing blocks of a model; empty if nothing does."""
    text = text_part(config)
    if config.get("quantization_config") or text.get("quantization_config"):
        return "quantised weights"
    scaling = json.dumps([text.get("rope_scaling"), text.get("rope_parameters")])
    return "LongRoPE" if "longrope" in scaling else ""
