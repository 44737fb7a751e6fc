"""Every setting and every flag of the router has somebody who sets it, and a reason."""

from __future__ import annotations

import pytest

from scripts import knobs


def test_every_knob_has_a_user_and_a_reason() -> None:
    assert set(knobs.names()) == knobs.KNOBS.keys()
    assert all(user and reason for user, reason in knobs.KNOBS.values())


def test_the_control_a_knob_without_a_user_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(knobs.KNOBS, "disk.min_free")
    with pytest.raises(KeyError, match=r"disk\.min_free"):
        knobs.table()
