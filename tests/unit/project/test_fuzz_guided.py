"""A short run of ``make fuzz``'s guided half, all that it has kept, and proof that it finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import pytest

from kvconnect.doctor import exchange
from kvconnect.errors import KVConnectError
from kvconnect.protocol import cache_messages, messages, nixl_messages
from tests.fuzz.guided import CORPUS, FOUND, ROOT
from tests.fuzz.readers import CONTROL, TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_raise_nothing(name: str) -> None:
    kept = sorted((CORPUS / name).iterdir())
    assert kept
    for path in kept:
        TARGETS[name](path.read_bytes())


@pytest.mark.parametrize(
    ("name", "decode", "kinds"),
    [
        ("message", messages.decode, messages.Message),
        ("cache_message", cache_messages.decode, cache_messages.CacheMessage),
        ("doctor_message", exchange.decode, exchange.DoctorMessage),
        ("nixl_message", nixl_messages.decode, nixl_messages.NixlMessage),
    ],
    ids=["message", "cache_message", "doctor_message", "nixl_message"],
)
def test_what_is_kept_has_messages_of_each_kind(
    name: str, decode: Callable[[bytes], object], kinds: Any
) -> None:
    """Else inputs begin with those of a former version of the protocol, and go no further."""
    found = set()
    for path in (CORPUS / name).iterdir():
        with suppress(KVConnectError):
            found.add(type(decode(path.read_bytes())))
    assert found == set(get_args(kinds))


def guided(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.guided", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_new_inputs_raise_nothing() -> None:
    done = guided("--runs", "2000")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name}: 2000 inputs" for name in TARGETS]


def test_a_planted_fault_is_found() -> None:
    for former in FOUND.glob("planted-crash-*"):
        former.unlink()
    done = guided(*CONTROL, "--runs", "200000")
    assert done.returncode == 1
    assert "KeyError: 'planted'" in done.stderr
    written = FOUND.glob("planted-crash-*")
    assert any(path.read_bytes().startswith(b"KVC") for path in written)
