"""The line at start says what is not as usual, and no secret."""

from __future__ import annotations

from kvconnect.settings import Settings, check_settings
from kvconnect.settings.stores import OtherSettings
from kvconnect.settings.summary import differences, plain, start_line


def test_defaults_are_not_named() -> None:
    assert differences(Settings()) == {}
    line = start_line(Settings(), "vLLM 2")
    assert line.startswith("kvconnect ") and line.endswith(" on vLLM 2, settings: defaults")


def test_what_differs_is_named() -> None:
    found = check_settings({"lease_s": 5, "wait_s": 5, "cache_peers": {"listen": "10.0.0.1:79"}})
    assert set(differences(found)) == {"lease_s", "cache_peers"}  # 5 is the default of wait_s
    line = start_line(found, "SGLang 2")
    assert '"lease_s":5.0' in line and "10.0.0.1:79" in line and "\n" not in line


def test_secrets_are_masked() -> None:
    options = {"url": "redis://me:hunter2@cache", "api_key": "hunter2", "size": 5}
    found = Settings(remote=OtherSettings(name="theirs", options=options))
    line = start_line(found, "")
    assert "hunter2" not in line and "redis://me:***@cache" in line and '"size":5' in line
    assert plain(found)["remote"] == {"kind": "theirs", **options}  # control: it is only masked
