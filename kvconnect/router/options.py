"""What a user of the router chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvconnect.errors import ConfigError
from kvconnect.router.pick import Policy
from kvconnect.router.view import Engine

BOOTSTRAP_PORT = 8998  # of SGLang and of vLLM's MooncakeConnector, if nothing else is said
_EXAMPLE = "http://10.0.0.1:8000"


@dataclass(frozen=True)
class Worker:
    """One engine as a user names it: ``URL[,key=value...]``.

    Attributes:
        url: its base URL, without a slash at the end.
        engine: what answers there.
        bootstrap: port where its prefill side is met; SGLang and Mooncake only.
        version: stands for what the engine says itself about its version.
        events, replay: ports where rank 0 publishes KV events and repeats lost ones, 0: none.
            Further ranks have the following ports.
    """

    url: str
    engine: Engine = Engine.VLLM
    bootstrap: int = BOOTSTRAP_PORT
    version: str = ""
    events: int = 0
    replay: int = 0

    @property
    def host(self) -> str:
        """Its host name or address; IPv6 in brackets."""
        name = urlsplit(self.url).hostname or ""
        return f"[{name}]" if ":" in name else name

    @property
    def meeting(self) -> str:
        """URL of its bootstrap server."""
        return f"http://{self.host}:{self.bootstrap}"


@dataclass(frozen=True)
class Options:
    """Settings of one router; checked when made.

    Attributes:
        prefill, decode: the engines, as :func:`workers` returns them.
        pull: always ask the decode engine only after the prefill engine has answered.
        push_min_tokens: prompts estimated to be shorter are pulled. Unit: tokens.
        timeout_s: seconds from a request's first byte to its answer's last one.
        prefill_policy, decode_policy: how an engine and rank are picked.
        dp_minimum_tokens: under policies that do not look at loads, take the rank with the fewest
            tokens of the engine they picked.
        load_interval_s: seconds between two looks at an engine's load; 0: do not look.

    Raises:
        ConfigError: names the flag, its value and the fix.
    """

    prefill: tuple[Worker, ...]
    decode: tuple[Worker, ...]
    pull: bool = False
    push_min_tokens: int = 0
    timeout_s: float = 600.0
    prefill_policy: Policy = Policy.LEAST_TOKENS
    decode_policy: Policy = Policy.LEAST_TOKENS
    dp_minimum_tokens: bool = False
    load_interval_s: float = 1.0

    def __post_init__(self) -> None:
        if self.push_min_tokens < 0:
            raise ConfigError("push-min-tokens", self.push_min_tokens, "use 0 or more")
        if not 0 < self.timeout_s <= 86_400:
            raise ConfigError("timeout", self.timeout_s, "use seconds, more than 0, at most a day")
        if not 0 <= self.load_interval_s <= 3600:
            fix = "use seconds, 0 (never) to 3600"
            raise ConfigError("worker-load-check-interval", self.load_interval_s, fix)


def workers(flag: str, texts: Sequence[str]) -> tuple[Worker, ...]:
    """Return the engines that ``texts`` name.

    Raises:
        ConfigError: one is none, or the same one twice.
    """
    found: dict[str, Worker] = {}
    for text in texts:
        worker = worker_of(flag, text)
        if worker.url in found:
            raise ConfigError(flag, text, "name each engine once")
        found[worker.url] = worker
    return tuple(found.values())


def worker_of(flag: str, text: str) -> Worker:
    """Return the engine that ``text`` names: ``URL[,key=value...]``.

    Raises:
        ConfigError: not an http(s) URL of a host, an unknown key, or a value that it cannot have.
    """
    url, *settings = text.strip().split(",")
    base = url.rstrip("/")
    if not _is_base(base):
        raise ConfigError(flag, text, f"use a URL such as {_EXAMPLE}")
    values: dict[str, Engine | int | str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        values[key] = _value(flag, key, value)
    return Worker(base, **values)  # type: ignore[arg-type]  # _value() is right for its key


def _value(flag: str, key: str, value: str) -> Engine | int | str:
    if key == "version":
        return value
    if key == "engine":
        names = [engine.value for engine in Engine]
        if value not in names:
            raise ConfigError(flag, f"engine={value}", f"use one of {', '.join(names)}")
        return Engine(value)
    if key in ("bootstrap", "events", "replay"):
        if not value.isascii() or not value.isdecimal() or not 0 < int(value) < 2**16:
            raise ConfigError(flag, f"{key}={value}", "use a port")
        return int(value)
    fix = "use engine, bootstrap, version, events or replay after the URL"
    raise ConfigError(flag, key, fix)


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises if it is no number
    except ValueError:
        return False
    known = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return known and not (parts.username or parts.query or parts.fragment)
