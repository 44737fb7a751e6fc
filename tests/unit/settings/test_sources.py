"""Settings are found in the engine's flag, in the environment and in a file, in this order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigError
from kvconnect.settings import Settings, find_settings


def written(folder: Path, content: object, name: str = "kv.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def variable(content: object) -> dict[str, str]:
    return {"KVCONNECT_CONFIG": content if isinstance(content, str) else json.dumps(content)}


def test_nothing_said_is_all_defaults() -> None:
    assert find_settings({}, {}) == (Settings(), {})
    assert find_settings({}, variable({})) == (Settings(), {})


def test_the_flag_counts_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"lease_s": 1, "wait_s": 1, "deadline_s": 1, "peers": ["10.0.0.0/8"]})
    environ = variable({"lease_s": 2, "wait_s": 2, "config_file": path})
    found, origins = find_settings({"lease_s": 3}, environ)
    assert (found.lease_s, found.wait_s, found.deadline_s) == (3.0, 2.0, 1.0)
    assert found.peers == ("10.0.0.0/8",) and found.config_file == path
    assert origins == {
        "lease_s": "the engine's flag",
        "wait_s": "KVCONNECT_CONFIG",
        "config_file": "KVCONNECT_CONFIG",
        "deadline_s": path,
        "peers": path,
    }


def test_the_flag_decides_which_file_is_read(tmp_path: Path) -> None:
    mine = written(tmp_path, {"lease_s": 1}, "mine.json")
    other = written(tmp_path, {"wait_s": 1}, "other.json")
    found = find_settings({"config_file": mine}, variable(f"@{other}")).settings
    assert (found.lease_s, found.wait_s) == (1.0, Settings().wait_s)
    # Control: without it, the environment does.
    assert find_settings({}, variable(f"@{other}")).settings.wait_s == 1.0


@pytest.mark.parametrize("place", ["flag", "variable", "file"])
def test_an_object_counts_as_a_whole(place: str, tmp_path: Path) -> None:
    above = {"disk": {"path": "/a", "capacity": "1GiB", "ttl_s": 5}}
    below = {"disk": {"path": "/b", "capacity": "2GiB", "min_free": 0}}
    path = written(tmp_path, below)
    found = {
        "flag": lambda: find_settings(above, variable(f"@{path}")),
        "variable": lambda: find_settings({}, variable({**above, "config_file": path})),
        "file": lambda: find_settings({}, variable(f"@{written(tmp_path, above)}")),
    }[place]()
    disk = found.settings.disk
    assert disk is not None and (disk.path, disk.ttl_s, disk.min_free) == ("/a", 5.0, 1 << 30)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kv.json", '{"disk": {"path": "/a", "capacity": "1GiB"}, "peers": ["10.0.0.0/8"]}'),
        ("kv.yaml", "disk:\n  path: /a\n  capacity: 1GiB\npeers: [10.0.0.0/8]  # all\n"),
        ("kv.yml", '{"disk": {"path": "/a", "capacity": "1GiB"}, "peers": ["10.0.0.0/8"]}'),
    ],
)
def test_files_are_json_or_yaml(name: str, text: str, tmp_path: Path) -> None:
    found = find_settings({"config_file": written(tmp_path, text, name)}, {}).settings
    assert found.disk is not None and found.disk.capacity == 1 << 30
    assert found.peers == ("10.0.0.0/8",)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("kv.json", "{", "name a file with an object"),
        ("kv.json", "[]", "name a file with an object"),
        ("kv.yaml", "a: [", "name a file with an object"),
        ("kv.yaml", "- a\n- b\n", "name a file with an object"),
        ("kv.yaml", "1: 2\n", "name a file with an object"),
        ("kv.yaml", "when: 2001-99-99\n", "name a file with an object"),
        ("kv.yaml", "!!python/object:os.system {}\n", "name a file with an object"),
        *(
            ("kv.yaml", f"a: !!{tag}", "name a file with an object")
            for tag in ("int ''", "float ''", "bool x", "timestamp x", "int x", "map x", "omap 1")
        ),
        ("kv.yaml", "? [a]\n: b\n", "name a file with an object"),
        ("kv.yaml", "a: &a [*a]\n", "unknown setting"),
        ("kv.json", "[" * 100_000, "name a file with an object"),
        ("kv.json", '{"a": "' + "x" * (1 << 20) + '"}', "more than 1 MiB"),
        ("kv.json", '{"config_file": "/etc/other.json"}', "leave it out of .*: one file is read"),
        ("kv.json", '{"lease_s": 0}', r"lease_s=0 is not usable: .* \(set in .*kv\.json\)"),
    ],
)
def test_files_that_cannot_be_used(name: str, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        find_settings({"config_file": written(tmp_path, text, name)}, {})
    assert "\n" not in str(caught.value)


YAML = st.text(alphabet="abc:-[]{}!&*?|>'\"#% \n\t019.~<=@`\x00\u2028", max_size=40)


@given(name=st.sampled_from(["kv.json", "kv.yaml"]), text=YAML | st.text() | st.just("!!int ''"))
def test_whatever_a_file_holds_is_settings_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str
) -> None:
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        find_settings({"config_file": str(path)}, {})
    except ConfigError as error:
        assert "\n" not in str(error)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"config_file='/none\.json'.*No such file"):
        find_settings({}, variable("@/none.json"))
    with pytest.raises(ConfigError, match="config_file=5"):
        find_settings({"config_file": 5}, {})


def test_yaml_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = written(tmp_path, "lease_s: 1\n", "kv.yaml")
    with pytest.raises(ConfigError, match="install PyYAML"):
        find_settings({"config_file": path}, {})
    json_file = written(tmp_path, {"lease_s": 1})  # control
    assert find_settings({"config_file": json_file}, {}).settings.lease_s == 1.0


@pytest.mark.parametrize("text", ["{", "[]", "1", "", "[" * 100_000])
def test_a_variable_that_cannot_be_used(text: str) -> None:
    with pytest.raises(ConfigError, match="use a JSON object"):
        find_settings({}, variable(text))


def test_what_is_no_json_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        find_settings({}, variable('{"password": "hunter2"'))
    assert "hunter2" not in str(caught.value)


def test_an_error_names_where_the_setting_is(tmp_path: Path) -> None:
    path = written(tmp_path, {"disk": {"paht": "/x"}, "wait_s": "5"})
    with pytest.raises(ConfigError) as caught:
        find_settings({"lease_s": 0}, variable({"config_file": path, "wait_s": 0}))
    places = {fault.field: fault.fix for fault in (caught.value, *caught.value.others)}
    assert places["disk.paht"].endswith(f"(set in {path})")
    assert places["wait_s"].endswith("(set in KVCONNECT_CONFIG)")
    assert "set in" not in places["lease_s"]  # the flag is what the user has just typed


def test_settings_of_all_places_are_checked_together(tmp_path: Path) -> None:
    path = written(tmp_path, {"disk": {"path": "/x", "capacity": "1GiB"}})
    with pytest.raises(ConfigError, match="blocks come and go through host memory"):
        find_settings({"host_bytes": "off"}, variable(f"@{path}"))


def test_the_flag_is_not_changed() -> None:
    flag: dict[str, Any] = {"lease_s": 3}
    find_settings(flag, variable({"wait_s": 1}))
    assert flag == {"lease_s": 3}
