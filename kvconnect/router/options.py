"""Options of the router, and the format of engines on its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import urlsplit

from kvconnect.errors import ConfigError
from kvconnect.protocol.cache_hints import LONGEST_S
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.fleet_view import EngineKind, Role
from kvconnect.router.policy.ranking import RankingPolicy
from kvconnect.router.policy.rules import RoutingRules

BOOTSTRAP_PORT = 8998  # default of SGLang and of vLLM's MooncakeConnector
_EXAMPLE = "http://10.0.0.1:8000"


@dataclass(frozen=True)
class EngineSpec:
    """One engine as a user gives it: ``URL[,key=value...]``.

    Attributes:
        url: base URL, without a trailing slash.
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


@dataclass(frozen=True)
class RouterLimits:
    """Limits of load and time; checked when created.

    Attributes:
        timeout_s: seconds from a request's first byte to its response's last byte.
        silence_s: seconds that an engine may send nothing while a request is open.
        concurrent: running requests; 0: any number.
        queue: waiting requests.
        queue_s: seconds that a request may wait.
        drain_s: seconds that open requests have to end when the router is told to stop.
        client_concurrent: open requests of one client; 0: any number.
        body_mib: size of a request's body. Unit: MiB.
        comment_s: seconds without data after which a stream gets a comment; 0: never.

    Raises:
        ConfigError: names the flag, its value and the fix.
    """

    timeout_s: float = 600.0
    silence_s: float = 300.0
    concurrent: int = 4096
    queue: int = 1024
    queue_s: float = 10.0
    drain_s: float = 30.0
    client_concurrent: int = 2048
    body_mib: float = 32.0
    comment_s: float = 0.0

    @property
    def body_bytes(self) -> int:
        """Limit of a request's body in bytes."""
        return int(self.body_mib * 2**20)

    def __post_init__(self) -> None:
        seconds = {
            "timeout": self.timeout_s,
            "silence-timeout": self.silence_s,
            "queue-timeout": self.queue_s,
            "drain-timeout": self.drain_s,
            **({"comment-after": self.comment_s} if self.comment_s else {}),
        }
        for flag, value in seconds.items():
            if not 0 < value <= 86_400:
                raise ConfigError(flag, value, "use seconds, more than 0, at most a day")
        numbers = {"max-concurrent": self.concurrent, "client-concurrent": self.client_concurrent}
        for flag, number in {**numbers, "queue": self.queue}.items():
            if number < 0:
                raise ConfigError(flag, number, "use 0 or more")
        if not 1 / 64 <= self.body_mib <= 1024:
            raise ConfigError("max-body", self.body_mib, "use MiB, 1/64 to 1024")


@dataclass(frozen=True)
class EtcdServer:
    """Where engines register, and how the router shows who it is.

    Attributes:
        url: of a server; its path is the prefix of the keys of engines.
        authority: file of the authority of the server's certificate; empty: the system's.
        certificate: files of the router's certificate and key, if the server requires them.
        user: name at the server; empty: none.
        password: of the user.

    Raises:
        ConfigError: names the flag, its value and the fix.
    """

    url: str
    authority: str = ""
    certificate: tuple[str, str] | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        _refuse_credentials("etcd", self.url)
        parts = urlsplit(self.url)
        if not (_is_base(self.url) and parts.path.strip("/")):
            fix = "use a URL with a prefix, as in http://etcd:2379/kvconnect"
            raise ConfigError("etcd", self.url, fix)
        if self.authority and parts.scheme != "https":
            raise ConfigError("etcd-tls-dir", self.authority, "begin the URL of --etcd with https")
        if bool(self.user) != bool(self.password):
            raise ConfigError("etcd-user", self.user, "set --etcd-user and --etcd-password-file")


@dataclass(frozen=True)
class Sources:
    """Sources of further engines, which the router follows while it runs.

    Attributes:
        file: path of a file that lists engines; empty: none.
        dns: engines by role; each stands for one engine at every address of its host.
        services: engines by role; each host is a Kubernetes service.
        etcd: a server where engines register; None: none.
    """

    file: str = ""
    dns: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    services: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    etcd: EtcdServer | None = None


@dataclass(frozen=True)
class Intervals:
    """Intervals of queries to engines; checked when created.

    Attributes:
        load_s: seconds between two queries of an engine's load. 0: one query each time it comes up.
        probe_s: seconds between two probes of an engine's hand-off. 0: no probes.

    Raises:
        ConfigError: names the flag, its value and the fix.
    """

    load_s: float = 1.0
    probe_s: float = 60.0

    def __post_init__(self) -> None:
        seconds = {"worker-load-check-interval": self.load_s, "probe-interval": self.probe_s}
        for flag, value in seconds.items():
            if not 0 <= value <= 3600:
                raise ConfigError(flag, value, "use seconds, 0 to 3600")


@dataclass(frozen=True)
class Listening:
    """Address for clients, and which clients are served.

    Attributes:
        shared: other processes may listen at the same port; the system spreads connections.
        cert, key: paths of a TLS certificate chain and its key; empty: plain HTTP.
        api_keys: a client must send one of them; none: every client is served.
        api_key_file: path of the file that has them, read again when it changes; empty: none.
        allowed_origins: pages of these origins may use the router from a browser; "*": of all.
        isolate: clients with different keys share no cached KV.
        pass_fields: fields of requests that reach engines although no list of the router has them.
        forward_authorization: engines get the clients' ``Authorization`` header.
        metrics_host, metrics_port: where ``/metrics`` is served alone; without a port, it is
            served beside the clients' paths.
        relay: streams pass from engines to clients in native code, where it is built.
        hit_headers: response headers tell how much of a prompt is expected to be cached.
        receipts: engines are asked where the tokens of a prompt came from.
        retention_s: longest time for which clients may have the blocks of a prompt retained, in
            seconds; 0: not at all.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    shared: bool = False
    cert: str = ""
    key: str = ""
    api_keys: tuple[ApiKey, ...] = ()
    api_key_file: str = ""
    allowed_origins: tuple[str, ...] = ()
    isolate: bool = True
    relay: bool = True
    hit_headers: bool = False
    receipts: bool = False
    retention_s: float = 3600.0
    pass_fields: frozenset[str] = frozenset()
    forward_authorization: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.retention_s <= LONGEST_S:
            raise ConfigError("retention", self.retention_s, "use seconds, 0 to a day")
        if self.metrics_port is None and self.metrics_host != Listening.metrics_host:
            raise ConfigError("metrics-host", self.metrics_host, "name --metrics-port, too")
        for origin in self.allowed_origins:  # as browsers send them
            scheme, _, host = origin.partition("://")
            if origin != "*" and not (scheme and host and not set(host) & set("/ ,?#")):
                fix = "use * or an origin such as https://chat.example.org"
                raise ConfigError("allowed-origin", origin, fix)


@dataclass(frozen=True)
class AdminAccess:
    """Address and token of the admin API; without a token, the API is off. ``token_file``: path
    of the file that has the token, read again when it changes; empty: none. ``tls``: it has the
    certificate of the clients' address."""

    host: str = "127.0.0.1"
    port: int = 8001
    token: str = ""
    token_file: str = ""
    tls: bool = False


@dataclass(frozen=True)
class RouterOptions:
    """Settings of one router; checked when created.

    Attributes:
        prefill, decode: engines of the command line.
        handoff: "push" where the engines can; "pull": decode is asked once prefill has answered;
            "none": all are of the decode role and compute the prompts that they answer.
        push_min_tokens: prompts estimated to be shorter are pulled. Unit: tokens.
        prefill_policy, decode_policy, dp_minimum_tokens: how an engine and rank are chosen.
        disaggregate: whether prompts are handed off, or decode engines compute them alone.
        continuations: how often another engine may continue a stream whose engine was lost.
        auto_roles: engines change their roles as the load asks for it.

    Raises:
        ConfigError: names the flag, its value and the fix.
    """

    prefill: tuple[EngineSpec, ...]
    decode: tuple[EngineSpec, ...]
    handoff: Literal["push", "pull", "none"] = "push"
    push_min_tokens: int = 0
    limits: RouterLimits = RouterLimits()
    sources: Sources = Sources()
    admin: AdminAccess = AdminAccess()
    listening: Listening = Listening()
    prefill_policy: RankingPolicy = RankingPolicy.LEAST_TOKENS
    decode_policy: RankingPolicy = RankingPolicy.LEAST_TOKENS
    dp_minimum_tokens: bool = False
    intervals: Intervals = Intervals()
    disaggregate: Disaggregate = Disaggregate.ALWAYS
    continuations: int = 0
    auto_roles: bool = False

    @property
    def rules(self) -> RoutingRules:
        """What of these settings is about choices."""
        return RoutingRules(
            self.prefill_policy,
            self.decode_policy,
            pull=self.handoff == "pull",
            push_min_tokens=self.push_min_tokens,
            dp_minimum_tokens=self.dp_minimum_tokens,
            disaggregate=self.disaggregate,
        )

    def __post_init__(self) -> None:
        numbers = {"continue": self.continuations, "push-min-tokens": self.push_min_tokens}
        for flag, number in numbers.items():
            if number < 0:
                raise ConfigError(flag, number, "use 0 or more")
        decided = self.disaggregate is not Disaggregate.ALWAYS
        if self.handoff == "none" and (decided or self.auto_roles):
            flag = "disaggregate" if decided else "auto-roles"
            raise ConfigError(flag, "on", "leave it out: with --unified, there is one role")
        if self.admin.tls and not self.listening.cert:
            raise ConfigError("admin-tls", "on", "name --tls-cert and --tls-key, too")


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
        ConfigError: not an http(s) URL of a host, an unknown key, or an invalid value.
    """
    _refuse_credentials(flag, text)
    url, *settings = text.strip().split(",")
    base = url.rstrip("/")
    if not _is_base(base):
        raise ConfigError(flag, text, f"use a URL such as {_EXAMPLE}")
    values: dict[str, EngineKind | int | str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        values["kind" if key == "engine" else key] = _value(flag, key, value)
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


def _refuse_credentials(flag: str, url: str) -> None:
    """Refuse a URL with a user or password; they would appear in logs, responses and metrics."""
    before, at, place = url.rpartition("@")
    if at:
        scheme = before.partition("://")[0] if "://" in before else ""
        hidden = f"{scheme}://...@{place}" if scheme else f"...@{place}"
        raise ConfigError(flag, hidden, "leave user and password out")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises if it is not a number
    except ValueError:
        return False
    if not url.isascii() or not url.isprintable() or " " in url:  # it becomes part of request heads
        return False
    known = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return known and not (parts.query or parts.fragment)
