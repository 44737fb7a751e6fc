"""Where this user's files are, with and without the standard's variables and a home."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect.user_folders import cache_folder, key_folder


def test_each_folder_is_where_the_system_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "cache" / "kvconnect"
    assert key_folder() == tmp_path / "run" / "kvconnect"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert key_folder() == cache_folder()
    for relative in ("", "cache"):  # which the standard has ignored
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert key_folder() == cache_folder() == tmp_path / "home" / ".cache" / "kvconnect"


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for variable in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert cache_folder() is None and key_folder() is None
