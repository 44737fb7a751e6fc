"""Every unusable setting is one error that names the field, the value and the fix."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.config import (
    AUTO,
    SETTINGS,
    Config,
    OffloadConfig,
    check_fits,
    config_from_environment,
    parse_bytes,
    parse_config,
    share_of_host_bytes,
)
from kvconnect.errors import ConfigError, KVConnectError


def test_defaults() -> None:
    assert parse_config({}) == Config().replace(
        host_bytes=0, policy="lru", digest="sampled", deadline_s=30.0, sync_load_bytes=AUTO
    )


def test_everything_can_be_set() -> None:
    extra = {
        "host_bytes": "2GiB",
        "policy": "s3fifo",
        "digest": "full",
        "deadline_s": 5,
        "sync_load_bytes": "8 MiB",
        "store_rate": "20GB",
        "kv_layout": "blocks_first",
    }
    assert parse_config(extra) == Config().replace(
        host_bytes=2 << 30,
        policy="s3fifo",
        digest="full",
        deadline_s=5.0,
        sync_load_bytes=8 << 20,
        store_rate=20 * 10**9,
        kv_layout="blocks_first",
    )
    assert extra["host_bytes"] == "2GiB"  # what was passed in stays as it is
    assert parse_config({"host_bytes": "auto"}) == Config()
    assert parse_config({"sync_load_bytes": "auto"}) == Config()
    assert parse_config({"sync_load_bytes": 0}) == Config(offload=OffloadConfig(sync_load_bytes=0))


def test_tiers_below_host_memory() -> None:
    disk, remote = {"path": "/nvme", "capacity": "1TiB"}, {"kind": "valkey", "address": "a:1"}
    extra = {"disk": disk, "remote": remote, "spill": "reused", "load_when": "always", "wait_s": 2}
    assert parse_config(extra) == Config().replace(
        disk=disk, remote=remote, spill="reused", load_when="always", wait_s=2.0
    )
    with pytest.raises(ConfigError, match="blocks come and go through host memory"):
        parse_config({"disk": disk, "host_bytes": "off"})


def test_a_parsed_config_does_not_change() -> None:
    with pytest.raises(AttributeError):
        parse_config({}).offload.policy = "s3fifo"  # type: ignore[misc]


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
        parse_config({field: value})
    error = caught.value
    assert (error.field, error.fix) == (field, error.fix)
    assert error.value is value or error.value == value
    assert fix in error.fix
    assert str(error) == f"kvconnect: {field}={value!r} is not usable: {error.fix}"
    assert isinstance(error, (KVConnectError, ValueError))


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
        parse_config({"policy": "lru", key: 7})
    assert (caught.value.field, caught.value.value) == (key, 7)
    for known in SETTINGS:
        assert known in caught.value.fix


@given(
    st.dictionaries(
        st.sampled_from([*SETTINGS, "unknown", ""]) | st.integers(),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()),
        max_size=3,
    )
)
def test_whatever_comes_in_is_a_config_or_one_error(extra: dict[Any, Any]) -> None:
    try:
        config = parse_config(extra)
    except ConfigError as error:
        assert error.field in extra
    else:
        assert config.offload.host_bytes >= 0 and 0 < config.deadline_s < math.inf
        assert msgspec.convert(msgspec.to_builtins(config), Config) == config


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("8192", 8192),
        ("7B", 7),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("500 MB", 500 * 10**6),
        (" 4GiB ", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("0.5 TiB", 1 << 39),
        ("2TB", 2 * 10**12),
        ("9007199254740993", 9007199254740993),  # more digits than a float has
        pytest.param("9" * 400, 10**400 - 1, id="400 digits"),
    ],
)
def test_sizes(value: object, nbytes: int) -> None:
    assert parse_bytes("host_bytes", value) == nbytes


@given(st.integers(0, 2**60), st.sampled_from(["", "B", "KiB", "GB", "TiB"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert parse_bytes("f", f"{number}{unit}") == number * parse_bytes("f", f"1{unit}")


def test_the_size_error_names_the_field_it_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes("disk_bytes", "4 GIGA")
    assert (caught.value.field, caught.value.value) == ("disk_bytes", "4 GIGA")


def test_share_of_the_machine() -> None:
    auto, fixed = OffloadConfig(), OffloadConfig(host_bytes=1000)
    assert share_of_host_bytes(auto, memory_bytes=1 << 40, engines=1) == 1 << 38
    assert share_of_host_bytes(auto, memory_bytes=1 << 40, engines=4) == 1 << 36
    assert share_of_host_bytes(auto, memory_bytes=1 << 40, engines=0) == 1 << 38
    assert share_of_host_bytes(fixed, memory_bytes=None, engines=4) == 1000  # of one engine
    with pytest.raises(ConfigError, match="memory size is unknown") as caught:
        share_of_host_bytes(auto, memory_bytes=None, engines=1)
    assert (caught.value.field, caught.value.value) == ("host_bytes", "auto")


def test_a_tier_larger_than_the_memory_is_refused() -> None:
    check_fits(100, memory_bytes=100, what="here")
    check_fits(100, memory_bytes=None, what="here")
    with pytest.raises(ConfigError, match=r"there are only 1\.5 GiB here; use less") as caught:
        check_fits(2 << 30, memory_bytes=3 << 29, what="here")
    assert (caught.value.field, caught.value.value) == ("host_bytes", 2 << 30)


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"password": "hunter2"}, r"password='\*\*\*'"),
        ({"remote": {"address": "a:1", "password": "hunter2"}}, r"'password': '\*\*\*'"),
        ({"disk": {"path": "/p", "nested": {"api_key": "hunter2"}}, "host_bytes": "off"}, "/p"),
        ({"secret_access_key": "hunter2"}, r"\*\*\*"),
        ({"adress": "redis://user:hunter2@cache:1"}, r"redis://user:\*\*\*@cache:1"),
    ],
)
def test_a_misplaced_secret_is_not_shown(extra: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError, match=shown) as caught:
        parse_config(extra)
    assert "hunter2" not in str(caught.value) + repr(caught.value.value)


@pytest.mark.parametrize("field", ["key_file", "password_file", "tls_dir", "listen", "store"])
def test_the_control_other_values_are_shown(field: str) -> None:
    assert "='/etc/x'" in str(ConfigError(field, "/etc/x", "fix"))


def test_settings_that_are_no_json_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_environment({"KVCONNECT_CONFIG": '{"password": "hunter2"'})
    assert "hunter2" not in str(caught.value)
