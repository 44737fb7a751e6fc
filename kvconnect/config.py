"""Configuration: parsed once, strictly, into a frozen struct.

Settings arrive through the engine's own flag (``kv_connector_extra_config`` in vLLM). An unknown
or unusable setting is one :class:`~kvconnect.errors.ConfigError` that names the field, the value
and the fix; nothing is allocated before that.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from kvconnect.errors import ConfigError

DigestMode = Literal["off", "sampled", "full"]
PolicyName = Literal["lru", "s3fifo"]
TransportName = Literal["auto", "tcp", "nixl"]
Spill = Literal["all", "reused"]
LoadWhen = Literal["faster", "always"]
KVLayout = Literal["engine", "blocks_first"]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_LONGEST_S = 86_400
_MOST = {"connections": 16, "max_peers": 4096}
OFF = -1  # of host_bytes: no host tier
AUTO = -1  # of sync_load_bytes: as measured
MOST_PINNED = 0.5  # retained blocks may take as much again
AUTO_HOST_SHARE = 0.25  # leaves room for weights being loaded, page cache and the engine itself


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The host tier: which blocks stay in host memory, and how they get there and back.

    Attributes:
        host_bytes: bytes of host memory of one engine, shared by its workers on this machine.
            ``"auto"``: a quarter of the machine's or container's memory, divided among the
            data-parallel engines on it. ``"off"``: no host tier.
        policy: which block a full tier evicts first. ``lru`` suits conversations. ``s3fifo``
            keeps a working set through long scans of one-off prompts.
        sync_load_bytes: largest load that runs inside the step that needs it, in bytes, all ranks
            together. A larger load runs before that step, while the request waits. ``0``: no load
            runs inside a step. ``"auto"``: a load runs inside the step if, as measured, that delays
            the other requests no longer than waiting for the next step would delay this one.
        store_rate: limit of one worker's stores to host memory, in bytes per second. ``0``: no
            limit. Use it where stores slow down a hand-off or the loading of weights.
        pin_share: largest share of the host tier that requests may pin, 0 to 0.5. They may retain
            as much again. Requests with one ``cache_salt`` may have half of each. ``0``: no request
            may. SGLang ignores it.
        kv_layout: layout of vLLM's KV cache. ``engine``: vLLM's choice, which keeps each layer of a
            block apart. ``blocks_first``: all layers of a block side by side, so that a block is
            copied in one piece; vLLM warns and keeps its own layout if the attention backend does
            not support it. SGLang ignores it.
    """

    host_bytes: int = 0  # "auto"; OFF: "off"
    policy: PolicyName = "lru"
    sync_load_bytes: int = AUTO
    store_rate: int = 0
    pin_share: float = 0.25
    kv_layout: KVLayout = "engine"


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Secondary tiers, behind host memory; there are none unless they are named.

    Attributes:
        disk: settings of the disk tier, such as ``{"path": "/nvme/kv", "capacity": "500GiB"}``.
            ``{}``: no disk tier.
        remote: ``kind`` and settings of a store that engines share, such as
            ``{"kind": "valkey", "address": "10.1.2.3:6379"}``. ``{}``: no shared store.
        cache_peers: engines whose host memory this one may read, and where it serves its own, such
            as ``{"ask": ["10.1.2.4:7900"], "listen": "10.1.2.3:7900"}``. ``{}``: none.
        spill: which blocks of the host tier are written to these tiers. ``all``: every block.
            ``reused``: blocks that were loaded once from host memory.
        load_when: how much of a found prefix is loaded. ``faster``: as much as is expected to be
            faster than computing, by the times measured so far. ``always``: all of it.
        wait_s: seconds that a request waits for its blocks from these tiers at most. After that, it
            is computed.
    """

    disk: dict[str, Any] = {}
    remote: dict[str, Any] = {}
    cache_peers: dict[str, Any] = {}
    spill: Spill = "all"
    load_when: LoadWhen = "faster"
    wait_s: float = 5.0


class DisaggregationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-offs from prefill to decode engines.

    Attributes:
        lease_s: seconds for which a prefill engine keeps the blocks of a finished request until a
            decode engine asks for them.
        mix_weights: ``true``: hand off between engines with other weights too, where both have this
            setting. The answers are of neither model.
    """

    lease_s: float = 30.0
    mix_weights: bool = False


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How engines reach one another for hand-offs.

    Attributes:
        listen: ``IP:PORT`` at which workers listen for workers of other engines, an address of this
            machine that those reach. Rank r listens at port + r; with port 0, each rank takes a
            free port. ``off``: workers do not listen.
        peers: networks that are trusted where there is no ``key_file``, beside loopback, such as
            ``10.0.0.0/8``. ``[]``: none.
        key_file: file with the key that all engines share. Each connection proves it, and tickets
            are signed with it. The file is read again when it changes; ``FILE.also`` may hold a
            second key to accept. Empty: a key of this user on this machine, or none with
            ``peers``.
        tls_dir: folder with ``tls.crt``, ``tls.key`` and ``ca.crt`` for mutual TLS; needs
            ``key_file`` too. Empty: no TLS.
        transport: how pages are sent: ``tcp``, ``nixl``, or ``auto``, the faster of those that both
            sides have. The rates are measured when two workers connect.
        nixl_backend: name of NIXL's plugin, such as ``UCX`` or ``LIBFABRIC``.
        min_rate: lowest rate of a connection, in bytes per second, measured when it is made. A
            slower connection is refused. ``0``: no limit.
        connections: number of TCP data connections to each peer.
        max_peers: number of workers of other engines that may read from one worker. Each costs
            threads and open files.
    """

    listen: str = "127.0.0.1:0"
    peers: tuple[str, ...] = ()
    key_file: str = ""
    tls_dir: str = ""
    transport: TransportName = "auto"
    nixl_backend: str = "UCX"
    min_rate: int = 0
    connections: int = 2
    max_peers: int = 256


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings: one struct per concern, and the two that every transfer has.

    The keys that users write are flat: ``lease_s`` sets ``disaggregation.lease_s``.

    Attributes:
        digest: which blocks get a checksum that is computed when they are stored or sent, and
            verified when they are loaded or received. ``full``: all. ``sampled``: one in 16.
            ``off``: none.
        deadline_s: seconds after which an unfinished transfer has failed. Of a hand-off: seconds
            without progress.
    """

    digest: DigestMode = "sampled"
    deadline_s: float = 30.0
    offload: OffloadConfig = OffloadConfig()
    tiers: TierConfig = TierConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    network: NetworkConfig = NetworkConfig()

    def setting(self, key: str) -> Any:
        """Return the value of a setting by the key that users write."""
        section = SETTINGS[key]
        return getattr(getattr(self, section) if section else self, key)

    def replace(self, **settings: Any) -> Config:
        """Return a copy with other values, which are not checked, for the keys that users write."""
        nested: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            nested.setdefault(SETTINGS[key], {})[key] = value
        whole = nested.pop("", {})
        for section, values in nested.items():
            whole[section] = msgspec.structs.replace(getattr(self, section), **values)
        return msgspec.structs.replace(self, **whole)


SETTINGS: dict[str, str] = {
    **dict.fromkeys(OffloadConfig.__struct_fields__, "offload"),
    **dict.fromkeys(("digest", "deadline_s"), ""),
    **dict.fromkeys(DisaggregationConfig.__struct_fields__, "disaggregation"),
    **dict.fromkeys(TierConfig.__struct_fields__, "tiers"),
    **dict.fromkeys(NetworkConfig.__struct_fields__, "network"),
}
"""Key that users write -> field of :class:`Config` whose struct holds it; "" for Config itself."""


def parse_bytes(field: str, value: object) -> int:
    """Return ``value`` in bytes: an int, or a string such as ``"4GiB"`` or ``"500 MB"``.

    Raises:
        ConfigError: not a size, unknown unit, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(field, value, "use a size of 0 bytes or more")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(field, value, 'write a size such as "4GiB", or a number of bytes')
    number, unit = match.groups()
    if unit not in _UNITS:
        by_lower = {name.lower(): name for name in _UNITS if name}
        near = by_lower[difflib.get_close_matches(unit.lower(), by_lower, n=1, cutoff=0.0)[0]]
        raise ConfigError(field, value, f"unknown unit {unit!r}, did you mean {near!r}?")
    return int(Fraction(number) * _UNITS[unit])


def parse_config(extra: Mapping[str, Any]) -> Config:
    """Parse an engine's extra configuration.

    Raises:
        ConfigError: unknown key (names the nearest one), wrong type or value out of range.
    """
    for key in extra:
        if key not in SETTINGS:
            near = difflib.get_close_matches(str(key), SETTINGS, n=1, cutoff=0.0)
            fix = f"unknown setting, did you mean {near[0]!r}? Known: {', '.join(SETTINGS)}"
            raise ConfigError(key, extra[key], fix)
    values = dict(extra)
    _parse_sizes(values)
    _check_choice(values, "policy", get_args(PolicyName))
    _check_choice(values, "kv_layout", get_args(KVLayout))
    _check_choice(values, "digest", get_args(DigestMode))
    _check_choice(values, "transport", get_args(TransportName))
    _check_choice(values, "spill", get_args(Spill))
    _check_choice(values, "load_when", get_args(LoadWhen))
    _check_tiers(values)
    for field in ("deadline_s", "lease_s", "wait_s"):
        seconds = values.get(field, _LONGEST_S)
        if type(seconds) not in (int, float) or not 0 < seconds <= _LONGEST_S:
            fix = f"use seconds, more than 0 and at most {_LONGEST_S}"
            raise ConfigError(field, seconds, _as_number(seconds, fix))
    mixes = values.get("mix_weights", False)
    if type(mixes) is not bool:
        raise ConfigError("mix_weights", mixes, "use true or false")
    share = values.get("pin_share", 0)
    if type(share) not in (int, float) or not 0 <= share <= MOST_PINNED:
        fix = f"use a share, 0 to {MOST_PINNED}"
        raise ConfigError("pin_share", share, _as_number(share, fix))
    _check_network(values)
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section = SETTINGS[key]
        (nested.setdefault(section, {}) if section else nested)[key] = value
    return msgspec.convert(nested, Config)


_WORDS = {"host_bytes": {"auto": 0, "off": OFF}, "sync_load_bytes": {"auto": AUTO}}
"""Words that users may write instead of a size, and the value that stands for them."""


def _parse_sizes(values: dict[str, Any]) -> None:
    """Replace sizes, and the words for them, by bytes."""
    for field in ("host_bytes", "sync_load_bytes", "min_rate", "store_rate"):
        if field not in values:
            continue
        given, words = values[field], _WORDS.get(field, {})
        word = isinstance(given, str) and given in words
        values[field] = words[given] if word else parse_bytes(field, given)
        if field == "host_bytes" and values[field] == 0 and given != "auto":
            raise ConfigError(field, given, 'use a size, "auto" or "off"')


def _check_tiers(values: Mapping[str, Any]) -> None:
    """Check the tiers' settings, but for those that each store checks itself."""
    for field in ("disk", "remote", "cache_peers"):
        settings = values.get(field, {})
        if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
            raise ConfigError(field, settings, 'use an object such as {"path": "/nvme/kv"}')
        if settings and values.get("host_bytes") == OFF:
            fix = "blocks come and go through host memory: give host_bytes a size"
            raise ConfigError(field, settings, fix)
    remote = values.get("remote", {})
    if remote and not isinstance(remote.get("kind"), str):
        raise ConfigError("remote", remote, 'name its kind, such as "valkey" or "object"')
    if remote.get("kind") == "disk":
        raise ConfigError("remote", remote, "the disk tier has a setting of its own: disk")


def config_from_environment(environ: Mapping[str, str]) -> Config:
    """Parse ``KVCONNECT_CONFIG``, the settings of engines that have no flag for them: a JSON
    object, or ``@`` and the path of a file that holds one. If unset, defaults apply.

    Raises:
        ConfigError: as :func:`parse_config`, or no JSON object there.
    """
    text = environ.get("KVCONNECT_CONFIG", "{}")
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text()
        extra = msgspec.json.decode(text, type=dict[str, Any])
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        fix = f'use a JSON object such as {{"transport": "tcp"}}, or @FILE: {error}'
        raise ConfigError("KVCONNECT_CONFIG", "...", fix) from error  # secrets may stand in it
    return parse_config(extra)


def _as_number(value: object, fix: str) -> str:
    """Return what to do instead of ``value``, which may be a number in quotes."""
    return f"{fix}, as a number, not text" if isinstance(value, str) else fix


def _check_network(values: dict[str, Any]) -> None:
    for field, most in _MOST.items():
        value = values.get(field, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(field, value, _as_number(value, f"use 1 to {most}"))
    for field, what in (("key_file", "path"), ("tls_dir", "path"), ("nixl_backend", "name")):
        if not isinstance(values.get(field, ""), str):
            raise ConfigError(field, values[field], f"use a {what}")
    listen_address(values.get("listen", "off"))
    peers = values.get("peers", ())
    if not isinstance(peers, list | tuple):
        raise ConfigError("peers", peers, 'use a list of networks such as ["10.0.0.0/8"]')
    for peer in peers:
        try:
            ipaddress.ip_network(peer)
        except ValueError as error:
            raise ConfigError(
                "peers", peer, f'use networks such as "10.0.0.0/8": {error}'
            ) from error


def listen_address(value: object) -> tuple[str, int] | None:
    """Return (host, port) of a ``listen`` setting, None for ``off``.

    Raises:
        ConfigError: not an IP address and a port, or a wildcard address.
    """
    if value == "off":
        return None
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        number = int(port)
    except ValueError as error:
        fix = 'use an IP address and a port such as "10.1.2.3:14580", or "off"'
        raise ConfigError("listen", value, fix) from error
    if address.is_unspecified or not 0 <= number < 2**16:
        fix = "name the address of this machine that peers reach, and a port under 65536"
        raise ConfigError("listen", value, fix)
    return str(address), number


def _check_choice(values: Mapping[str, Any], field: str, choices: tuple[str, ...]) -> None:
    value = values.get(field, choices[0])
    if value not in choices:
        raise ConfigError(field, value, f"use one of {', '.join(choices)}")


def share_of_host_bytes(config: OffloadConfig, *, memory_bytes: int | None, engines: int) -> int:
    """Return one engine's host tier in bytes.

    Args:
        memory_bytes: memory of the machine or container; None if the system does not say.
        engines: data-parallel engines on this machine, among which ``auto`` is divided.

    Raises:
        ConfigError: ``auto`` on a system that does not say how much memory it has.
    """
    if config.host_bytes == OFF:
        return 0
    if config.host_bytes:
        return config.host_bytes
    if memory_bytes is None:
        raise ConfigError("host_bytes", "auto", "the memory size is unknown here; set a size")
    return int(memory_bytes * AUTO_HOST_SHARE) // max(engines, 1)


def check_fits(host_bytes: int, *, memory_bytes: int | None, what: str) -> None:
    """Refuse a host tier that the memory cannot hold, before it is allocated.

    Args:
        what: which memory that is, for the message: ``"in this machine"``.

    Raises:
        ConfigError: more bytes than there are.
    """
    if memory_bytes is not None and host_bytes > memory_bytes:
        gib = f"{memory_bytes / 2**30:.1f} GiB"
        raise ConfigError("host_bytes", host_bytes, f"there are only {gib} {what}; use less")
