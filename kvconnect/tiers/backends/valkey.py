"""A shared tier on Valkey or Redis, alone or as a cluster."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import valkey
from valkey.backoff import NoBackoff
from valkey.cluster import ClusterNode, ValkeyCluster
from valkey.connection import Connection, ConnectionPool
from valkey.credentials import CredentialProvider
from valkey.exceptions import ConnectionError as Disconnected
from valkey.exceptions import (
    OutOfMemoryError,
    ResponseError,
    ValkeyClusterException,
    ValkeyError,
)
from valkey.retry import Retry

from kvconnect.changed_files import Reread
from kvconnect.errors import ConfigError, TransferFailed
from kvconnect.secret_files import check_owner, read_secret_text
from kvconnect.settings.stores import ValkeySettings
from kvconnect.tiers.backends.base import BlockOutcome
from kvconnect.tiers.backends.record_seals import RecordKeys
from kvconnect.tiers.backends.remote import RemoteStore, Server


def make_valkey_store(
    settings: ValkeySettings, fingerprint: bytes, keys: RecordKeys | None = None
) -> RemoteStore:
    """Return a store with the settings of :class:`ValkeySettings`.

    An unreachable server is not an error.

    Raises:
        ConfigError: a setting cannot be used.
    """
    return RemoteStore(ValkeyServer(settings), settings.prefix, fingerprint, keys=keys)


class ValkeyServer(Server):
    """Pipelined commands over the client's connections. Connects at the first call."""

    def __init__(self, options: ValkeySettings) -> None:
        self._options = options
        self._nodes = options.nodes()
        self._arguments = _arguments(options)
        self._client: Any = None if options.cluster else self._connect()

    def __repr__(self) -> str:
        return f"valkey {self._options.address}"

    def store(self, names: Sequence[str], values: Sequence[memoryview]) -> list[BlockOutcome]:
        def add(pipeline: Any) -> None:
            for name, value in zip(names, values, strict=True):
                pipeline.set(name, value, ex=self._options.ttl_s or None)

        return [_stored(answer) for answer in self._run(add)]

    def load(self, names: Sequence[str], most: int) -> list[memoryview | None]:
        values = self._all(names, lambda p, name: p.getrange(name, 0, most - 1))
        # An empty value is absent. For a value that is not a string, return empty bytes.
        return [memoryview(value or b"") if value != b"" else None for value in values]

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [int(size or 0) for size in self._all(names, lambda p, name: p.strlen(name))]

    def delete(self, names: Sequence[str]) -> list[bool]:
        return [bool(count) for count in self._all(names, lambda p, name: p.delete(name))]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _all(self, names: Sequence[str], add: Callable[[Any, str], object]) -> list[Any]:
        """Send one command per name. Return the answers, None for a value that is not a string.
        Any other error raises :class:`TransferFailed`."""

        def add_all(pipeline: Any) -> None:
            for name in names:
                add(pipeline, name)

        answers = self._run(add_all)
        for place, answer in enumerate(answers):
            if isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE"):
                answers[place] = None
            elif isinstance(answer, Exception):
                raise TransferFailed(f"{self!r}: {answer}") from answer
        return answers

    def _run(self, add: Callable[[Any], None]) -> list[Any]:
        try:
            if self._client is None:
                self._client = self._connect()
            # Pipelines of a cluster are never transactions and do not take the argument.
            kind = {} if self._options.cluster else {"transaction": False}
            with self._client.pipeline(**kind) as pipeline:
                add(pipeline)
                return list(pipeline.execute(raise_on_error=False))
        except (ValkeyError, ValkeyClusterException, OSError) as error:
            raise TransferFailed(f"{self!r}: {error}") from error

    def _connect(self) -> Any:
        (host, port), *_ = self._nodes
        if self._options.cluster:
            nodes = [ClusterNode(*node) for node in self._nodes[1:]]
            # Only with a URL do the nodes' pools accept another class of connections.
            url = f"valkey://{f'[{host}]' if ':' in host else host}:{port}"
            return ValkeyCluster(url=url, startup_nodes=nodes, **self._arguments)
        # Retry once, since the server may have closed an idle connection.
        retry = Retry(NoBackoff(), 1, supported_errors=(Disconnected,))
        pool = ConnectionPool(host=host, port=port, retry=retry, **self._arguments)
        return valkey.Valkey.from_pool(pool)


_STAYS = "shared tier: what it connects with stays"


class _Login(CredentialProvider):  # type: ignore[misc]
    """The name and the present password of a connection that is made."""

    def __init__(self, user: str, path: str) -> None:
        self._user = user
        read = partial(read_secret_text, "password_file", path)
        self._password = Reread([path], read, _STAYS)

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """valkey: a connection is made."""
        password = self._password.current()
        return (self._user, password) if self._user else (password,)


class _TlsConnection(Connection):  # type: ignore[misc]
    """Accepts only certificates of the configured authority for the server's name. The client's own
    class also trusts the system's authorities and, in a cluster, any name."""

    def __init__(self, context: Reread[ssl.SSLContext], name: str, **arguments: Any) -> None:
        self._context = context
        self._name = name
        super().__init__(**arguments)

    def _connect(self) -> socket.socket:
        plain: socket.socket = super()._connect()
        try:
            return self._context.current().wrap_socket(
                plain, server_hostname=self._name or self.host
            )
        except OSError:
            plain.close()
            raise


_TLS_FILES = ("ca.crt", "tls.crt", "tls.key")


def _stored(answer: object) -> BlockOutcome:
    if isinstance(answer, OutOfMemoryError):
        return BlockOutcome.FULL
    return BlockOutcome.FAILED if isinstance(answer, Exception) else BlockOutcome.OK


def _arguments(options: ValkeySettings) -> dict[str, Any]:
    """Return the client's arguments except the address."""
    found: dict[str, Any] = {
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.timeout_s,
    }
    if options.password_file:
        login = _Login(options.user, options.password_file)
        if any(login.get_credentials()):
            found["credential_provider"] = login
    elif options.user:
        found["username"] = options.user
    if options.tls_dir:
        paths = [os.path.join(options.tls_dir, name) for name in _TLS_FILES]
        context = Reread(paths, partial(_tls, options.tls_dir), _STAYS)
        found["connection_class"] = partial(_TlsConnection, context, options.tls_name)
    return found


def _tls(folder: str) -> ssl.SSLContext:
    """Return a context with the authority ``ca.crt`` and this client's certificate, if any."""
    ca, own, key = (os.path.join(folder, name) for name in _TLS_FILES)
    if not os.path.isfile(ca):
        raise ConfigError("tls_dir", folder, "put the file ca.crt there")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the server's name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(ca)
        if os.path.isfile(own) or os.path.isfile(key):
            check_owner("tls_dir", key, os.stat(key))
            context.load_cert_chain(own, key)
    except OSError as error:  # ssl.SSLError is one
        fix = f"put certificates there that can be read: {error}"
        raise ConfigError("tls_dir", folder, fix) from error
    return context
