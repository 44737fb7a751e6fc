"""Files with secrets: who may change and read them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvconnect.errors import ConfigError
from kvconnect.secret_files import check_owner, read_secret, read_secret_text


def put(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("mode", [0o660, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = put(tmp_path / "secret", b"s", mode)
    with pytest.raises(ConfigError, match="chmod go-w") as refused:
        read_secret("api-key-file", path)
    assert refused.value.field == "api-key-file" and path in str(refused.value)


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    found = os.stat(put(tmp_path / "secret", b"s"))
    check_owner("key_file", "/secret", found)  # control: this user's own
    stranger = os.stat_result([*found[:4], os.geteuid() + 1, *found[5:]])
    with pytest.raises(ConfigError, match="belongs to another user"):
        check_owner("key_file", "/secret", stranger)


def test_a_file_that_everyone_may_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for mode in (0o600, 0o440):
        assert read_secret("key_file", put(tmp_path / f"{mode}", b"s", mode)) == b"s"
    assert not caplog.messages
    read_secret("key_file", put(tmp_path / "open", b"s", 0o644))
    assert "chmod o-r" in caplog.text


def test_text_is_stripped_and_must_be_utf_8(tmp_path: Path) -> None:
    assert read_secret_text("f", put(tmp_path / "a", b"\xef\xbb\xbf token\n")) == "token"
    with pytest.raises(ConfigError, match="UTF-8"):
        read_secret_text("f", put(tmp_path / "b", b"\xff"))
    with pytest.raises(ConfigError, match="can be read"):
        read_secret_text("f", str(tmp_path / "none"))
