"""What a user of the router chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvconnect.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Settings of one router; checked when made.

    Attributes:
        prefill, decode: base URLs of the engines, as :func:`base_urls` returns them.
        pull: always ask the decode engine only after the prefill engine has answered.
        push_min_tokens: prompts estimated to be shorter are pulled. Unit: tokens.
        timeout_s: seconds from a request's first byte to its answer's last one.

    Raises:
        ConfigError: names the flag, its value and the fix.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    pull: bool = False
    push_min_tokens: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.push_min_tokens < 0:
            raise ConfigError("push-min-tokens", self.push_min_tokens, "use 0 or more")
        if not 0 < self.timeout_s <= 86_400:
            raise ConfigError("timeout", self.timeout_s, "use seconds, more than 0, at most a day")


def base_urls(flag: str, urls: Sequence[str]) -> tuple[str, ...]:
    """Return ``urls`` without trailing slashes.

    Raises:
        ConfigError: not an http(s) URL of a host, or the same one twice.
    """
    found: list[str] = []
    for url in urls:
        base = url.rstrip("/")
        if not _is_base(base):
            raise ConfigError(flag, url, "use a URL such as http://10.0.0.1:8000")
        if base in found:
            raise ConfigError(flag, url, "name each engine once")
        found.append(base)
    return tuple(found)


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises if it is no number
    except ValueError:
        return False
    known = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return known and not (parts.username or parts.query or parts.fragment)
