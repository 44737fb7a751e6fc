"""One engine as a user names it: its URL, and what the router cannot ask it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from kvconnect import extras
from kvconnect.errors import ConfigError
from kvconnect.router.policy.fleet_view import EngineKind

BOOTSTRAP_PORT = 8998  # default of SGLang and of vLLM's MooncakeConnector
HTTP = ("http", "https")
_EXAMPLE = "http://10.0.0.1:8000"


@dataclass(frozen=True)
class EngineSpec:
    """One engine as a user gives it: ``URL[,key=value...]``.

    Attributes:
        url: base URL, without a trailing slash; ``grpc://`` is SGLang's gRPC port.
        kind: kind of server at the URL; its key is ``engine``.
        bootstrap: port of the prefill side's bootstrap server; SGLang and Mooncake only.
        version: overrides the version that the engine reports.
        events, replay: ports at which rank 0 publishes KV events and repeats lost ones; 0: none.
            Further ranks use the following ports.
    """

    url: str
    kind: EngineKind = EngineKind.VLLM
    bootstrap: int = BOOTSTRAP_PORT
    version: str = ""
    events: int = 0
    replay: int = 0

    @property
    def hostname(self) -> str:
        """Host name or address in the URL."""
        return urlsplit(self.url).hostname or ""

    @property
    def host(self) -> str:
        """Host name or address; IPv6 in brackets."""
        return _bracketed(self.hostname)

    @property
    def port(self) -> int | None:
        """Port in the URL, None if it has none."""
        return urlsplit(self.url).port

    def on_host(self, address: str) -> EngineSpec:
        """Return the engine with another host in its URL."""
        place = f"{_bracketed(address)}:{self.port}"
        return replace(self, url=urlsplit(self.url)._replace(netloc=place).geturl())

    @property
    def bootstrap_url(self) -> str:
        """URL of the bootstrap server."""
        return f"http://{self.host}:{self.bootstrap}"


def engine_specs(flag: str, texts: Sequence[str]) -> tuple[EngineSpec, ...]:
    """Return the engines in ``texts``.

    Raises:
        ConfigError: one is invalid, or two have the same URL.
    """
    found: dict[str, EngineSpec] = {}
    for text in texts:
        spec = engine_spec(flag, text)
        if spec.url in found:
            raise ConfigError(flag, text, "name each engine once")
        found[spec.url] = spec
    return tuple(found.values())


def check_hosts(flag: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Return ``texts`` unchanged: engines whose host stands for its addresses, or for a service.

    Raises:
        ConfigError: one is not an engine, or has no port.
    """
    for spec in engine_specs(flag, texts):
        if spec.port is None:
            raise ConfigError(flag, spec.url, "name the port too, as in http://prefill:8000")
    return tuple(texts)


def engine_spec(flag: str, text: str) -> EngineSpec:
    """Return the engine in ``text``: ``URL[,key=value...]``.

    Raises:
        ConfigError: not an http(s) or grpc URL of a host, an unknown key, an invalid value, or an
            optional package is missing.
    """
    refuse_credentials(flag, text)
    url, *settings = text.strip().split(",")
    base = url.rstrip("/")
    if not is_base_url(base, (*HTTP, "grpc")):
        raise ConfigError(flag, text, f"use a URL such as {_EXAMPLE}")
    values: dict[str, EngineKind | int | str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        values["kind" if key == "engine" else key] = _value(flag, key, value)
    if urlsplit(base).scheme == "grpc":
        _check_grpc(flag, text, base, values.setdefault("kind", EngineKind.SGLANG))
    return EngineSpec(base, **values)  # type: ignore[arg-type]  # _value() has the type of its key


def _value(flag: str, key: str, value: str) -> EngineKind | int | str:
    if key == "version":
        return value
    if key == "engine":
        if value not in list(EngineKind):
            raise ConfigError(flag, f"engine={value}", f"use one of {', '.join(EngineKind)}")
        return EngineKind(value)
    if key in ("bootstrap", "events", "replay"):
        good = value.isascii() and value.isdecimal() and len(value) <= len("65535")
        if not good or not 0 < int(value) < 2**16:
            raise ConfigError(flag, f"{key}={value}", "use a port")
        return int(value)
    raise ConfigError(flag, key, "use engine, bootstrap, version, events or replay after the URL")


def _check_grpc(flag: str, text: str, base: str, kind: object) -> None:
    if kind is not EngineKind.SGLANG:
        raise ConfigError(flag, text, "use http:// for it; grpc:// is SGLang's API")
    if urlsplit(base).path or urlsplit(base).port is None:
        raise ConfigError(flag, text, "use host and port, as in grpc://10.0.0.1:40000")
    if lacking := extras.what_to_install(["grpc"]):
        raise ConfigError(flag, text, lacking)


def refuse_credentials(flag: str, url: str) -> None:
    """Refuse a URL with a user or password; they would appear in logs, responses and metrics."""
    before, at, place = url.rpartition("@")
    if at:
        scheme = before.partition("://")[0] if "://" in before else ""
        hidden = f"{scheme}://...@{place}" if scheme else f"...@{place}"
        raise ConfigError(flag, hidden, "leave user and password out")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_base_url(url: str, schemes: Collection[str] = HTTP) -> bool:
    """Return whether a text is a URL to whose end paths can be added."""
    try:
        parts = urlsplit(url)
        port = parts.port  # raises if it is not a number
    except ValueError:
        return False
    if not url.isascii() or not url.isprintable() or " " in url:  # it becomes part of request heads
        return False
    known = parts.scheme in schemes and bool(parts.hostname) and port != 0
    return known and not (parts.query or parts.fragment)
