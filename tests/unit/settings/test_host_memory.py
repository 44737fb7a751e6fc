"""What ``host_bytes`` stands for on a machine."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigError
from kvconnect.settings import Settings
from kvconnect.settings.host_memory import check_fits, share_of_host_bytes


def test_share_of_the_machine() -> None:
    auto, fixed = Settings(), Settings(host_bytes=1000)
    assert share_of_host_bytes(auto, memory_bytes=1 << 40, engines=1) == 1 << 38
    assert share_of_host_bytes(auto, memory_bytes=1 << 40, engines=4) == 1 << 36
    assert share_of_host_bytes(auto, memory_bytes=1 << 40, engines=0) == 1 << 38
    off = Settings(host_bytes="off")
    assert share_of_host_bytes(off, memory_bytes=None, engines=1) == 0
    assert share_of_host_bytes(fixed, memory_bytes=None, engines=4) == 1000  # of one engine
    with pytest.raises(ConfigError, match="memory size is unknown") as caught:
        share_of_host_bytes(auto, memory_bytes=None, engines=1)
    assert (caught.value.field, caught.value.value) == ("host_bytes", "auto")


def test_a_tier_larger_than_the_memory_is_refused() -> None:
    check_fits(100, memory_bytes=100, what="here")
    check_fits(100, memory_bytes=None, what="here")
    with pytest.raises(ConfigError, match=r"there are only 1\.5 GiB here; use less") as caught:
        check_fits(2 << 30, memory_bytes=3 << 29, what="here")
    assert (caught.value.field, caught.value.value) == ("host_bytes", 2 << 30)
