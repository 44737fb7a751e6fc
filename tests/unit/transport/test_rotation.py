"""Keys and certificates that change while engines run, over real connections and real TLS."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvconnect import changed_files
from kvconnect.errors import ConfigError, Refused
from kvconnect.protocol.tickets import Ticket, issue, verify
from kvconnect.settings import Settings
from kvconnect.testing.transport import Side
from kvconnect.transport import Security
from kvconnect.transport.base import PeerDown, PeerUp
from kvconnect.transport.security import (
    ALSO,
    Keys,
    NoLocalKey,
    read_key,
    read_key_file,
    tls_files,
)
from kvconnect.transport.tcp import handshake
from kvconnect.types import Endpoint
from tests.links import make_certificates, result, side

OLD, NEW, OTHER = (os.urandom(32).hex() for _ in range(3))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_files, "LOOK_S", 0.0)


def put(path: Path, text: str, mode: int = 0o600) -> str:
    """Write a file in the way that secrets are mounted: a new one in the place of the old."""
    fresh = path.with_name(path.name + ".fresh")
    fresh.write_text(text)
    fresh.chmod(mode)
    os.replace(fresh, path)
    return str(path)


def refusal(reader: Side, address: tuple[str, int]) -> str:
    """Connect; return the field that refused it, "" if it came up."""
    found = result(reader, address)
    if isinstance(found, PeerUp):
        return ""
    assert found.refused, found
    return found.refused


# Keys -------------------------------------------------------------------------------------------


def test_a_key_is_changed_without_a_moment_in_which_engines_refuse_each_other(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Engine by engine: accept the new one, show the new one, no longer accept the old one."""
    files = [tmp_path / "a", tmp_path / "b"]
    sides = []
    for path in files:
        made = Security(key_file=put(path, OLD))
        sides.append(stack.enter_context(side(made, silent_s=60.0, dead_after_s=60.0)))
    addresses = [each.transport.listen("127.0.0.1", 0) for each in sides]

    def all_meet() -> None:
        for here, address in zip(sides, reversed(addresses), strict=True):
            assert refusal(here, address) == ""

    def turn(path: Path, key: str, also: str) -> None:
        if also:
            put(path.with_name(path.name + ALSO), also)
        put(path, key)
        if not also:
            os.unlink(str(path) + ALSO)

    all_meet()
    for stage in ((OLD, NEW), (NEW, OLD), (NEW, "")):
        for path in files:
            turn(path, *stage)
            all_meet()
    # The old key is worth nothing now. Negative control: it was, before.
    with side(Security(key=OLD.encode())) as late:
        assert refusal(late, addresses[0]) == "auth"


def test_a_key_that_is_not_read_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what happened before."""
    monkeypatch.setattr(changed_files.Changes, "found", lambda _: False)
    path = tmp_path / "key"
    with side(Security(key_file=put(path, OLD))) as source:
        address = source.transport.listen("127.0.0.1", 0)
        put(path, NEW)
        with side(Security(key=NEW.encode())) as reader:
            assert refusal(reader, address) == "auth"


def test_tickets_are_good_with_either_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keys = Keys(path=put(path, OLD))
    old, _ = keys.current()
    ticket = Ticket(
        transfer=bytes(16),
        engine_id="e",
        epoch=1,
        endpoints=(Endpoint(0, 0, "127.0.0.1", 22),),
        tp=1,
        pp=1,
        tokens=5,
        expires=time.time() + 60,
    )
    text = issue(ticket, old)
    put(tmp_path / f"key{ALSO}", OLD)
    put(path, NEW)
    key, also = keys.current()
    assert (key, also) == (NEW.encode(), (OLD.encode(),))
    assert verify(text, (key, *also), time.time()) == ticket
    with pytest.raises(Refused):
        verify(text, (key,), time.time())
    with pytest.raises(Refused):
        verify(issue(ticket, OTHER.encode()), (key, *also), time.time())


@pytest.mark.parametrize("wrong", ["", "short", "a" * 64, None])
def test_a_key_file_that_becomes_useless_changes_nothing(
    wrong: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    keys = Keys(path=put(path, OLD))
    if wrong is None:
        path.unlink()
    else:
        put(path, wrong)
    assert keys.current() == (OLD.encode(), ())
    assert keys.current() == (OLD.encode(), ())
    assert caplog.text.count("the keys stay as they were") == 1
    assert OLD not in caplog.text
    put(path, NEW)
    assert keys.current() == (NEW.encode(), ())


# What is no key ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "0123456789abcde", " " * 40, "a" * 32, "abab" * 8])
def test_what_can_be_guessed_is_no_key(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="random bytes"):
        read_key_file(put(tmp_path / "key", key))


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_key_that_others_may_write_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="others may write it: chmod go-w"):
        read_key_file(put(tmp_path / "key", OLD, mode))
    assert read_key_file(put(tmp_path / "key", OLD, 0o440)) == OLD.encode()


def test_a_key_that_everyone_reads_is_remarked_upon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_key_file(put(tmp_path / "key", OLD, 0o644))
    assert "everyone on this machine can read this" in caplog.text


@pytest.mark.parametrize("spoil", ["empty", "readable", "fine"])
def test_this_user_s_own_key(spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "kvconnect"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    key = read_key(Settings())
    assert len(key) == 32
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    path = folder / "handoff.key"
    if spoil == "empty":
        path.write_bytes(b"")
    elif spoil == "readable":
        path.chmod(0o644)
    if spoil == "fine":
        assert read_key(Settings()) == key
        return
    with pytest.raises(ConfigError, match="remove it, and a new one is made"):
        read_key(Settings())


def test_a_key_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(ConfigError, match="No space left"):
        read_key(Settings())
    assert list((tmp_path / "kvconnect").iterdir()) == []


def test_the_key_follows_the_standard_s_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, cache, home = (tmp_path / name for name in ("runtime", "cache", "home"))
    for variable, folder in (("XDG_RUNTIME_DIR", runtime), ("XDG_CACHE_HOME", cache)):
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.setenv("HOME", str(home))
    for unset, folder in (
        ("XDG_RUNTIME_DIR", runtime),
        ("XDG_CACHE_HOME", cache),
        ("HOME", home / ".cache"),
    ):
        key = read_key(Settings())
        assert (folder / "kvconnect" / "handoff.key").read_bytes() == key
        monkeypatch.delenv(unset)


@pytest.mark.parametrize("home", ["not writable", "none"])
def test_without_a_place_for_its_key_a_user_is_told_to_name_one(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    if home == "none":

        def nobody(user: int) -> None:
            raise KeyError(f"getpwuid(): uid not found: {user}")

        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", nobody)
    else:
        monkeypatch.setenv("HOME", "/proc/1")
    with pytest.raises(NoLocalKey, match=r"key_file.*set it") as refused:
        read_key(Settings())
    assert refused.value.field == "key_file"
    assert read_key(Settings(peers=("10.0.0.0/8",))) == b""  # control: needs none


def test_a_tls_key_that_others_may_write_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    tls_files(str(tmp_path))
    (tmp_path / "tls.key").chmod(0o666)
    with pytest.raises(ConfigError, match="others may write it"):
        tls_files(str(tmp_path))


# Certificates -----------------------------------------------------------------------------------


def renewed(folder: Path) -> Security:
    """Replace all that is in a folder by a new authority and its certificate."""
    fresh = folder.with_name(folder.name + "-fresh")
    fresh.mkdir()
    made = make_certificates(fresh)
    for path in fresh.iterdir():
        shutil.move(path, folder / path.name)
    fresh.rmdir()
    return replace(made, **{f: str(folder / Path(getattr(made, f)).name) for f in TLS})


TLS = ("tls_cert", "tls_key", "tls_ca")


@pytest.mark.parametrize("reads_again", [True, False])
def test_new_certificates_are_used_for_new_connections(
    reads_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a negative control: without that, who has the new ones only is refused."""
    made = make_certificates(tmp_path)
    if not reads_again:
        monkeypatch.setattr(changed_files.Changes, "found", lambda _: False)
    with side(made) as source, side(made) as before:
        address = source.transport.listen("127.0.0.1", 0)
        assert refusal(before, address) == ""
        new = renewed(tmp_path)
        with side(new) as reader:
            assert refusal(reader, address) == ("" if reads_again else "tls")
        if reads_again:  # who connects reads its own again, too; what is connected stays
            assert refusal(before, address) == ""
            assert not before.of(PeerDown)


def test_certificates_that_do_not_fit_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_certificates(tmp_path)
    with side(made) as source, side(made) as reader:
        address = source.transport.listen("127.0.0.1", 0)
        put(tmp_path / "tls.crt", "half of it is writ")
        assert refusal(reader, address) == ""
    assert "the certificates stay as they were" in caplog.text


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        ("", ""),
        ("DNS:worker-3", ""),
        ("IP:127.0.0.1,DNS:worker-3", ""),
        ("IP:10.9.9.9", "tls"),
        ("IP:10.9.9.9,DNS:localhost", "tls"),
    ],
)
def test_a_certificate_for_another_address_is_refused(
    names: str, refused: str, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path, alternative=names)
    with side(made) as reader, side(made) as source:
        assert refusal(reader, source.transport.listen("127.0.0.1", 0)) == refused


def test_without_the_look_at_addresses_it_would_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(handshake, "_check_address", lambda *_: None)
    made = make_certificates(tmp_path, alternative="IP:10.9.9.9")
    with side(made) as reader, side(made) as source:
        assert refusal(reader, source.transport.listen("127.0.0.1", 0)) == ""
