"""The engines that are installed here: their versions, and whether they load KVConnect.

No engine is imported.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from kvconnect import engine_versions
from kvconnect.cache.architectures import ENGINES, Engine
from kvconnect.doctor import Finding

_PLUGIN = "kvconnect"
_GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
_VARIABLES = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}
_NONE = (
    "pip install 'kvconnect[vllm]', or 'kvconnect[sglang]' into an environment of its own: the two "
    "engines need other versions of the same packages"
)


def version_of(engine: Engine) -> str:
    """Return the distribution and version of an installed engine; empty if there is none."""
    if engine == "vllm":
        return " ".join(engine_versions.installed_vllm() or ())
    found = engine_versions.installed("sglang")
    return f"sglang {found}" if found else ""


def supported(engine: Engine) -> str:
    """Return the supported versions of an engine."""
    return (
        engine_versions.supported_vllm_text() if engine == "vllm" else engine_versions.TESTED_SGLANG
    )


def check_version(engine: Engine, version: str) -> Finding:
    """Return whether the installed ``version``, as of :func:`version_of`, is supported."""
    value = f"{version} (supported: {supported(engine)})"
    number = version.rpartition(" ")[2]
    if engine == "vllm" and not engine_versions.vllm_is_supported(number):
        return Finding(engine, "fail", value, f"install a supported vLLM: {supported(engine)}")
    if engine == "sglang" and number != supported(engine):
        fix = f"not tested with it: install sglang=={supported(engine)}"
        return Finding(engine, "warn", value, fix)
    return Finding(engine, "ok", value)


def check_plugin(engine: Engine) -> Finding:
    """Return whether the engine finds KVConnect's entry point, and its variable allows it."""
    name, group, variable = f"{engine} plugin", _GROUPS[engine], _VARIABLES[engine]
    visible = {entry.name: entry.value for entry in entry_points(group=group)}
    if _PLUGIN not in visible:
        fix = "install kvconnect into the environment that runs the engine"
        return Finding(name, "fail", f"no entry point in {group}", fix)
    if not _is_allowed(engine, os.environ.get(variable)):
        fix = f"unset {variable}, or add {_PLUGIN} to its comma-separated list (no spaces)"
        return Finding(name, "fail", f"hidden by {variable}={os.environ[variable]!r}", fix)
    return Finding(name, "ok", visible[_PLUGIN])


def check_engines() -> list[Finding]:
    """Return the version and plugin of each installed engine; a failure if there is none."""
    there = [engine for engine in ENGINES if version_of(engine)]
    if not there:
        return [Finding("engine", "fail", "neither vLLM nor SGLang is installed", _NONE)]
    return [
        finding
        for engine in there
        for finding in (check_version(engine, version_of(engine)), check_plugin(engine))
    ]


def _is_allowed(engine: Engine, names: str | None) -> bool:
    """Return whether an engine whose variable is ``names`` loads the plugin."""
    if engine == "sglang":
        return not names or _PLUGIN in {name.strip() for name in names.split(",")}
    return names is None or _PLUGIN in names.split(",")
