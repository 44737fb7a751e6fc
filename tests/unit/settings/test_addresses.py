"""Addresses in settings: what is none says what to write."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigError
from kvconnect.settings.addresses import (
    check_networks,
    listen_address,
    server_address,
    server_addresses,
    worker_addresses,
)


def test_where_to_listen() -> None:
    assert listen_address("10.1.2.3:14580") == ("10.1.2.3", 14580)
    assert listen_address("[::1]:0") == ("::1", 0)
    assert listen_address("off") is None


@pytest.mark.parametrize("value", ["", "10.1.2.3", "host:1", "10.1.2.3:x", "10.1.2.3:65536", 5])
def test_where_nobody_can_listen(value: object) -> None:
    with pytest.raises(ConfigError, match="listen="):
        listen_address(value)


@pytest.mark.parametrize("value", ["0.0.0.0:1", "[::]:1"])
def test_a_wildcard_names_no_address_to_reach(value: str) -> None:
    with pytest.raises(ConfigError, match="name the address of this machine"):
        listen_address(value)


def test_networks() -> None:
    check_networks(["10.0.0.0/8", "fd00::/8", "10.1.2.3"])
    with pytest.raises(ConfigError, match=r"peers='10\.1\.2\.3/8'"):
        check_networks(["10.0.0.0/8", "10.1.2.3/8"])


def test_workers_of_several_ranks() -> None:
    found = worker_addresses(["10.0.0.1:7900-7902", "[::1]:80"])
    assert found == [*(("10.0.0.1", port) for port in (7900, 7901, 7902)), ("::1", 80)]
    with pytest.raises(ConfigError, match="at most 256"):
        worker_addresses([f"10.0.{number}.1:1-64" for number in range(5)])


def test_servers() -> None:
    assert server_address(" cache-1:6379") == ("cache-1", 6379)
    assert server_addresses("a:1,[::1]:2") == [("a", 1), ("::1", 2)]
    for text in ("", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "u@a:1", "redis://a:1", "a:1,"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            server_addresses(text)
