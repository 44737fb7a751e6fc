"""Which bootstrap servers a decode rank may contact: clients name their addresses."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from kvconnect import threads
from kvconnect.bounded import remember
from kvconnect.protocol.addresses import check_address
from kvconnect.settings import Settings
from kvconnect.types import Endpoint

_MOST_RANKS = 1024  # in one direction
_REMEMBERED_S = 60.0  # how long a resolved name is used
_REFUSED_S = 3.0  # how long a failure is remembered: the server may be restarted
_MOST_NAMES = 1024
_MOST_LOOKUPS = 16  # at a time: clients choose the names, and each takes a thread


def _resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, None)[0][4][0])


class BootstrapAddresses:
    """Checks addresses of bootstrap servers. For the scheduler's thread, which never blocks here:
    names are resolved on other threads.

    ``own``: this machine's address. ``resolve`` returns a name's address, or raises ``OSError`` or
    ``ValueError``.
    """

    def __init__(
        self, settings: Settings, own: str, resolve: Callable[[str], str] = _resolve
    ) -> None:
        self._networks = [ipaddress.ip_network(peer) for peer in settings.peers]
        self._own = own
        self._resolve = resolve
        self._names: dict[str, tuple[str | Exception, float]] = {}  # result and time
        self._asking: set[str] = set()
        self._lock = threading.Lock()  # for the resolving threads
        self._refused: dict[str, tuple[str, float]] = {}

    def allows(self, bootstrap: str) -> bool:
        """Return whether a server ``HOST:PORT`` may be contacted; False also while its name is
        being resolved."""
        return self._check(bootstrap) == ""

    def refusal(self, bootstrap: str) -> str:
        """Return why a server ``HOST:PORT`` is refused; "" if it is allowed or not resolved yet."""
        return self._check(bootstrap) or ""

    def refuse(self, bootstrap: str, why: str) -> None:
        """Record that an allowed server does not fit this engine."""
        remember(self._refused, bootstrap, (why, time.monotonic()), _MOST_NAMES)

    def _check(self, bootstrap: str) -> str | None:
        why, since = self._refused.get(bootstrap, ("", 0.0))
        if why and time.monotonic() - since < _REFUSED_S:
            return f"prefill engine {bootstrap} does not fit this one: {why}"
        found = self._address(bootstrap.rpartition(":")[0].strip("[]"))
        if found is None:
            return None
        if isinstance(found, Exception):
            return f"bootstrap address {bootstrap!r} cannot be used: {found}"
        address = ipaddress.ip_address(found)
        if (
            address.is_loopback
            or str(address) == self._own
            or any(address in network for network in self._networks)
        ):
            return ""
        return (
            f"bootstrap address {bootstrap!r} is not allowed: only this machine and the networks "
            f"of `peers` are asked; add {address} to it in KVCONNECT_CONFIG"
        )

    def _address(self, host: str) -> str | Exception | None:
        """Return a host's address or the error; None while the name is being resolved."""
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            pass
        found, since = self._names.get(host, (None, 0.0))
        good_s = _REFUSED_S if isinstance(found, Exception) else _REMEMBERED_S
        if found is None or time.monotonic() - since > good_s:
            self._look_up(host)
        return found  # the old answer holds until there is a new one

    def _look_up(self, host: str) -> None:
        if host in self._asking or len(self._asking) >= _MOST_LOOKUPS:
            return
        self._asking.add(host)

        def work() -> None:
            try:
                self._remember(host, self._find(host))
            finally:
                self._asking.discard(host)

        try:
            threads.make(threads.ThreadKind.RESOLVER, "kvconnect-names", work).start()
        except RuntimeError as error:  # the system has no more threads
            self._remember(host, error)
            self._asking.discard(host)

    def _remember(self, host: str, found: str | Exception) -> None:
        with self._lock:
            remember(self._names, host, (found, time.monotonic()), _MOST_NAMES)

    def _find(self, host: str) -> str | Exception:
        try:
            return str(ipaddress.ip_address(self._resolve(host)))
        except (OSError, ValueError) as error:  # ValueError: not a valid name
            return error


def endpoint_of(info: Mapping[str, Any]) -> Endpoint:
    """Return where a prefill rank listens, as the bootstrap server says.

    Raises:
        Refused: no worker can listen there.
        KeyError, TypeError, ValueError: the answer is malformed.
    """
    host, port = str(info["rank_ip"]), int(info["rank_port"])
    check_address(host, port, "it")
    return Endpoint(int(info["tp_rank"]), int(info["pp_rank"]), host, port)


def check_sizes(info: Any) -> None:
    """Check what a bootstrap server says of the sizes of its prefill engine, before SGLang divides
    by them and lists its ranks.

    Raises:
        ValueError: no engine has such sizes.
    """
    for name in ("attn_tp_size", "attn_cp_size", "pp_size", "dp_size"):
        size = getattr(info, name)
        if not 1 <= size <= _MOST_RANKS:
            raise ValueError(f"{name} is {size}, not 1 to {_MOST_RANKS}")


def ranks_of(answer: Any) -> dict[str, int]:
    """Return the data-parallel ranks of rooms that a bootstrap server's answer names. A room of
    which it says anything else is left out, as if the server did not know it."""
    found = answer.items() if isinstance(answer, dict) else ()
    return {room: rank for room, rank in found if type(rank) is int and 0 <= rank < _MOST_RANKS}


def forget_ranks(
    ended: Iterable[Endpoint],
    ranks: MutableMapping[str, list[dict[str, Any]]],
    engines: MutableMapping[str, Any],
) -> None:
    """Remove from SGLang's caches the prefill engines that have a rank at one of ``ended``: after
    a restart a rank has another port, and the engine may have another number of ranks.

    Args:
        ended: workers to which a connection ended or could not be made.
        ranks: what a bootstrap server said of an engine's ranks, by ``HOST:PORT_DP_CP_TP``.
        engines: what it said of the engine as a whole, by ``HOST:PORT``.
    """
    gone = {(endpoint.host, str(endpoint.port)) for endpoint in ended}
    for key, infos in list(ranks.items()):
        if any((str(info.get("rank_ip")), str(info.get("rank_port"))) in gone for info in infos):
            del ranks[key]
            engines.pop(key.rsplit("_", 3)[0], None)
