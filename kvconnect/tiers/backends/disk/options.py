"""Settings of the disk tier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

import msgspec

from kvconnect.config import PolicyName
from kvconnect.errors import ConfigError
from kvconnect.tiers.backends.base import parse_settings
from kvconnect.tiers.backends.disk.folder import MOST_ABOUT, pack_about

_LEAST_BYTES = 16 << 20
_SEGMENTS = 256
_SEGMENT_BYTES = 64 << 20
_LARGEST_SEGMENT = 1 << 36  # pages of a segment are numbered with 24 bits
_OWNER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class DiskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of the disk tier.

    Attributes:
        path: folder of the tier, on a local disk; made if it is not there.
        capacity: bytes at most that this worker keeps there, its indexes included.
        owner: name of this worker's folder in it. Workers that run at the same time each have
            their own, and find theirs again after a restart.
        ttl_s: seconds after which a block does not exist any more; 0: never.
        daily_write_bytes: bytes per day that are written at most, for the sake of the disk's life;
            0: no bound.
        min_free: bytes of the file system to leave free: the tier shrinks, or takes nothing more.
        policy: which segment leaves first.
        tenant_share: part of ``capacity`` that the blocks of one tenant may take, in (0, 1];
            1: no bound. A tenant is the first 8 bytes of a key: the request's ``cache_salt``.
        about: what the fingerprint means, in words; ``model`` is what ``kvconnect cache`` goes by.
    """

    path: str
    capacity: int
    owner: str = "0"
    ttl_s: float = 0.0
    daily_write_bytes: int = 0
    min_free: int = 1 << 30
    policy: PolicyName = "lru"
    tenant_share: float = 1.0
    about: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("path", self.path, "name a folder on a local disk")
        if self.capacity < _LEAST_BYTES:
            raise ConfigError("capacity", self.capacity, "use 16 MiB or more")
        if not _OWNER.fullmatch(self.owner):
            raise ConfigError("owner", self.owner, "use 1 to 64 letters, digits, - and _")
        if not 0 <= self.ttl_s < 2**31:
            raise ConfigError("ttl_s", self.ttl_s, "use seconds, 0 for no limit")
        if not 0 < self.tenant_share <= 1:
            raise ConfigError("tenant_share", self.tenant_share, "use more than 0, up to 1")
        if (nbytes := len(pack_about(self.about))) > MOST_ABOUT:
            raise ConfigError("about", f"{nbytes} bytes", f"use {MOST_ABOUT} of JSON at most")

    @property
    def segment_bytes(self) -> int:
        """Bytes of a full segment, which is what eviction drops at a time."""
        wanted = max(self.capacity // _SEGMENTS, min(_SEGMENT_BYTES, self.capacity // 4))
        return min(wanted, _LARGEST_SEGMENT) & ~4095

    @property
    def share_bytes(self) -> int | None:
        """Bytes that the blocks of one tenant may take, None for no bound."""
        return int(self.tenant_share * self.capacity) if self.tenant_share < 1 else None


def parse_options(settings: Mapping[str, object]) -> DiskOptions:
    """Return the options of a mapping; sizes may be written as ``"1TiB"``.

    Raises:
        ConfigError: a setting is unknown, missing or not usable.
    """
    policies = get_args(PolicyName)
    if settings.get("policy", "lru") not in policies:
        raise ConfigError("policy", settings["policy"], f"use one of {', '.join(policies)}")
    return parse_settings(DiskOptions, settings, ("capacity", "daily_write_bytes", "min_free"))
