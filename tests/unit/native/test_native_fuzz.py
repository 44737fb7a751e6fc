"""Hostile arguments to the C extension raise what is documented and touch nothing else."""

from __future__ import annotations

import ctypes

import pytest

from tests.fuzz import fuzz_native


def test_hostile_arguments_raise_what_is_documented() -> None:
    ended = fuzz_native.run(3000, seed=1)
    for call in fuzz_native.CALLS:
        assert ended[f"{call.__name__} ok"] > 50
        assert ended[f"{call.__name__} ValueError"] > 50
    assert ended["copy IndexError"] > 50


def test_a_write_outside_a_buffer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def overrun(area: tuple[int, int], *rest: object) -> None:
        ctypes.memset(area[0] + area[1], 255, 1)

    monkeypatch.setattr(fuzz_native._native, "gather", overrun)
    with pytest.raises(AssertionError, match="outside the buffer"):
        fuzz_native.run(100, seed=1)
