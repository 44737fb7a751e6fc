"""The client of trials: addresses that it takes, and answers that end it."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigError
from kvconnect.trial.http_client import HttpClient


@pytest.mark.parametrize("url", ["http://[::1]:8000", "host:8000", "https://host/base/"])
def test_addresses(url: str) -> None:
    client = HttpClient(url)
    assert client.host in ("::1", "host")
    assert client.url.startswith(("http://", "https://"))


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://host", "http://a b", "http://h:0", "http://u:p@h", "http://hö"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        HttpClient(url)
