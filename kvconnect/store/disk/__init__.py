"""Blocks in a folder: a log of segments, each with its records and, once full, its index."""

from kvconnect.store.disk.options import DiskOptions
from kvconnect.store.disk.store import DiskStore

__all__ = ["DiskOptions", "DiskStore"]
