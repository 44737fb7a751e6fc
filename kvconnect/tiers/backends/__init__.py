"""Stores of the secondary tiers, made by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.settings import check_struct
from kvconnect.settings.stores import (
    ENTRY_POINTS,
    REMOTE_KINDS,
    DiskSettings,
    MemorySettings,
    MooncakeSettings,
    ObjectSettings,
    OtherSettings,
    RemoteSettings,
    ValkeySettings,
)
from kvconnect.tiers.backends.base import BlockOutcome, BlockSource, Store, Usage
from kvconnect.types import Tier

if TYPE_CHECKING:
    from kvconnect.tiers.backends.record_seals import RecordKeys

__all__ = [
    "BlockOutcome",
    "BlockSource",
    "Store",
    "Usage",
    "make_disk",
    "make_remote",
    "make_store",
    "make_tiers",
]

logger = logging.getLogger(__name__)
Peers = TypeVar("Peers", bound=BlockSource)


def make_store(
    kind: str, settings: Mapping[str, object], fingerprint: bytes, keys: RecordKeys | None = None
) -> Store:
    """Return a new store of plain settings. Only the modules of its kind are imported.

    Args:
        kind: ``disk``, ``valkey``, ``object``, ``mooncake``, ``memory``, ``null``, or the name of
            another package's entry point.
        settings: settings of the kind; see its class in :mod:`kvconnect.settings.stores`.
        fingerprint: identifies the block format. Blocks of other formats are not found.
        keys: keys that seal records on shared servers. Stores of other packages do not use them.

    Raises:
        ConfigError: the kind is unknown, or the settings cannot be used.
    """
    if kind == "disk":
        from kvconnect.tiers.backends.disk import DiskOptions, DiskStore

        return DiskStore(check_struct(DiskOptions, settings), fingerprint)
    if kind in REMOTE_KINDS:
        checked = cast("RemoteSettings", check_struct(REMOTE_KINDS[kind], settings))
        return make_remote(checked, fingerprint, keys)
    return make_remote(OtherSettings(name=kind, options=dict(settings)), fingerprint, keys)


def make_remote(
    settings: RemoteSettings, fingerprint: bytes, keys: RecordKeys | None = None
) -> Store:
    """Return the store that checked settings describe.

    Raises:
        ConfigError: it cannot be made with them, or a package that it needs is missing.
    """
    if isinstance(settings, OtherSettings):
        return _from_elsewhere(settings, fingerprint)
    try:
        return _make_own(settings, fingerprint, keys)
    except ImportError as error:
        kind = str(type(settings).__struct_config__.tag)
        raise ConfigError("store", kind, f"install {error.name}") from error


def make_disk(
    settings: DiskSettings, owner: str, fields: Mapping[str, object], fingerprint: bytes
) -> Store:
    """Return a worker's disk store, in the folder of ``owner``; ``fields`` describe the format.

    Raises:
        ConfigError: as of :func:`make_store`.
    """
    about = {name: str(value) for name, value in fields.items()}
    return make_store(
        "disk", {**msgspec.structs.asdict(settings), "owner": owner, "about": about}, fingerprint
    )


def make_tiers(
    makers: Mapping[Tier, Callable[[], Store]], make_peers: Callable[[], Peers] | None
) -> tuple[dict[Tier, Store], Peers | None]:
    """Return the stores of a worker's secondary tiers, and its peers. If one cannot be made, those
    before it are closed, and the error is raised."""
    stores: dict[Tier, Store] = {}
    peers = None
    with ExitStack() as undo:
        for tier, make in makers.items():
            stores[tier] = undo.enter_context(closing(make()))
            logger.info("KVConnect tier %s: %r", tier.value, stores[tier])
        if make_peers is not None:
            peers = undo.enter_context(closing(make_peers()))
            logger.info("KVConnect tier %s: %r", Tier.PEER.value, peers)
        undo.pop_all()
    return stores, peers


def _make_own(settings: RemoteSettings, fingerprint: bytes, keys: RecordKeys | None) -> Store:
    """Return a store of this package; raise :class:`ImportError` without the packages it needs."""
    if isinstance(settings, ValkeySettings):
        from kvconnect.tiers.backends.valkey import make_valkey_store

        return make_valkey_store(settings, fingerprint, keys)
    if isinstance(settings, MooncakeSettings):
        from kvconnect.tiers.backends.mooncake import make_mooncake_store

        return make_mooncake_store(settings, fingerprint, keys)
    if isinstance(settings, ObjectSettings):
        from kvconnect.tiers.backends.object import make_object_store

        return make_object_store(settings, fingerprint, keys)
    from kvconnect.tiers.backends.memory import MemoryStore, NullStore

    return MemoryStore(settings.capacity) if isinstance(settings, MemorySettings) else NullStore()


def _from_elsewhere(settings: OtherSettings, fingerprint: bytes) -> Store:
    for entry in entry_points(group=ENTRY_POINTS, name=settings.name):
        try:
            make = entry.load()
        except (ImportError, AttributeError) as error:
            fix = f"its package cannot be loaded ({error}): reinstall it or use another store"
            raise ConfigError("store", settings.name, fix) from error
        store: Store = make(settings.options, fingerprint)
        return store
    others = sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)})
    raise ConfigError("store", settings.name, f"use {', '.join(['disk', *REMOTE_KINDS, *others])}")
