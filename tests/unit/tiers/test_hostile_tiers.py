"""A part of the corpora of damaged folders and poisoned records, and that they see what they are
for."""

from __future__ import annotations

import os
import shutil

import pytest

from kvconnect.tiers.backends.disk import segment
from kvconnect.tiers.backends.disk.files import Directory
from kvconnect.tiers.backends.record_seals import Mac
from tests.hostile import Outcome, folders, records

needs_server = pytest.mark.skipif(
    not (shutil.which("valkey-server") or shutil.which("redis-server")),
    reason="neither valkey-server nor redis-server is installed",
)


def is_clean(outcome: Outcome, cases: int) -> None:
    assert outcome == Outcome(cases=cases), outcome.notes


def kinds(*names: str) -> list[folders.Case]:
    return [case for case in dict.fromkeys(folders.CASES) if case.name in names]


def test_damaged_folders() -> None:
    every = list(dict.fromkeys(folders.CASES))
    is_clean(folders.run(len(every), every), len(every))


def test_the_control_links_that_are_followed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def follow(self: Directory, name: str, flags: int) -> int:
        return os.open(name, flags & ~os.O_EXCL, 0o600, dir_fd=self.fd)

    monkeypatch.setattr(Directory, "open", follow)
    assert folders.run(4, kinds("lock")).smuggled


def test_the_control_an_index_that_is_believed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = segment.unpack_index

    def believe(data: bytes, identity: bytes) -> object:
        found = real(data, identity)
        if found is None:
            raise IndexError("array index out of range")
        return found

    monkeypatch.setattr(segment, "unpack_index", believe)
    assert folders.run(4, kinds("index numbers, sealed")).crashes


@needs_server
def test_poisoned_records() -> None:
    pytest.importorskip("valkey")
    count = 2 * len(records.CASES)
    is_clean(records.run(count), count)


@needs_server
def test_the_control_a_seal_that_is_not_checked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("valkey")
    monkeypatch.setattr(Mac, "_is_proven", lambda *_: True)
    assert records.run(len(records.CASES)).wrong > 3
