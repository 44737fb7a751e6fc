"""The flags of ``kvconnect router``."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvconnect.errors import ConfigError
from kvconnect.router import flag_sources
from kvconnect.router.credentials import read_admin_token, read_api_keys
from kvconnect.router.engine_spec import check_hosts, engine_specs
from kvconnect.router.options import (
    AdminAccess,
    EtcdServer,
    Intervals,
    Listening,
    RouterLimits,
    RouterOptions,
    Sources,
)
from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.policy.ranking import RankingPolicy
from kvconnect.router.requests.fields import check_named
from kvconnect.secret_files import read_secret_text
from kvconnect.terminal import LOG_FORMATS, LOG_LEVELS

EXAMPLES = """\
examples:
  one engine for prefill, one for decode:
    kvconnect router --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000
  engines that compute the prompts that they answer:
    kvconnect router --unified --decode http://10.0.0.1:8000 http://10.0.0.2:8000
  clients with keys, and engines of a Kubernetes service:
    kvconnect router --host 0.0.0.0 --api-key-file keys --prefill-kubernetes http://prefill:8000 \\
      --decode-kubernetes http://decode:8000

docs/router.md describes each flag, the admin API and the metrics.
"""

_ENGINE = (
    "URL[,engine=vllm|nixl|mooncake|sglang][,bootstrap=PORT][,version=TEXT]"
    "[,events=PORT][,replay=PORT]; grpc://HOST:PORT of SGLang"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag_sources.remember_given(parser)
    text = "YAML or JSON file with flags; those given here and in KVCONNECT_ROUTER_FLAG count first"
    parser.add_argument("--config", default="", metavar="PATH", help=text)
    _add_logging(parser)
    _add_engines(parser.add_argument_group("engines"))
    _add_admin(parser.add_argument_group("admin API"))
    _add_listening(parser.add_argument_group("clients"))
    _add_choices(parser.add_argument_group("choice of engines"))
    _add_limits(parser.add_argument_group("limits"))


def extras_of(arguments: argparse.Namespace) -> list[str]:
    """Return the extras of kvconnect that parsed flags need."""
    kubernetes = arguments.prefill_kubernetes or arguments.decode_kubernetes
    sources = {"kubernetes": kubernetes, "etcd": arguments.etcd}
    return ["router", *(extra for extra, named in sources.items() if named)]


def options_of(arguments: argparse.Namespace) -> RouterOptions:
    """Return the options in parsed flags.

    Raises:
        ConfigError: names the flag, its value and the fix.
    """
    sources = _sources_of(arguments)
    options = RouterOptions(
        engine_specs("prefill", arguments.prefill),
        engine_specs("decode", arguments.decode),
        handoff="none" if arguments.unified else "pull" if arguments.pull else "push",
        push_min_tokens=arguments.push_min_tokens,
        limits=RouterLimits(
            arguments.timeout,
            arguments.silence_timeout,
            arguments.max_concurrent,
            arguments.queue,
            arguments.queue_timeout,
            arguments.drain_timeout,
            arguments.client_concurrent,
            arguments.max_body,
            arguments.comment_after,
        ),
        sources=sources,
        admin=_admin_of(arguments),
        listening=_listening_of(arguments),
        prefill_policy=RankingPolicy(arguments.prefill_policy),
        decode_policy=arguments.decode_policy and RankingPolicy(arguments.decode_policy),
        dp_minimum_tokens=arguments.dp_minimum_tokens_scheduler,
        intervals=Intervals(arguments.worker_load_check_interval, arguments.probe_interval),
        disaggregate=Disaggregate(arguments.disaggregate),
        continuations=vars(arguments)["continue"],
        auto_roles=arguments.auto_roles,
    )
    later = bool(sources.file or sources.etcd or options.admin.token)
    for role, named in ((Role.PREFILL, options.prefill), (Role.DECODE, options.decode)):
        found = named or role in sources.dns or role in sources.services
        if role is Role.PREFILL and options.handoff == "none":
            if found:
                raise ConfigError("unified", "on", "name no prefill engines beside it")
        elif not (later or found):
            fix = "name an engine, or where to find some, or an admin token"
            raise ConfigError(role.value, "", fix)
    return options


def _sources_of(arguments: argparse.Namespace) -> Sources:
    hosts: dict[str, dict[Role, tuple[str, ...]]] = {"dns": {}, "kubernetes": {}}
    for kind, by_role in hosts.items():
        for role in Role:
            flag, named = f"{role.value}-{kind}", getattr(arguments, f"{role.value}_{kind}")
            if named:
                by_role[role] = check_hosts(flag, named)
    if path := arguments.workers_file:
        try:
            Path(path).open("rb").close()
        except OSError as error:
            fix = f"name a file that can be read: {error.strerror}"
            raise ConfigError("workers-file", path, fix) from error
    etcd = _etcd_of(arguments)
    return Sources(arguments.workers_file, hosts["dns"], hosts["kubernetes"], etcd)


def _etcd_of(arguments: argparse.Namespace) -> EtcdServer | None:
    url, user, path = arguments.etcd, arguments.etcd_user, arguments.etcd_password_file
    if not url:
        for flag in ("etcd_tls_dir", "etcd_user", "etcd_password_file"):
            if value := getattr(arguments, flag):
                raise ConfigError(flag.replace("_", "-"), value, "set --etcd, too")
        return None
    password = read_secret_text("etcd-password-file", path).strip() if path else ""
    authority, certificate = "", None
    if folder := arguments.etcd_tls_dir:
        ca, cert, key = (Path(folder, name) for name in ("ca.crt", "tls.crt", "tls.key"))
        if not ca.is_file():
            raise ConfigError("etcd-tls-dir", folder, "put the file ca.crt there")
        if cert.is_file() != key.is_file():
            raise ConfigError("etcd-tls-dir", folder, "put both tls.crt and tls.key there")
        authority = str(ca)
        certificate = (str(cert), str(key)) if cert.is_file() else None
    return EtcdServer(url, authority, certificate, user, password)


def _admin_of(arguments: argparse.Namespace) -> AdminAccess:
    path = arguments.admin_token_file
    if not path:
        return AdminAccess()
    token, tls = read_admin_token(path), arguments.admin_tls
    return AdminAccess(arguments.admin_host, arguments.admin_port, token, path, tls)


def _listening_of(arguments: argparse.Namespace) -> Listening:
    path, cert, key = arguments.api_key_file, arguments.tls_cert, arguments.tls_key
    if bool(cert) != bool(key):
        raise ConfigError("tls-cert", cert, "name --tls-cert and --tls-key, or neither")
    return Listening(
        host=arguments.host,
        port=arguments.port,
        shared=arguments.shared_port,
        cert=cert,
        key=key,
        api_keys=read_api_keys(path) if path else (),
        api_key_file=path,
        allowed_origins=tuple(arguments.allowed_origin),
        isolate=not arguments.shared_cache,
        relay=not arguments.no_relay,
        hit_headers=arguments.hit_headers,
        receipts=arguments.receipts,
        retention_s=arguments.retention,
        pass_fields=check_named(arguments.pass_field),
        forward_authorization=arguments.forward_authorization,
        metrics_host=arguments.metrics_host,
        metrics_port=arguments.metrics_port,
    )


def _add_logging(parser: argparse.ArgumentParser) -> None:
    for flag, choices, default in (
        ("--log-level", LOG_LEVELS, "info"),
        ("--log-format", LOG_FORMATS, "text"),
    ):
        parser.add_argument(flag, choices=choices, default=default, help="(default: %(default)s)")


def _add_engines(parser: argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    add("--prefill", nargs="+", default=[], metavar="W", help=f"engines that prefill: {_ENGINE}")
    add("--decode", nargs="+", default=[], metavar="W", help="engines that decode")
    add(
        "--workers-file",
        default="",
        metavar="PATH",
        help='file of engines, "prefill W" or "decode W" a line; read again when it changes',
    )
    for role in ("prefill", "decode"):
        what = f"{role} engines: one at every address of the URL's host, looked up again"
        add(f"--{role}-dns", nargs="+", default=[], metavar="W", help=what)
        what = f"{role} engines: the ready endpoints of the Kubernetes service in the URL's host"
        add(f"--{role}-kubernetes", nargs="+", default=[], metavar="W", help=what)
    add("--etcd", default="", metavar="URL", help="etcd, and the prefix of keys that name engines")
    what = "folder with ca.crt, and with tls.crt and tls.key if etcd requires them"
    add("--etcd-tls-dir", default="", metavar="PATH", help=what)
    add("--etcd-user", default="", metavar="NAME", help="who the router is at etcd")
    add("--etcd-password-file", default="", metavar="PATH", help="password of that user")


def _add_admin(parser: argparse._ArgumentGroup) -> None:
    access, add = AdminAccess(), parser.add_argument
    add("--admin-token-file", default="", metavar="PATH", help="token for the admin API, else off")
    add("--admin-host", default=access.host, help="where it listens (default: %(default)s)")
    add("--admin-port", type=port, default=access.port, help="(default: %(default)s)")
    add("--admin-tls", action="store_true", help="with the certificate of --tls-cert")


def _add_listening(parser: argparse._ArgumentGroup) -> None:
    default, add = Listening(), parser.add_argument
    add("--host", default=default.host, help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=default.port, help="port (default: %(default)s)")
    add("--shared-port", action="store_true", help="other routers may listen at this port too")
    add("--tls-cert", default="", metavar="PATH", help="certificate chain, to serve HTTPS")
    add("--tls-key", default="", metavar="PATH", help="private key of the certificate")
    add(
        "--api-key-file",
        default="",
        metavar="PATH",
        help="clients' keys, KEY or NAME KEY [priority] [disaggregate] [weight=N] a line",
    )
    what = "serve /metrics at this port alone, and no longer beside the clients' paths"
    add("--metrics-port", type=port, default=None, metavar="PORT", help=what)
    what = "address of that port (default: %(default)s)"
    add("--metrics-host", default=default.metrics_host, help=what)
    what = "pages of these origins may use the router from a browser; '*': of all"
    add("--allowed-origin", nargs="+", default=[], metavar="ORIGIN", help=what)
    what = "fields of requests that reach engines although the router does not know them"
    add("--pass-field", nargs="+", default=[], metavar="NAME", help=what)
    what = "send the clients' Authorization header on to engines"
    add("--forward-authorization", action="store_true", help=what)
    what = "clients with different keys may use each other's cached KV"
    add("--shared-cache", action="store_true", help=what)
    what = "pass streams on in Python also where native code can do it"
    add("--no-relay", action="store_true", help=what)
    what = "tell clients how much of a prompt engines are expected to have cached"
    add("--hit-headers", action="store_true", help=what)
    what = "tell clients where the tokens of their prompts came from, as the decode engine says"
    add("--receipts", action="store_true", help=what)
    what = "seconds that clients may have a prompt's KV retained at most (default: %(default)s)"
    add("--retention", type=float, default=default.retention_s, metavar="S", help=what)


def _add_choices(parser: argparse._ArgumentGroup) -> None:
    default, add = RouterOptions((), ()), parser.add_argument
    exclusive = parser.add_mutually_exclusive_group()
    what = "engines compute the prompts that they answer: name all with --decode, no hand-offs"
    exclusive.add_argument("--unified", action="store_true", help=what)
    what = "ask decode only after prefill has answered"
    exclusive.add_argument("--pull", action="store_true", help=what)
    what = (
        "hand prompts off, have decode engines compute them, or take what is expected sooner for "
        "each (default: %(default)s)"
    )
    rules = [rule.value for rule in Disaggregate]
    add("--disaggregate", choices=rules, default=default.disaggregate.value, help=what)
    what = "vLLM's engines change between prefill and decode as prompts wait"
    add("--auto-roles", action="store_true", help=what)
    add(
        "--push-min-tokens",
        type=int,
        default=default.push_min_tokens,
        metavar="N",
        help="pull for prompts estimated to be shorter (default: %(default)s, always push)",
    )
    what = "how often another engine may continue a stream whose decode engine was lost"
    what = f"{what} (default: %(default)s)"
    add("--continue", type=int, default=default.continuations, metavar="N", help=what)
    policies = [policy.value for policy in RankingPolicy]
    what = "how a prefill engine and rank are picked (default: %(default)s)"
    add("--prefill-policy", choices=policies, default=default.prefill_policy.value, help=what)
    what = (
        "how a decode engine and rank are picked (default: least_tokens; cache_aware under "
        "--unified and --disaggregate never)"
    )
    add("--decode-policy", choices=policies, help=what)
    add(
        "--dp-minimum-tokens-scheduler",
        action="store_true",
        help="under round_robin and random, take the rank with the fewest tokens",
    )
    for flag, seconds, what in (
        (
            "worker-load-check-interval",
            default.intervals.load_s,
            "queries of an engine's load, 0: one query each time it comes up",
        ),
        (
            "probe-interval",
            default.intervals.probe_s,
            "probes of an engine's hand-off, 0: no probes",
        ),
    ):
        text = f"seconds between {what} (default: %(default)s)"
        add(f"--{flag}", type=float, default=seconds, metavar="S", help=text)


def _add_limits(parser: argparse._ArgumentGroup) -> None:
    default = RouterLimits()
    for flag, value, text in (
        ("timeout", default.timeout_s, "until a whole answer, or the first token of a stream"),
        (
            "silence-timeout",
            default.silence_s,
            "that an engine may send nothing after its first token, or while it is down",
        ),
        ("queue-timeout", default.queue_s, "that a request may wait for its turn"),
        ("drain-timeout", default.drain_s, "that open requests have when the router is stopped"),
    ):
        text = f"seconds {text} (default: %(default)s)"
        parser.add_argument(f"--{flag}", type=float, default=value, metavar="S", help=text)
    for flag, number, text in (
        ("max-concurrent", default.concurrent, "requests worked on at a time, 0: any number"),
        ("queue", default.queue, "requests that may wait for their turn, else 429"),
        (
            "client-concurrent",
            default.client_concurrent,
            "open requests of a client, 0: any number",
        ),
    ):
        text = f"{text} (default: %(default)s)"
        parser.add_argument(f"--{flag}", type=int, default=number, metavar="N", help=text)
    text = "seconds without data after which a stream gets a comment, 0: never (default: 0)"
    parser.add_argument(
        "--comment-after", type=float, default=default.comment_s, metavar="S", help=text
    )
    text = "MiB that a request's body may have (default: %(default)s)"
    parser.add_argument(
        "--max-body", type=float, default=default.body_mib, metavar="MIB", help=text
    )


def port(text: str) -> int:
    """Return the port in ``text``, 0 to 65535.

    Raises:
        argparse.ArgumentTypeError: out of range.
    """
    if not 0 <= int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return int(text)
