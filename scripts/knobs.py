"""Who sets each setting and each flag of the router, and why its value is not a constant."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from kvconnect.router.flags import add_flags
from kvconnect.settings import Settings
from kvconnect.settings.sharing import PeerSettings
from kvconnect.settings.stores import (
    DiskSettings,
    MooncakeSettings,
    ObjectSettings,
    ValkeySettings,
)

STRUCTS: dict[str, type[Any]] = {
    "": Settings,
    "disk.": DiskSettings,
    "cache_peers.": PeerSettings,
    "remote (valkey).": ValkeySettings,
    "remote (object).": ObjectSettings,
    "remote (mooncake).": MooncakeSettings,
}
"""Prefix of the settings in a table -> their struct."""

_EVERYBODY = "everybody"
_FLEET = "who runs a fleet"
_SECURITY = "who answers for security"
_DISK = "who has disks for KV"
_STORE = "who has a shared store"
_TUNING = "who tunes latency"
_TENANTS = "who serves several tenants"

KNOBS: dict[str, tuple[str, str]] = {
    "config_file": (_FLEET, "engines share settings"),
    "host_bytes": (_EVERYBODY, "memory that the engine may take depends on the machine"),
    "policy": (_TUNING, "conversations and scans of one-off prompts want different ones"),
    "sync_load_bytes": (_TUNING, "one request's first token against the others' next ones"),
    "store_rate": (_TUNING, "stores and hand-offs share a memory bus"),
    "pin_share": (_TENANTS, "clients' pins against what all others have cached"),
    "kv_layout": (_TUNING, "faster copies, if the attention backend has the layout"),
    "digest": (_EVERYBODY, "how much checking costs what the hardware may do wrong"),
    "deadline_s": (_FLEET, "a slow link needs longer, a client may wait less"),
    "lease_s": (_FLEET, "memory of prefill engines against slow decode engines"),
    "mix_weights": ("who updates weights in training", "engines differ for a while on purpose"),
    "disk": (_DISK, "there may be none"),
    "remote": (_STORE, "there may be none"),
    "cache_peers": (_FLEET, "which engines share is a choice"),
    "spill": (_DISK, "writes wear a disk out"),
    "load_when": (_TUNING, "`always` measures a tier, or saves computing where time is no aim"),
    "wait_s": (_TUNING, "how long a request may wait before it is computed"),
    "listen": (_FLEET, "addresses differ"),
    "peers": (_SECURITY, "a trusted network without keys"),
    "key_file": (_SECURITY, "a key per fleet"),
    "tls_dir": (_SECURITY, "certificates differ"),
    "transport": (_FLEET, "a network card may have a faster one, or a broken one"),
    "nixl_backend": (_FLEET, "clouds have plugins of their own"),
    "min_rate": (_FLEET, "what counts as a broken link depends on the link"),
    "connections": (_FLEET, "links of 100 Gbit/s and more take several streams"),
    "max_peers": (_FLEET, "decode ranks that one prefill rank serves"),
    "disk.path": (_DISK, "folders differ"),
    "disk.capacity": (_DISK, "disks differ"),
    "disk.ttl_s": (_SECURITY, "how long prompts may stay on a disk"),
    "disk.daily_write_bytes": (_DISK, "a disk's life in bytes written"),
    "disk.min_free": (_DISK, "others use the file system too"),
    "disk.tenant_share": (_TENANTS, "one tenant must not fill the disk"),
    "cache_peers.ask": (_FLEET, "addresses differ"),
    "cache_peers.serve": (_FLEET, "an engine may read blocks without serving its own"),
    "cache_peers.listen": (_FLEET, "a second port, accepted for one more version"),
    "cache_peers.ask_s": (_FLEET, "round-trip times differ"),
    "cache_peers.serve_rate": (_FLEET, "a link that hand-offs use too"),
    "cache_peers.same_machine": (_SECURITY, "whether engines may read each other's memory"),
    "cache_peers.page_tokens": (_FLEET, "engines with different block sizes"),
    "remote (valkey).address": (_STORE, "addresses differ"),
    "remote (valkey).cluster": (_STORE, "servers and clusters speak differently"),
    "remote (valkey).user": (_SECURITY, "logins differ"),
    "remote (valkey).password_file": (_SECURITY, "logins differ"),
    "remote (valkey).tls_dir": (_SECURITY, "certificates differ"),
    "remote (valkey).tls_name": (_SECURITY, "nodes that announce IP addresses"),
    "remote (valkey).prefix": (_STORE, "several fleets on one server"),
    "remote (valkey).timeout_s": (_STORE, "round-trip times differ"),
    "remote (valkey).ttl_s": (_SECURITY, "how long prompts may stay on a server"),
    "remote (object).url": (_STORE, "buckets differ"),
    "remote (object).config_file": (_SECURITY, "credentials that are not in the environment"),
    "remote (object).prefix": (_STORE, "several fleets in one bucket"),
    "remote (object).timeout_s": (_STORE, "round-trip times differ"),
    "remote (object).connections": (_STORE, "bandwidth times round-trip time"),
    "remote (mooncake).address": (_STORE, "addresses differ"),
    "remote (mooncake).prefix": (_STORE, "several fleets in one store"),
    "remote (mooncake).timeout_s": (_STORE, "round-trip times differ"),
    "remote (mooncake).buffer": (_STORE, "blocks of large models"),
    "--config": (_FLEET, "routers share flags"),
    "--log-level": (_FLEET, "what is looked for differs"),
    "--log-format": (_FLEET, "what collects logs differs"),
    "--prefill": (_EVERYBODY, "addresses differ"),
    "--decode": (_EVERYBODY, "addresses differ"),
    "--workers-file": (_FLEET, "engines come and go"),
    "--prefill-dns": (_FLEET, "engines come and go, as names say"),
    "--decode-dns": (_FLEET, "engines come and go, as names say"),
    "--prefill-kubernetes": (_FLEET, "engines come and go, as Kubernetes says"),
    "--decode-kubernetes": (_FLEET, "engines come and go, as Kubernetes says"),
    "--etcd": (_FLEET, "engines come and go, as etcd says"),
    "--etcd-tls-dir": (_SECURITY, "certificates differ"),
    "--etcd-user": (_SECURITY, "logins differ"),
    "--etcd-password-file": (_SECURITY, "logins differ"),
    "--admin-token-file": (_SECURITY, "the admin API is off without"),
    "--admin-host": (_SECURITY, "who reaches the admin API"),
    "--admin-port": (_FLEET, "ports in use"),
    "--admin-tls": (_SECURITY, "admin tools on other machines"),
    "--host": (_EVERYBODY, "who reaches the router"),
    "--port": (_EVERYBODY, "ports in use"),
    "--shared-port": (_FLEET, "several routers on one machine"),
    "--tls-cert": (_SECURITY, "certificates differ"),
    "--tls-key": (_SECURITY, "certificates differ"),
    "--api-key-file": (_TENANTS, "clients differ"),
    "--metrics-port": (_SECURITY, "metrics name all engines"),
    "--metrics-host": (_SECURITY, "who reaches the metrics"),
    "--allowed-origin": (_FLEET, "chat pages in browsers"),
    "--pass-field": (_FLEET, "fields of an engine's own extensions"),
    "--forward-authorization": (_FLEET, "engines with keys of their own"),
    "--shared-cache": (_TENANTS, "clients that trust each other"),
    "--no-relay": (_EVERYBODY, "to see whether a fault is of native code"),
    "--hit-headers": (_TENANTS, "telling hits tells of others' prompts"),
    "--receipts": (_TENANTS, "telling hits tells of others' prompts"),
    "--retention": (_TENANTS, "how long a client may take memory"),
    "--unified": (_FLEET, "engines that prefill and decode"),
    "--pull": (_FLEET, "engines that push badly"),
    "--disaggregate": (_TUNING, "where a hand-off pays depends on engines, link and prompts"),
    "--auto-roles": (_FLEET, "engines that can do both, and loads that change"),
    "--push-min-tokens": (_TUNING, "where pushing pays depends on engines and link"),
    "--continue": (_FLEET, "streams that survive engines, for the router's CPU time"),
    "--prefill-policy": (_TUNING, "cached prefixes against even load"),
    "--decode-policy": (_TUNING, "cached prefixes against even load"),
    "--dp-minimum-tokens-scheduler": ("who comes from SGLang's router", "the flag of that router"),
    "--worker-load-check-interval": ("who comes from SGLang's router", "the flag of that router"),
    "--probe-interval": (_FLEET, "how soon a broken pair is found, for how many probes"),
    "--timeout": (_FLEET, "long answers"),
    "--silence-timeout": (_FLEET, "long prompts"),
    "--comment-after": (_FLEET, "proxies that end silent streams, for errors by status"),
    "--queue-timeout": (_FLEET, "how long a client waits"),
    "--drain-timeout": (_FLEET, "the grace period of what stops the router"),
    "--max-concurrent": (_FLEET, "engines' memory"),
    "--queue": (_FLEET, "the router's memory, and how long a client waits"),
    "--client-concurrent": (_TENANTS, "one client must not take all"),
    "--max-body": (_TENANTS, "images in requests"),
}
"""Setting, or flag of the router -> who sets it, and why its value depends on the place."""


def names() -> Iterator[str]:
    """Yield all settings and flags of the router, in the order of their definition."""
    for prefix, struct in STRUCTS.items():
        yield from (f"{prefix}{name}" for name in struct.__struct_fields__)
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    for name in vars(parser.parse_args([])):
        yield f"--{name.replace('_', '-')}"


def table() -> str:
    """Return the table of the documentation."""
    rows = ["| knob | who sets it | why it is no constant |", "|---|---|---|"]
    rows += [f"| `{name}` | {KNOBS[name][0]} | {KNOBS[name][1]} |" for name in names()]
    return "\n".join(rows)
