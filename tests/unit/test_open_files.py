"""Limits of open files."""

from __future__ import annotations

import resource

import pytest

from kvconnect import open_files
from tests.files import no_file_left


def test_the_limit_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, now: limits.append(now))
    assert open_files.limit() == 1024
    open_files.raise_limit()
    assert open_files.limit() == 4096
    assert limits == [(1024, 4096), (4096, 4096)]


def test_no_limit_is_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert open_files.limit() == 1 << 20


def test_whether_one_is_left_is_tried() -> None:
    assert not open_files.none_left()
    with no_file_left():
        assert open_files.none_left()
    assert not open_files.none_left()
