"""What each tenant's blocks take of a disk, and which more may come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvconnect.plan.keys import TENANT_BYTES
from kvconnect.store.disk.record import PAGE, pages_of

Block = tuple[bytes, int]
"""Key, and length of the payload in bytes."""


class Shares:
    """Bytes per tenant, each block in whole pages with its head, and a bound on them.

    A tenant is what a key begins with; a shorter key is a tenant of its own. Not synchronised.
    """

    def __init__(self, most: int) -> None:
        self.held: dict[bytes, int] = {}  # by tenant; none that has nothing
        self._most = most
        self._coming: dict[bytes, int] = {}  # what was let in and may not be there yet

    def __repr__(self) -> str:
        return f"<Shares of {self._most} bytes, {len(self.held)} tenants>"

    def note(self, came: Iterable[Block], went: Iterable[Block]) -> None:
        """Count blocks that are found from now on, and those that are not any more."""
        held = self.held
        for key, length in came:  # a restart comes here with a million
            tenant = key[:TENANT_BYTES]
            held[tenant] = held.get(tenant, 0) + pages_of(length) * PAGE
        for key, length in went:
            _change(held, key[:TENANT_BYTES], -record_bytes(length))

    def enter(
        self, keys: Sequence[bytes], lengths: Sequence[int], stored: Mapping[bytes, int]
    ) -> tuple[list[int], dict[bytes, int]]:
        """Let in the blocks that their tenants have room for, in the place of those that are there.

        ``stored`` are those, with the lengths that they have now. Until :meth:`leave` what was let
        in counts beside what is held, so calls at the same time do not pass the bound together.
        Return the blocks' numbers, and bytes by tenant.
        """
        admitted: list[int] = []
        came: dict[bytes, int] = {}
        spared: dict[bytes, int] = {}  # what is replaced, by tenant
        there = dict(stored)  # a key that comes twice replaces that block once
        for number, key in enumerate(keys):
            tenant, nbytes = key[:TENANT_BYTES], record_bytes(lengths[number])
            freed = spared.get(tenant, 0) + (record_bytes(there[key]) if key in there else 0)
            comes = came.get(tenant, 0) + nbytes
            taken = self.held.get(tenant, 0) + self._coming.get(tenant, 0) + comes
            if taken - freed <= self._most:
                admitted.append(number)
                there.pop(key, None)
                spared[tenant], came[tenant] = freed, comes
        for tenant, nbytes in came.items():
            _change(self._coming, tenant, nbytes)
        return admitted, came

    def leave(self, came: dict[bytes, int]) -> None:
        """End what :meth:`enter` began, with what it returned."""
        for tenant, nbytes in came.items():
            _change(self._coming, tenant, -nbytes)


def record_bytes(length: int) -> int:
    """Return what a block of this length takes of the disk."""
    return pages_of(length) * PAGE


def _change(counts: dict[bytes, int], tenant: bytes, nbytes: int) -> None:
    left = counts.get(tenant, 0) + nbytes
    if left:
        counts[tenant] = left
    else:
        counts.pop(tenant, None)
