"""The settings of an engine as one flat struct."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvconnect.settings.addresses import Listen, check_networks
from kvconnect.settings.quantities import SIZE_SCHEMA, Flag, Path, Rule, Seconds, Size
from kvconnect.settings.sharing import PeerSettings
from kvconnect.settings.stores import Conflict, DiskSettings, PolicyName, RemoteSettings

DigestMode = Literal["off", "sampled", "full"]
TransportName = Literal["auto", "tcp", "nixl"]
Spill = Literal["all", "reused"]
LoadWhen = Literal["faster", "always"]
KVLayout = Literal["engine", "blocks_first"]

MOST_PINNED = 0.5  # retained blocks may take as much again

_Positive = Annotated[int, Meta(ge=1, le=2**60, extra_json_schema=SIZE_SCHEMA)]
_HostBytes = Annotated[
    _Positive | Literal["auto", "off"], Rule('use a size, "auto" or "off"', size=True)
]
_SyncBytes = Annotated[Size | Literal["auto"], Rule('use a size or "auto"', size=True)]
_Share = Annotated[float, Meta(ge=0, le=MOST_PINNED), Rule(f"use a share, 0 to {MOST_PINNED}")]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of an engine.

    Attributes:
        config_file: JSON file, or YAML file (``.yaml``, ``.yml``), with settings. Those of the
            engine's flag and of ``KVCONNECT_CONFIG`` take precedence. Empty: none.
        host_bytes: bytes of host memory of one engine, shared by its workers on this machine.
            ``"auto"``: a quarter of the machine's or container's memory, divided among the
            data-parallel engines on it. ``"off"``: no host tier.
        policy: which block full host memory evicts first. ``lru`` suits conversations. ``s3fifo``
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
        digest: which blocks get a checksum that is computed when they are stored or sent, and
            verified when they are loaded or received. ``full``: all. ``sampled``: one in 16.
            ``off``: none.
        deadline_s: seconds after which an unfinished transfer has failed. Of a hand-off: seconds
            without progress.
        lease_s: seconds for which a prefill engine keeps the blocks of a finished request until a
            decode engine asks for them.
        mix_weights: ``true``: hand off between engines with other weights too, where both have this
            setting. The answers are of neither model.
        disk: settings of the disk tier, such as ``{"path": "/nvme/kv", "capacity": "500GiB"}``.
            ``{}``: no disk tier.
        remote: ``kind`` and settings of a store that engines share, such as
            ``{"kind": "valkey", "address": "10.1.2.3:6379"}``. ``{}``: no shared store.
        cache_peers: engines whose host memory this one may read, and whether it serves its own,
            such as ``{"ask": ["10.1.2.4:14580"], "serve": true}``. ``{}``: none.
        spill: which blocks of the host tier are written to these tiers. ``all``: every block.
            ``reused``: blocks that were loaded once from host memory.
        load_when: how much of a found prefix is loaded. ``faster``: as much as is expected to be
            faster than computing, by the times measured so far. ``always``: all of it.
        wait_s: seconds that a request waits for its blocks from these tiers at most. After that, it
            is computed.
        listen: ``IP:PORT`` at which workers listen for workers of other engines, for hand-offs and
            with ``serve`` of ``cache_peers`` for blocks of host memory. An address of this machine
            that those reach. Rank r listens at port + r, counted over all data-parallel engines;
            with port 0, each rank takes a free port. ``off``: workers do not listen.
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

    config_file: Path = ""

    host_bytes: _HostBytes = "auto"
    policy: PolicyName = "lru"
    sync_load_bytes: _SyncBytes = "auto"
    store_rate: Size = 0
    pin_share: _Share = 0.25
    kv_layout: KVLayout = "engine"
    digest: DigestMode = "sampled"
    deadline_s: Seconds = 30.0

    lease_s: Seconds = 30.0
    mix_weights: Flag = False

    disk: DiskSettings | None = None
    remote: RemoteSettings | None = None
    cache_peers: PeerSettings | None = None
    spill: Spill = "all"
    load_when: LoadWhen = "faster"
    wait_s: Seconds = 5.0

    listen: Listen = "127.0.0.1:0"
    peers: Annotated[
        tuple[str, ...],
        Rule('use a list of networks such as ["10.0.0.0/8"]', check=check_networks),
    ] = ()
    key_file: Path = ""
    tls_dir: Path = ""
    transport: TransportName = "auto"
    nixl_backend: Annotated[str, Rule("use a name")] = "UCX"
    min_rate: Size = 0
    connections: Annotated[int, Meta(ge=1, le=16), Rule("use 1 to 16")] = 2
    max_peers: Annotated[int, Meta(ge=1, le=4096), Rule("use 1 to 4096")] = 256

    @property
    def has_tiers(self) -> bool:
        """Whether there is a tier behind host memory."""
        return any(tier is not None for tier in (self.disk, self.remote, self.cache_peers))

    def conflicts(self) -> Iterator[Conflict]:
        """Yield settings that do not go together."""
        for field in ("disk", "remote", "cache_peers"):
            if self.host_bytes == "off" and (tier := getattr(self, field)) is not None:
                fix = "blocks come and go through host memory: give host_bytes a size"
                yield field, msgspec.to_builtins(tier), fix
        if self.cache_peers is not None and self.cache_peers.serve and self.listen == "off":
            yield "listen", self.listen, "name the address where cache_peers.serve serves"
        if self.tls_dir and not self.key_file:
            yield "key_file", "", "set it beside tls_dir: tickets are signed with it"
