"""The JSON Schema accepts what the check accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvconnect.errors import ConfigError
from kvconnect.settings import Settings, check_settings, schema
from kvconnect.settings.stores import REMOTE_KINDS
from kvconnect.settings.summary import plain

jsonschema = pytest.importorskip("jsonschema")


def test_the_file_is_up_to_date() -> None:
    """If not: ``python -m scripts.reference``."""
    assert schema.FILE.read_text(encoding="utf-8") == schema.text()


def accepted(given: dict[str, Any]) -> bool:
    validator = jsonschema.Draft202012Validator(schema.make_schema())
    return bool(validator.is_valid(given))


DISK = {"path": "/nvme", "capacity": "1TiB"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        plain(Settings()),
        {"host_bytes": "4 GiB", "sync_load_bytes": 0, "store_rate": "1.5GB"},
        {"host_bytes": "off", "digest": "full", "mix_weights": True},
        {"disk": DISK, "remote": {"kind": "valkey", "address": "a:1"}, "cache_peers": {}},
        {"disk": {}, "remote": {"kind": "object", "url": "s3://b", "connections": 4}},
        {"remote": {"kind": "memory", "capacity": 5}, "peers": ["10.0.0.0/8"]},
        {"cache_peers": {"ask": ["10.0.0.1:7900"], "same_machine": "network"}},
    ],
)
def test_good_settings_fit(given: dict[str, Any]) -> None:
    check_settings(given)
    assert accepted(given)


@pytest.mark.parametrize(
    "given",
    [
        {"host_byte": 1},
        {"host_bytes": 0},
        {"host_bytes": "much"},
        {"lease_s": 0},
        {"lease_s": "30"},
        {"digest": "on"},
        {"disk": {"paht": "/x", "capacity": "1TiB"}},
        {"disk": {"path": "/x"}},
        {"remote": {"address": "a:1"}},
        {"remote": {"kind": "valkey"}},
        {"remote": {"kind": "disk"}},
        {"remote": {"kind": "object", "url": "s3://b", "prefix": "../x"}},
        {"connections": 17},
        {"peers": "10.0.0.0/8"},
    ],
)
def test_bad_settings_do_not(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        check_settings(given)
    assert not accepted(given)


def test_a_store_of_another_package_fits() -> None:
    assert accepted({"remote": {"kind": "theirs", "any": [1]}})


def test_every_setting_is_described() -> None:
    found = schema.make_schema()
    objects = [found, *found["$defs"].values()]
    assert len(objects) == len(REMOTE_KINDS) + 4  # with DiskSettings, PeerSettings, OtherSettings
    for each in objects:
        for name, field in each["properties"].items():
            assert name == "kind" or field.get("description"), name
    assert "kv_transfer" not in json.dumps(found)
