"""Eviction policies by name."""

from __future__ import annotations

from kvconnect.offload.eviction.base import EvictionPolicy
from kvconnect.offload.eviction.lru import LRU
from kvconnect.offload.eviction.s3fifo import S3FIFO
from kvconnect.settings import PolicyName

__all__ = ["LRU", "S3FIFO", "EvictionPolicy", "make_policy"]

_POLICIES: dict[PolicyName, type[LRU] | type[S3FIFO]] = {"lru": LRU, "s3fifo": S3FIFO}


def make_policy(name: PolicyName, capacity: int) -> EvictionPolicy:
    """Return a new policy for ``capacity`` slots."""
    return _POLICIES[name](capacity)
