"""Tenants: the clients of a router, and the cache salts that keep their KV apart."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from kvconnect.router.api_keys import ApiKey

_PERSON, _ID_PERSON = b"kvconnect salt", b"kvconnect tenant"


class Tenant(NamedTuple):
    """One client, by API key or network address.

    Attributes:
        name: name or number of its key, or its address.
        secret: key of its cache salts; empty: its requests are not salted.
        priority: it may set the priority of its requests.
        weight: turns in a row while clients wait for theirs.
        disaggregate: it may say whether its prompts are handed off.
    """

    name: str
    secret: bytes = b""
    priority: bool = True
    weight: int = 1
    disaggregate: bool = True

    @property
    def id(self) -> str:
        """What its cache salts begin with: a client's shares are counted by it."""
        return blake2b(key=self.secret, person=_ID_PERSON, digest_size=16).hexdigest()

    def salt(self, own: bytes) -> str:
        """Return the cache salt of its requests; ``own`` is the salt that the client sent.

        The salt depends on the API key alone: equal in all routers and after restarts, and secret
        from everybody without the key. A client's own salt separates its requests, and leaves them
        the same tenant's: that is what stands before the dot.
        """
        made = blake2b(own, key=self.secret, person=_PERSON, digest_size=32)
        return f"{self.id}.{made.hexdigest()}"


class Tenants:
    """The clients that a router serves; without API keys, everybody.

    ``isolate``: requests are salted by API key, so clients share no cached KV.
    """

    def __init__(self, keys: Sequence[ApiKey], *, isolate: bool) -> None:
        self._isolate = isolate
        self.take(keys)

    def take(self, keys: Sequence[ApiKey]) -> None:
        """Serve the clients with these keys from now on."""
        self._known = {
            each.key.encode(): Tenant(
                each.name or f"key {number}",
                blake2b(each.key.encode()).digest() if self._isolate else b"",
                each.priority,
                each.weight,
                each.disaggregate,
            )
            for number, each in enumerate(keys)
        }

    def find(self, api_key: str, address: str) -> Tenant | None:
        """Return the client of a request, None if its API key is unknown."""
        if not self._known:
            return Tenant(network_of(address))
        given = api_key.encode("utf-8", "surrogateescape")
        # All keys are compared, so that timing reveals none.
        found = [tenant for key, tenant in self._known.items() if hmac.compare_digest(given, key)]
        return found[0] if found else None


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return an IPv4 address unchanged, and the /64 network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = found.ipv4_mapped
    return str(mapped or ipaddress.IPv6Network((int(found), 64), strict=False))
