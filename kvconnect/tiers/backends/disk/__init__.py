"""Blocks in a folder: a log of segments, each with its records and, once full, its index."""

from kvconnect.tiers.backends.disk.folder import DiskOptions
from kvconnect.tiers.backends.disk.store import DiskStore

__all__ = ["DiskOptions", "DiskStore"]
