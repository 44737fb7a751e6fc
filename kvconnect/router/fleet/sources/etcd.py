"""Engines registered in etcd.

The keys are ``PREFIX/prefill/ANY`` and ``PREFIX/decode/ANY``; a value is an engine as on the
command line. An engine that registers with a lease disappears when it dies.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterable
from urllib.parse import urlsplit

from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception

from kvconnect.errors import ConfigError
from kvconnect.router.engine_spec import EngineSpec, engine_spec
from kvconnect.router.fleet.sources import EngineSource, NamedEngines, OnRefused
from kvconnect.router.metrics import InputKind
from kvconnect.router.options import EtcdServer
from kvconnect.router.policy.fleet_view import Role

logger = logging.getLogger(__name__)

EVERY_S = 1.0
_ANSWER_S = 5.0
_SHOWN = 200  # characters of a server's refusal that are logged


async def follow(server: EtcdServer, refuse: OnRefused) -> EngineSource:
    """Poll all keys under the path of the server's URL."""
    etcd = _Client(server)
    entries = Entries(urlsplit(server.url).path.strip("/"), refuse)
    last: list[tuple[bytes, bytes]] | None = None
    while True:
        try:
            pairs = await asyncio.to_thread(etcd.under, entries.prefix + "/")
        except (Etcd3Exception, OSError) as error:
            logger.warning("etcd: %r %s", error, str(getattr(error, "detail_text", ""))[:_SHOWN])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            refuse(InputKind.ETCD, f"etcd: an answer that makes no sense: {error!r}")
        else:
            if pairs != last:
                last = pairs
                yield entries.named(pairs)
        await asyncio.sleep(EVERY_S)


class _Client:
    """etcd3gw's client, which knows no users. One thread at a time."""

    def __init__(self, server: EtcdServer) -> None:
        parts = urlsplit(server.url)
        self._server = server
        certificate, key = server.certificate or (None, None)
        self._etcd = Etcd3Client(
            parts.hostname or "",
            parts.port or 2379,
            parts.scheme,
            ca_cert=server.authority or None,
            cert_cert=certificate,
            cert_key=key,
            timeout=_ANSWER_S,
        )
        # REQUESTS_CA_BUNDLE in the environment would count before the authority of the flag.
        self._etcd.session.trust_env = not server.authority
        self._logged_in = not server.user

    def under(self, prefix: str) -> list[tuple[bytes, bytes]]:
        """Return the keys under a prefix, with their values, sorted. Blocks.

        Raises:
            Etcd3Exception, OSError: no answer, or a refusal. A login is made again after it.
            ValueError, TypeError, KeyError, AttributeError: an answer that makes no sense.
        """
        if not self._logged_in:
            self._log_in()
        after = f"{prefix[:-1]}{chr(ord(prefix[-1]) + 1)}"
        whole = {"key": _base64(prefix), "range_end": _base64(after)}
        try:
            answer = self._etcd.post(self._etcd.get_url("/kv/range"), json=whole)
        except Etcd3Exception:  # as when the token has expired
            self._logged_in = not self._server.user
            raise
        if "header" not in answer:  # a gateway's: etcd leaves out a list that is empty
            raise ValueError("no header")
        return sorted(
            (b64decode(entry["key"]), b64decode(entry.get("value", "")))
            for entry in answer.get("kvs", [])
        )

    def _log_in(self) -> None:
        self._etcd.session.headers.pop("Authorization", None)
        who = {"name": self._server.user, "password": self._server.password}
        answer = self._etcd.post(self._etcd.get_url("/auth/authenticate"), json=who)
        self._etcd.session.headers["Authorization"] = str(answer["token"])
        self._logged_in = True


def _base64(text: str) -> str:
    return b64encode(text.encode()).decode()


class Entries:
    """Engines of the keys under a prefix. A key with an invalid value keeps its engine until the
    value is valid again or the key is gone."""

    def __init__(self, prefix: str, refuse: OnRefused) -> None:
        self.prefix = prefix
        self._refuse = refuse
        self._good: dict[bytes, tuple[Role, EngineSpec]] = {}

    def named(self, entries: Iterable[tuple[bytes, bytes]]) -> NamedEngines:
        """Return the engines of ``entries``, all keys with their values."""
        before, self._good = self._good, {}
        for key, value in entries:
            try:
                self._good[key] = self._read(key.decode("utf-8", "replace"), value)
            except ConfigError as error:
                self._refuse(InputKind.ETCD, str(error))
                if key in before:
                    self._good[key] = before[key]
        named: dict[Role, dict[str, EngineSpec]] = {role: {} for role in Role}
        for role, spec in self._good.values():
            named[role][spec.url] = spec
        return {role: tuple(specs.values()) for role, specs in named.items()}

    def _read(self, key: str, value: bytes) -> tuple[Role, EngineSpec]:
        role = key.removeprefix(f"{self.prefix}/").partition("/")[0]
        if role not in [each.value for each in Role]:
            fix = f"use {self.prefix}/prefill/ANY or {self.prefix}/decode/ANY"
            raise ConfigError("etcd", key, fix)
        return Role(role), engine_spec(key, value.decode("utf-8", "replace"))
