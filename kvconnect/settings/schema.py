"""JSON Schema of the settings, for editors and for checks without KVConnect.

``python -m scripts.reference`` writes the file beside this module.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec

from kvconnect.settings.fields import Settings
from kvconnect.settings.sharing import PeerSettings
from kvconnect.settings.stores import REMOTE_KINDS, DiskSettings, OtherSettings

FILE = Path(__file__).with_name("schema.json")
"""The schema as a file, which the wheel has too."""


def descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the text of each field that the docstring of ``struct`` documents."""
    section = inspect.cleandoc(struct.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section, re.M | re.S)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in found}


def make_schema() -> dict[str, Any]:
    """Return the schema of an object of settings, as users write it."""
    (root,), parts = msgspec.json.schema_components([Settings], ref_template="#/$defs/{name}")
    assert root == {"$ref": "#/$defs/Settings"}
    structs: list[type[msgspec.Struct]] = [Settings, PeerSettings, DiskSettings]
    for struct in (*structs, *REMOTE_KINDS.values()):
        part = parts[struct.__name__]
        part["description"] = inspect.cleandoc(struct.__doc__ or "").partition("\n")[0]
        part["additionalProperties"] = False
        for name, text in descriptions(struct).items():
            part["properties"][name]["description"] = text.replace("``", "`")
    for name in ("disk", "remote", "cache_peers"):
        _allow_none(parts["Settings"]["properties"][name])
    # A store of another package has names of its own.
    parts[OtherSettings.__name__] = {
        "title": OtherSettings.__name__,
        "description": "A store of another package, which checks its settings itself.",
        "type": "object",
        "properties": {"kind": {"type": "string", "not": {"enum": [*REMOTE_KINDS, "disk"]}}},
        "required": ["kind"],
    }
    _mend(parts)
    whole = parts.pop("Settings")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **whole,
        "title": "Settings of KVConnect",
        "$defs": parts,
    }


def text() -> str:
    """Return the file's text."""
    return msgspec.json.format(msgspec.json.encode(make_schema()), indent=2).decode() + "\n"


def _mend(schema: Any) -> None:
    """Say what msgspec does not know: sizes may be texts, and a discriminator is OpenAPI's."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer" and "pattern" in schema:
            schema["type"] = ["integer", "string"]
        schema.pop("discriminator", None)
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list):
            _mend(part)


def _allow_none(schema: dict[str, Any]) -> None:
    """Allow ``{}`` too, which is as good as nothing."""
    schema["anyOf"].append({"type": "object", "maxProperties": 0})
