"""Every unusable setting is one error that names the field, the value and the fix."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.settings import Settings, check_settings, validation
from kvconnect.settings.sharing import PeerSettings
from kvconnect.settings.stores import (
    ENTRY_POINTS,
    REMOTE_KINDS,
    DiskSettings,
    OtherSettings,
    ValkeySettings,
)
from kvconnect.settings.summary import plain


def test_defaults() -> None:
    assert check_settings({}) == Settings()


def test_everything_can_be_set() -> None:
    given = {
        "host_bytes": "2GiB",
        "policy": "s3fifo",
        "digest": "full",
        "deadline_s": 5,
        "sync_load_bytes": "8 MiB",
        "store_rate": "20GB",
        "kv_layout": "blocks_first",
        "disk": {"path": "/nvme", "capacity": "1TiB", "ttl_s": 60},
        "remote": {"kind": "valkey", "address": "a:1,b:2", "cluster": True},
        "cache_peers": {"ask": ["10.1.2.4:7900-7901"], "serve_rate": "1GB"},
        "spill": "reused",
        "load_when": "always",
        "wait_s": 2,
        "peers": ["10.0.0.0/8"],
    }
    assert check_settings(given) == Settings(
        host_bytes=2 << 30,
        policy="s3fifo",
        digest="full",
        deadline_s=5.0,
        sync_load_bytes=8 << 20,
        store_rate=20 * 10**9,
        kv_layout="blocks_first",
        disk=DiskSettings(path="/nvme", capacity=1 << 40, ttl_s=60.0),
        remote=ValkeySettings(address="a:1,b:2", cluster=True),
        cache_peers=PeerSettings(ask=("10.1.2.4:7900-7901",), serve_rate=10**9),
        spill="reused",
        load_when="always",
        wait_s=2.0,
        peers=("10.0.0.0/8",),
    )
    assert given["host_bytes"] == "2GiB"  # what was passed in stays as it is


def test_what_is_left_empty_is_not_there() -> None:
    for nothing in ({}, None):
        found = check_settings({"disk": nothing, "remote": nothing, "cache_peers": nothing})
        assert found == Settings() and not found.has_tiers


def test_words_and_nothing_are_sizes_too() -> None:
    assert check_settings({"host_bytes": "auto", "sync_load_bytes": "auto"}) == Settings()
    assert check_settings({"host_bytes": "off"}).host_bytes == "off"
    assert check_settings({"sync_load_bytes": 0}).sync_load_bytes == 0


DISK = {"path": "/nvme", "capacity": "1TiB"}


@pytest.mark.parametrize(
    ("given", "field", "fix"),
    [
        ({"disk": DISK, "host_bytes": "off"}, "disk", "blocks come and go through host memory"),
        ({"tls_dir": "/etc/tls"}, "key_file", "set it beside tls_dir"),
        ({"cache_peers": {"ask_s": 1}}, "cache_peers.ask", "set ask, serve or both"),
        ({"remote": {"kind": "valkey", "address": "a:1,b:2"}}, "remote.address", "cluster"),
        (
            {"remote": {"kind": "valkey", "address": "a:1", "tls_name": "b"}},
            "remote.tls_name",
            "no TLS now",
        ),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, Any], field: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix) as caught:
        check_settings(given)
    assert (caught.value.field, caught.value.others) == (field, ())


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"disk": {"paht": "/nvme/kv", "capacity": "1TiB"}},
            "kvconnect: disk.paht='/nvme/kv' is not usable: unknown setting, did you mean "
            "'disk.path'?; disk.path=None is not usable: it is missing: set it",
        ),
        (
            {"capacity": "1TiB"},
            "kvconnect: capacity='1TiB' is not usable: unknown setting, did you mean "
            "'disk.capacity'?",
        ),
        (
            {"remote": {"kind": "valky", "address": "a:1"}},
            "kvconnect: remote.kind='valky' is not usable: did you mean 'valkey'? Known: valkey, "
            "object, mooncake, memory, null",
        ),
        (
            {"remote": {"kind": "null", "size": 1}},
            "kvconnect: remote.size=1 is not usable: unknown setting: remove it",
        ),
        (
            {"disk": {"path": "/nvme", "capacity": "1 MiB"}},
            "kvconnect: disk.capacity='1 MiB' is not usable: use \"16MiB\" or more, at most 2**60 "
            "bytes",
        ),
        (
            {"cache_peers": {"ask": ["10.0.0.1:7900", "10.0.0.2"]}},
            "kvconnect: cache_peers.ask='10.0.0.2' is not usable: use an IP address and a port "
            "such as 10.1.2.3:7900 ('' does not appear to be an IPv4 or IPv6 address)",
        ),
        (
            {"lease_s": "30", "polcy": 1, "remote": {"kind": "object"}},
            "kvconnect: lease_s='30' is not usable: use seconds, more than 0 and at most 86400, "
            "as a number, not text; polcy=1 is not usable: unknown setting, did you mean "
            "'policy'?; remote.url=None is not usable: it is missing: set it",
        ),
    ],
)
def test_one_line_names_all_that_is_wrong(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(given)
    assert str(caught.value) == line


def test_a_retired_setting_is_warned_about_and_has_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = check_settings({"disk": {**DISK, "policy": "s3fifo"}})
    assert found == check_settings({"disk": DISK})
    (record,) = caplog.records
    assert "disk.policy has no effect any more" in record.getMessage()
    with pytest.raises(ConfigError, match=r"cache_peers\.policy"):  # it is so there only
        check_settings({"cache_peers": {"listen": "10.0.0.1:1", "policy": "lru"}})


def test_a_store_of_another_package_has_settings_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("theirs", "somewhere:Store", ENTRY_POINTS)
    monkeypatch.setattr(validation, "entry_points", lambda group: [entry])
    found = check_settings({"remote": {"kind": "theirs", "any": [1]}})
    assert found.remote == OtherSettings(name="theirs", options={"any": [1]})
    with pytest.raises(ConfigError, match="did you mean 'theirs'"):
        check_settings({"remote": {"kind": "their"}})


def test_a_parsed_config_does_not_change() -> None:
    with pytest.raises(AttributeError):
        check_settings({}).policy = "s3fifo"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("host_bytes", 0, 'use a size, "auto" or "off"'),
        ("host_bytes", "0 GiB", 'use a size, "auto" or "off"'),
        ("host_bytes", "0.1B", 'use a size, "auto" or "off"'),
        ("host_bytes", -1, "use a size of 0 bytes or more"),
        ("store_rate", -1, "use a size of 0 bytes or more"),
        ("kv_layout", "BLHNC", "use one of"),
        ("store_rate", "fast", "write a size such as"),
        ("host_bytes", "-1GiB", "write a size such as"),
        ("host_bytes", "", "write a size such as"),
        ("host_bytes", "much", "write a size such as"),
        ("host_bytes", "4 4GiB", "write a size such as"),
        ("host_bytes", "1e9", "write a size such as"),
        ("host_bytes", "Auto", "write a size such as"),
        ("host_bytes", 1.5e9, "write a size such as"),
        ("host_bytes", True, "write a size such as"),
        ("host_bytes", None, "write a size such as"),
        ("host_bytes", [], "write a size such as"),
        ("host_bytes", "4gb", "did you mean 'GB'?"),
        ("host_bytes", "4G", "did you mean 'GB'?"),
        ("host_bytes", "4gib", "did you mean 'GiB'?"),
        ("host_bytes", "4XYZ", "unknown unit 'XYZ', did you mean"),
        ("sync_load_bytes", -1, "use a size of 0 bytes or more"),
        ("sync_load_bytes", "aut", "write a size such as"),
        ("sync_load_bytes", False, "write a size such as"),
        ("policy", "LRU", "use one of lru, s3fifo"),
        ("policy", None, "use one of lru, s3fifo"),
        ("policy", ["lru"], "use one of lru, s3fifo"),
        ("digest", "on", "use one of off, sampled, full"),
        ("digest", True, "use one of off, sampled, full"),
        ("deadline_s", 0, "use seconds, more than 0"),
        ("deadline_s", -3.0, "use seconds, more than 0"),
        ("deadline_s", math.nan, "use seconds, more than 0"),
        ("deadline_s", math.inf, "at most 86400"),
        pytest.param("deadline_s", 10**400, "at most 86400", id="400 digits"),
        ("deadline_s", "30", "use seconds, more than 0 and at most 86400, as a number, not text"),
        ("pin_share", "0.5", "as a number, not text"),
        ("connections", "2", "as a number, not text"),
        ("max_peers", 0, "use 1 to 4096"),
        ("max_peers", "9", "as a number, not text"),
        ("deadline_s", True, "use seconds, more than 0"),
        ("deadline_s", None, "use seconds, more than 0"),
        ("wait_s", 0, "use seconds, more than 0"),
        ("spill", "some", "use one of all, reused"),
        ("load_when", True, "use one of faster, always"),
        ("disk", "/nvme", "use an object such as"),
        ("disk", {1: 2}, "use an object such as"),
        ("remote", ["valkey"], "use an object such as"),
        ("remote", {"address": "a:1"}, "name its kind"),
        ("remote", {"kind": 5}, "name its kind"),
        ("remote", {"kind": "disk"}, "a setting of its own"),
    ],
)
def test_an_unusable_value_is_named(field: str, value: Any, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings({field: value})
    error = caught.value
    assert error.field == field
    assert error.value is value or error.value == value
    assert fix in error.fix
    assert str(error) == f"kvconnect: {field}={value!r} is not usable: {error.fix}"
    assert isinstance(error, KVConnectError)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("host_byte", "host_bytes"),
        ("hostbytes", "host_bytes"),
        ("Policy", "policy"),
        ("deadline", "deadline_s"),
        ("sync_load", "sync_load_bytes"),
        ("cpu_bytes_to_use", "host_bytes"),
    ],
)
def test_an_unknown_setting_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {near!r}") as caught:
        check_settings({"policy": "lru", key: 7})
    assert (caught.value.field, caught.value.value) == (key, 7)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
STRUCTS: list[Any] = [Settings, DiskSettings, PeerSettings, *REMOTE_KINDS.values()]
NAMES = sorted({name for struct in STRUCTS for name in (*struct.__struct_fields__, "kind")})


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=10), values, max_size=4)


JSON = st.recursive(
    SCALARS | st.sampled_from(["auto", "off", "4GiB", "valkey", "10.0.0.1:80", "/nvme"]),
    lambda inner: st.lists(inner, max_size=3) | objects(inner),
    max_leaves=12,
)


def settles(given: dict[str, Any]) -> None:
    """Raise unless ``given`` ends in settings, or in one line that names what stands in it."""
    try:
        found = check_settings(given)
    except ConfigError as error:
        assert "\n" not in str(error)
        for fault in (error, *error.others):
            assert any(f"{fault.field}.".startswith(f"{name}.") for name in (*given, "key_file"))
    else:
        assert found == check_settings(plain(found))


@settings(max_examples=300)
@given(objects(JSON))
def test_whatever_comes_in_is_settings_or_one_error(given: dict[str, Any]) -> None:
    settles(given)


def test_the_control_a_check_that_fails_otherwise_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parse(field: str, value: Any) -> int:
        return int(value)  # raises what is no ConfigError for a list

    monkeypatch.setattr(validation, "parse_bytes", parse)
    with pytest.raises(TypeError):
        settles({"host_bytes": []})


@pytest.mark.parametrize("field", Settings.__struct_fields__)
def test_every_default_is_usable(field: str) -> None:
    """A file that names a default is as good as one without."""
    default = getattr(Settings(), field)
    assert check_settings({field: list(default) if default == () else default}) == Settings()


def test_deep_values_are_cut_short() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ConfigError, match=r"\.\.\."):
        check_settings({"policy": deep})


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"password": "hunter2"}, r"password='\*\*\*'"),
        ({"remote": {"address": "a:1", "password": "hunter2"}}, r"'password': '\*\*\*'"),
        (
            {"disk": {"path": "/p", "nested": {"api_key": "hunter2"}}, "host_bytes": "off"},
            r"\*\*\*",
        ),
        ({"secret_access_key": "hunter2"}, r"\*\*\*"),
        ({"adress": "redis://user:hunter2@cache:1"}, r"redis://user:\*\*\*@cache:1"),
    ],
)
def test_a_misplaced_secret_is_not_shown(extra: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError, match=shown) as caught:
        check_settings(extra)
    assert "hunter2" not in str(caught.value) + repr(caught.value.value)


@pytest.mark.parametrize("field", ["key_file", "password_file", "tls_dir", "listen", "store"])
def test_the_control_other_values_are_shown(field: str) -> None:
    assert "='/etc/x'" in str(ConfigError(field, "/etc/x", "fix"))
