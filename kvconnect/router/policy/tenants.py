"""Who a client is, by its API key or else its address, and the salt that keeps its KV apart."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

_PERSON = b"kvconnect salt"


class Tenant(NamedTuple):
    """One client, however many connections it has.

    Attributes:
        name: of its key, by number, or its address.
        secret: what its salts are made of; empty: it has none.
    """

    name: str
    secret: bytes = b""

    def salt(self, own: bytes) -> str:
        """Return the salt for its requests; ``own`` is what it sent as one.

        Follows from its API key alone, so it is the same in all routers and after restarts; who
        does not know the key can neither compute it nor send it.
        """
        made = blake2b(own, key=self.secret, person=_PERSON, digest_size=32)
        return made.hexdigest()


class Tenants:
    """Those that a router serves; without API keys everybody. ``isolate``: each key has salts."""

    def __init__(self, keys: Sequence[str], *, isolate: bool) -> None:
        self._known = {
            f"Bearer {key}".encode(): Tenant(
                f"key {number}", blake2b(key.encode()).digest() if isolate else b""
            )
            for number, key in enumerate(keys)
        }

    def find(self, authorization: str, address: str) -> Tenant | None:
        """Return who sends a request, None if its key is none of ours."""
        if not self._known:
            return Tenant(_network(address))
        came = authorization.encode("utf-8", "surrogateescape")
        # All are compared, so that the time does not tell which is near.
        found = [tenant for key, tenant in self._known.items() if hmac.compare_digest(came, key)]
        return found[0] if found else None


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
    """Return an IPv4 address as it is; of IPv6 the network: a client has all of its addresses."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = found.ipv4_mapped
    return str(mapped or ipaddress.IPv6Network((int(found), 64), strict=False))
