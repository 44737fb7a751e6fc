"""Settings of the stores behind host memory: the disk tier, and one struct per kind of remote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvconnect.settings.addresses import server_address, server_addresses
from kvconnect.settings.quantities import SIZE_SCHEMA, Flag, Path, Rule, Size

PolicyName = Literal["lru", "s3fifo"]

Conflict = tuple[str, object, str]
"""Field, value and fix of two settings that do not go together."""

_LEAST_BYTES = 16 << 20
_MOST_S = 2**31 - 1

_Name = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}$(?!\n)"),
    Rule("use 1 to 64 letters, digits and _ . : -"),
]
_Prefix = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(/[A-Za-z0-9_-]{1,64}){0,4}$(?!\n)"),
    Rule("use 1 to 64 letters, digits, _ and -, or some of those with / between them"),
]
_Timeout = Annotated[float, Meta(gt=0, le=60), Rule("use seconds, more than 0 and at most 60")]
_AtLeast16MiB = Annotated[
    int,
    Meta(ge=_LEAST_BYTES, le=2**60, extra_json_schema=SIZE_SCHEMA),
    Rule('use "16MiB" or more, at most 2**60 bytes', size=True),
]


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The disk tier.

    Attributes:
        path: folder of the tier, on a local disk; created if it is missing.
        capacity: limit of the bytes that each worker keeps there, indexes included.
        ttl_s: seconds after which a block is not found any more. ``0``: no limit.
        daily_write_bytes: limit of the bytes that a worker writes per day, which spares the disk's
            life. ``0``: no limit.
        min_free: bytes of the file system to leave free. With less, the tier shrinks or stores
            nothing more.
        tenant_share: part of ``capacity`` that the blocks of one tenant may take, in (0, 1].
            ``1``: no limit. A tenant is the first 8 bytes of a key: the request's ``cache_salt``.
    """

    path: Annotated[str, Meta(pattern=r"^[^\0]+$"), Rule("name a folder on a local disk")]
    capacity: _AtLeast16MiB
    ttl_s: Annotated[float, Meta(ge=0, le=_MOST_S), Rule("use seconds, 0 for no limit")] = 0.0
    daily_write_bytes: Size = 0
    min_free: Size = 1 << 30
    tenant_share: Annotated[float, Meta(gt=0, le=1), Rule("use more than 0, up to 1")] = 1.0


class ValkeySettings(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="valkey"):
    """A Valkey or Redis server or cluster.

    Attributes:
        address: ``HOST:PORT`` of the server; of a cluster, one or more nodes, separated by commas.
        cluster: whether the server is a cluster.
        user: name to log in with. Empty: the server's default user.
        password_file: file with the password. Empty: no password.
        tls_dir: folder with ``ca.crt``, and with ``tls.crt`` and ``tls.key`` if the server requires
            a certificate of its clients. Empty: no TLS.
        tls_name: name that the server's certificate must have. Empty: the host of ``address``. Set
            it if the nodes of a cluster announce IP addresses that no certificate names.
        prefix: beginning of all names on the server.
        timeout_s: seconds without an answer after which a call has failed.
        ttl_s: seconds that the server keeps a block. ``0``: as long as its memory policy allows.
    """

    address: Annotated[str, Rule("use HOST:PORT such as cache-1:6379", check=server_addresses)]
    cluster: Flag = False
    user: Annotated[str, Rule("use a name")] = ""
    password_file: Path = ""
    tls_dir: Path = ""
    tls_name: Annotated[str, Rule("use a name")] = ""
    prefix: _Name = "kvconnect"
    timeout_s: _Timeout = 2.0
    ttl_s: Annotated[int, Meta(ge=0, le=_MOST_S), Rule("use whole seconds, 0 for no limit")] = 0

    def nodes(self) -> list[tuple[str, int]]:
        """Return (host, port) of every node."""
        return server_addresses(self.address)

    def conflicts(self) -> Iterator[Conflict]:
        """Yield settings that do not go together."""
        if "," in self.address and not self.cluster:
            yield "address", self.address, "name one server, or set cluster to true"
        if self.tls_name and not self.tls_dir:
            yield "tls_name", self.tls_name, "set tls_dir, too: there is no TLS now"


class ObjectSettings(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="object"):
    """An object store.

    Attributes:
        url: ``s3://bucket``, ``gs://bucket``, ``az://account/container`` or ``file:///folder``.
        config_file: JSON file with settings of the client that are not in its environment, such as
            ``{"endpoint": "http://minio:9000", "access_key_id": ...}``. Empty: none.
        prefix: beginning of all names in the store.
        timeout_s: seconds after which a request has failed.
        connections: number of requests at the same time.
    """

    url: Annotated[
        str, Meta(pattern=r"^[a-z0-9]+://[^\0]*$"), Rule("use a URL such as s3://bucket")
    ]
    config_file: Path = ""
    prefix: _Prefix = "kvconnect"
    timeout_s: _Timeout = 5.0
    connections: Annotated[int, Meta(ge=1, le=64), Rule("use 1 to 64")] = 8


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mooncake"):
    """A Mooncake Store.

    Attributes:
        address: ``HOST:PORT`` of the master.
        prefix: beginning of all names in the store.
        timeout_s: seconds without an answer after which a call has failed.
        buffer: bytes of memory through which blocks are copied to and from the store. Give it at
            least 32 MiB, and four of the largest blocks.
    """

    address: Annotated[str, Rule("use HOST:PORT such as cache-1:50051", check=server_address)] = (
        "127.0.0.1:50051"
    )
    prefix: _Name = "kvconnect"
    timeout_s: _Timeout = 5.0
    buffer: _AtLeast16MiB = 128 << 20

    def node(self) -> tuple[str, int]:
        """Return (host, port) of the master."""
        return server_address(self.address)


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="memory"):
    """A store in this process's memory, for tests.

    Attributes:
        capacity: limit of its bytes.
    """

    capacity: Size


class NullSettings(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="null"):
    """A store that keeps nothing, for measurements."""


class OtherSettings(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="other"):
    """A store of another package, which checks its settings itself.

    Attributes:
        name: name of its entry point, the ``kind`` that users write.
        options: the other settings, as they are.
    """

    name: str
    options: dict[str, Any]


RemoteSettings = (
    ValkeySettings
    | ObjectSettings
    | MooncakeSettings
    | MemorySettings
    | NullSettings
    | OtherSettings
)
"""Settings of a remote store; ``kind`` tells which."""

ONE_BY_ONE = (ObjectSettings, MooncakeSettings)
"""Stores that send a request for each block that is looked up."""

REMOTE_KINDS: dict[str, type[msgspec.Struct]] = {
    "valkey": ValkeySettings,
    "object": ObjectSettings,
    "mooncake": MooncakeSettings,
    "memory": MemorySettings,
    "null": NullSettings,
}
"""``kind`` of the stores of this package -> its settings."""

ENTRY_POINTS = "kvconnect.stores"
"""Entry-point group of stores in other packages: callables that take the settings (a mapping) and
the fingerprint, and return a store or raise :class:`~kvconnect.errors.ConfigError`."""
