"""What a user gets by installing and importing the package."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, requires, version

import pytest

import kvconnect
from kvconnect import errors, versions

HEAVY = ["torch", "vllm", "sglang", "cupy", "nixl", "aiohttp", "prometheus_client", "xxhash"]
HEAVY += ["rich", "matplotlib", "jinja2"]


def loaded_after(code: str) -> set[str]:
    """The heavy packages in ``sys.modules`` after ``code`` ran in a fresh interpreter."""
    report = f"{code}\nimport sys; print(*(n for n in {HEAVY!r} if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import kvconnect",
        "import kvconnect; [getattr(kvconnect, name) for name in kvconnect.__all__]",
        "import kvconnect.config, kvconnect.memory, kvconnect.stats, kvconnect.versions",
        "import kvconnect.cli",
    ],
)
def test_importing_loads_no_engine(code: str) -> None:
    assert loaded_after(code) == set()


def test_the_probe_sees_a_loaded_package() -> None:
    assert loaded_after("import xxhash") == {"xxhash"}


def test_public_names_resolve_and_others_do_not() -> None:
    for name in kvconnect.__all__:
        assert getattr(kvconnect, name) is not None
    assert kvconnect.ConfigError is errors.ConfigError
    assert dir(kvconnect) == sorted(kvconnect.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ConfigErr'"):
        kvconnect.ConfigErr  # type: ignore[attr-defined]  # noqa: B018


def test_version_is_that_of_the_installed_package() -> None:
    assert kvconnect.__version__ == version("kvconnect")


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert found["kvconnect"] == "kvconnect.engines.vllm:register"


def test_supported_range_is_the_one_that_pip_is_told() -> None:
    (first, last) = versions.SUPPORTED_VLLM
    said = next(line for line in requires("kvconnect") or [] if line.startswith("vllm"))
    assert f">={first[0]}.{first[1]}" in said
    assert f"<{last[0]}.{last[1] + 1}" in said


@pytest.mark.parametrize(
    ("text", "supported"),
    [
        ("0.32.0", True),
        ("0.33.2", True),
        ("0.32.0+cpu", True),
        ("0.33.0rc1", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_which_engines_are_supported(text: str, supported: bool) -> None:
    assert versions.vllm_is_supported(text) is supported
