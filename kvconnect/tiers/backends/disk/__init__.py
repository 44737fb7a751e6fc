"""The disk tier: a folder with a log of segments. A full segment has an index beside it."""

from kvconnect.tiers.backends.disk.disk_options import DiskOptions
from kvconnect.tiers.backends.disk.store import DiskStore

__all__ = ["DiskOptions", "DiskStore"]
