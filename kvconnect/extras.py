"""The optional packages, by extra of ``pyproject.toml``, and which of them are missing here."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "nixl": ("numpy",),  # and the build of NIXL that fits torch, see transport/nixl/agent.py
    "router": ("aiohttp", "httptools", "prometheus_client", "yaml", "zmq", "uvloop"),
    "kubernetes": ("kubernetes",),
    "etcd": ("etcd3gw",),
    "grpc": ("grpc", "google.protobuf"),
    "top": ("prometheus_client", "rich"),
    "report": ("jinja2", "matplotlib"),
    "trace": ("opentelemetry",),
}
"""Extra -> modules that it installs, and that must be there."""


def missing(extras: Collection[str]) -> list[str]:
    """Return those of some extras that are not whole. Imports packages of modules at most."""
    return [extra for extra in extras if _lacks(extra)]


def what_to_install(extras: Collection[str]) -> str:
    """Return, in one line, all that some extras lack and the command for it; empty if nothing."""
    lacking = dict.fromkeys(module for extra in extras for module in _lacks(extra))
    if not lacking:
        return ""
    verb = "are" if len(lacking) > 1 else "is"
    return f"{', '.join(lacking)} {verb} missing: {command(missing(extras))}"


def command(extras: Collection[str]) -> str:
    """Return the command that installs extras."""
    return f"pip install 'kvconnect[{','.join(extras)}]'"


def _lacks(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package that it is a part of
        return False
