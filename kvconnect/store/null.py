"""A store that keeps nothing: what a tier costs that never has anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvconnect.stats import OffloadingConnectorStats
from kvconnect.store.base import (
    Outcome,
    Store,
    Usage,
    check_buffers,
    check_keys,
    parse_settings,
)


class NullStore(Store):
    """Takes every block and forgets it. Has no settings."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> NullStore:
        """Return a store; raise :class:`ConfigError` for any setting."""
        parse_settings(_Settings, settings, ())
        return cls()

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[Outcome]:
        check_buffers(keys, payloads, writable=False)
        return [Outcome.OK] * len(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Outcome]:
        check_buffers(keys, buffers, writable=True)
        return [Outcome.ABSENT] * len(keys)

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        check_keys(keys)
        return [0] * len(keys)

    def remove(self, keys: Sequence[bytes]) -> list[Outcome]:
        check_keys(keys)
        return [Outcome.ABSENT] * len(keys)

    def usage(self) -> Usage:
        return Usage(0, 0, 0, available=True)

    def take_stats(self) -> OffloadingConnectorStats | None:
        return None

    def close(self) -> None:
        """Nothing to let go of."""


class _Settings(msgspec.Struct, frozen=True):
    """None."""
