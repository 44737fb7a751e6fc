"""Engines that are registered in etcd: ``PREFIX/prefill/ANY`` and ``PREFIX/decode/ANY`` have a
worker as on the command line for a value. An engine that registers with a lease leaves by dying.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from urllib.parse import urlsplit

from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception

from kvconnect.errors import ConfigError
from kvconnect.router.options import Worker, worker_of
from kvconnect.router.sources import Named, Source
from kvconnect.router.view import Role

logger = logging.getLogger(__name__)

EVERY_S = 1.0
_ANSWER_S = 5.0


async def follow(url: str) -> Source:
    """Read all keys under the path of ``url`` again and again."""
    parts = urlsplit(url)
    etcd = Etcd3Client(parts.hostname or "", parts.port or 2379, parts.scheme, timeout=_ANSWER_S)
    prefix, last = parts.path.strip("/"), None
    while True:
        try:
            found = await asyncio.to_thread(etcd.get_prefix, prefix + "/")
        except (Etcd3Exception, OSError) as error:
            logger.warning("etcd: %r", error)
        else:
            entries = sorted((entry["key"], value) for value, entry in found)
            if entries != last:
                last = entries
                yield _named(prefix, entries)
        await asyncio.sleep(EVERY_S)


def _named(prefix: str, entries: Iterable[tuple[bytes, bytes]]) -> Named:
    """Return what entries name. One that is wrong is left out: it is one engine's own."""
    named: dict[Role, dict[str, Worker]] = {role: {} for role in Role}
    for key, value in entries:
        shown = key.decode("utf-8", "replace")
        role = shown.removeprefix(f"{prefix}/").partition("/")[0]
        try:
            if role not in [each.value for each in Role]:
                raise ConfigError("etcd", shown, f"use {prefix}/prefill/ANY or {prefix}/decode/ANY")
            worker = worker_of(shown, value.decode("utf-8", "replace"))
            named[Role(role)][worker.url] = worker
        except ConfigError as error:
            logger.warning("%s", error)
    return {role: tuple(workers.values()) for role, workers in named.items()}
