"""Settings for people: as they would be written, without secrets."""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnect import engine_versions
from kvconnect.errors import masked
from kvconnect.settings.fields import Settings
from kvconnect.settings.stores import OtherSettings


def plain(settings: Settings) -> dict[str, Any]:
    """Return all settings as users could write them."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    if isinstance(settings.remote, OtherSettings):
        found["remote"] = {"kind": settings.remote.name, **settings.remote.options}
    return found


def differences(settings: Settings) -> dict[str, Any]:
    """Return the settings that are not the defaults, with secrets masked."""
    default = plain(Settings())
    return {
        name: masked(name, value)
        for name, value in plain(settings).items()
        if value != default[name]
    }


def start_line(settings: Settings, engine: str) -> str:
    """Return the line to log when an engine starts. ``engine``: its name and version."""
    own = engine_versions.installed("kvconnect") or "(not installed)"
    found = differences(settings)
    text = msgspec.json.encode(found).decode() if found else "defaults"
    return f"kvconnect {own} on {engine}, settings: {text}"
