"""Options of the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from kvconnect.errors import ConfigError
from kvconnect.protocol.cache_hints import LONGEST_S
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.engine_spec import EngineSpec, is_base_url, refuse_credentials
from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.policy.ranking import RankingPolicy
from kvconnect.router.policy.rules import RoutingRules


@dataclass(frozen=True)
class RouterLimits:
    """Limits of load and time; checked when created.

    Attributes:
        timeout_s: seconds from a request's first byte to the last one of a whole answer, or to the
            first token of a stream.
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
        refuse_credentials("etcd", self.url)
        parts = urlsplit(self.url)
        if not (is_base_url(self.url) and parts.path.strip("/")):
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
            ``decode_policy`` None: by cached prefixes where decode engines compute all prompts,
            else by tokens.
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
    prefill_policy: RankingPolicy = RankingPolicy.CACHE_AWARE
    decode_policy: RankingPolicy | None = None
    dp_minimum_tokens: bool = False
    intervals: Intervals = Intervals()
    disaggregate: Disaggregate = Disaggregate.ALWAYS
    continuations: int = 0
    auto_roles: bool = False

    @property
    def rules(self) -> RoutingRules:
        """What of these settings is about choices."""
        alone = self.handoff == "none" or self.disaggregate is Disaggregate.NEVER
        default = RankingPolicy.CACHE_AWARE if alone else RankingPolicy.LEAST_TOKENS
        return RoutingRules(
            self.prefill_policy,
            self.decode_policy or default,
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
