"""Optional packages: the table is that of the project file, and all that is missing is named."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvconnect import extras
from kvconnect.errors import ConfigError
from kvconnect.transport import ConnectionOptions, Security, make_transport

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
MODULES = {
    "prometheus-client": "prometheus_client",
    "grpcio": "grpc",
    "protobuf": "google.protobuf",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp": "opentelemetry",
}
"""Distribution -> its module, where that has another name."""


def test_the_table_is_that_of_the_project_file() -> None:
    declared = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    for extra, modules in extras.EXTRAS.items():
        names = {Requirement(text).name for text in declared[extra]}
        assert {MODULES.get(name, name) for name in names} - {"nixl"} == set(modules), extra


def test_all_that_is_missing_is_named_with_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.what_to_install(["top", "report", "router"]) == ""
    monkeypatch.setitem(sys.modules, "rich", None)
    assert extras.what_to_install(["top"]) == "rich is missing: pip install 'kvconnect[top]'"
    for name in ("prometheus_client", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert extras.what_to_install(["top", "etcd", "report"]) == (
        "prometheus_client, rich, jinja2 are missing: pip install 'kvconnect[top,report]'"
    )


def test_nixl_without_numpy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing but KVConnect is installed: the doctor goes on with TCP then."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ConfigError, match=r"numpy is missing: pip install 'kvconnect\[nixl\]'"):
        make_transport("nixl", Security(), ConnectionOptions())
