"""Stores of the secondary tiers, made by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from kvconnect.config import TierConfig
from kvconnect.errors import ConfigError
from kvconnect.tiers.backends.base import BlockOutcome, Store, Usage
from kvconnect.types import Tier

if TYPE_CHECKING:
    from kvconnect.tiers.backends.remote import RecordKeys

__all__ = [
    "ENTRY_POINTS",
    "BlockOutcome",
    "Store",
    "Usage",
    "make_disk",
    "make_remote",
    "make_store",
    "make_tiers",
]

logger = logging.getLogger(__name__)

_OWN = ("disk", "valkey", "object", "mooncake", "memory", "null")

ENTRY_POINTS = "kvconnect.stores"
"""Entry-point group of stores in other packages: callables that take the settings (a mapping) and
the fingerprint, and return a :class:`Store` or raise :class:`ConfigError`."""


def make_store(
    kind: str, settings: Mapping[str, object], fingerprint: bytes, keys: RecordKeys | None = None
) -> Store:
    """Return a new store. Only the modules of its kind are imported.

    Args:
        kind: ``disk``, ``valkey``, ``object``, ``mooncake``, ``memory``, ``null``, or the name of
            another package's entry point.
        settings: settings of the kind; see its class.
        fingerprint: identifies the block format. Blocks of other formats are not found.
        keys: keys that seal records on shared servers. Stores of other packages do not use them.

    Raises:
        ConfigError: the kind is unknown, or the settings cannot be used.
    """
    if kind in ("disk", "valkey", "object", "mooncake"):
        try:
            return _make_large(kind, settings, fingerprint, keys)
        except ImportError as error:
            raise ConfigError("store", kind, f"install {error.name}") from error
    if kind == "memory":
        from kvconnect.tiers.backends.memory import MemoryStore

        return MemoryStore.from_settings(settings)
    if kind == "null":
        from kvconnect.tiers.backends.memory import NullStore

        return NullStore.from_settings(settings)
    return _from_elsewhere(kind, settings, fingerprint)


def make_remote(
    settings: Mapping[str, object], fingerprint: bytes, keys: RecordKeys | None = None
) -> Store:
    """Return the store that a user's settings describe; ``kind`` is one of the settings.

    Raises:
        ConfigError: as of :func:`make_store`.
    """
    rest = {name: value for name, value in settings.items() if name != "kind"}
    return make_store(str(settings["kind"]), rest, fingerprint, keys)


def make_disk(
    settings: Mapping[str, object], owner: str, fields: Mapping[str, object], fingerprint: bytes
) -> Store:
    """Return a worker's disk store, in the folder of ``owner``; ``fields`` describe the format.

    Raises:
        ConfigError: as of :func:`make_store`, or a setting that each worker sets by itself.
    """
    for name in ("owner", "about"):
        if name in settings:
            raise ConfigError(name, settings[name], "each worker sets its own: leave it out")
    about = {name: str(value) for name, value in fields.items()}
    return make_store("disk", {**settings, "owner": owner, "about": about}, fingerprint)


def make_tiers(config: TierConfig, makers: Mapping[Tier, Callable[[], Store]]) -> dict[Tier, Store]:
    """Return a worker's secondary tiers that ``config`` names, in the order of ``makers``, the
    fastest first. If one cannot be made, those before it are closed, and the error is raised."""
    named = {
        Tier.DISK: config.disk,
        Tier.PEER: config.cache_peers,
        Tier.REMOTE: config.remote,
    }
    stores: dict[Tier, Store] = {}
    with ExitStack() as undo:
        for tier, make in makers.items():
            if not named[tier]:
                continue
            stores[tier] = undo.enter_context(closing(make()))
            logger.info("KVConnect tier %s: %r", tier.value, stores[tier])
        undo.pop_all()
    return stores


def _make_large(
    kind: str, settings: Mapping[str, object], fingerprint: bytes, keys: RecordKeys | None
) -> Store:
    """Return a store that needs optional packages; raise :class:`ImportError` without them."""
    if kind == "disk":
        from kvconnect.tiers.backends.disk import DiskStore

        return DiskStore.from_settings(settings, fingerprint)
    if kind == "valkey":
        from kvconnect.tiers.backends.valkey import make_valkey_store

        return make_valkey_store(settings, fingerprint, keys)
    if kind == "mooncake":
        from kvconnect.tiers.backends.mooncake import make_mooncake_store

        return make_mooncake_store(settings, fingerprint, keys)
    from kvconnect.tiers.backends.object import make_object_store

    return make_object_store(settings, fingerprint, keys)


def _from_elsewhere(kind: str, settings: Mapping[str, object], fingerprint: bytes) -> Store:
    for entry in entry_points(group=ENTRY_POINTS, name=kind):
        try:
            make = entry.load()
        except (ImportError, AttributeError) as error:
            fix = f"its package cannot be loaded ({error}): reinstall it or use another store"
            raise ConfigError("store", kind, fix) from error
        store: Store = make(settings, fingerprint)
        return store
    others = sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)})
    raise ConfigError("store", kind, f"use {', '.join([*_OWN, *others])}")
