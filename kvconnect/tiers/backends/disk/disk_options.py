"""The options of a disk tier, with what follows from its settings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvconnect.settings.quantities import Rule
from kvconnect.settings.stores import DiskSettings
from kvconnect.tiers.backends.disk.formats import check_format

_About = Rule("use an object of words, each text", check=check_format)
_SEGMENTS = 256
_SEGMENT_BYTES = 64 << 20
_MAX_SEGMENT_BYTES = 1 << 36  # pages of a segment are numbered with 24 bits


class DiskOptions(DiskSettings, frozen=True, kw_only=True):
    """One worker's part of the disk tier.

    Attributes:
        owner: name of this worker's folder in ``path``.
        about: description of the block format, in words, which ``kvconnect cache`` shows.
    """

    owner: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$(?!\n)"),
        Rule("use 1 to 64 letters, digits, - and _"),
    ] = "0"
    about: Annotated[dict[str, str], _About] = {}  # noqa: RUF012

    @property
    def segment_bytes(self) -> int:
        """Bytes of a full segment, the unit of eviction."""
        wanted = max(self.capacity // _SEGMENTS, min(_SEGMENT_BYTES, self.capacity // 4))
        return min(wanted, _MAX_SEGMENT_BYTES) & ~4095

    @property
    def quota_bytes(self) -> int | None:
        """Maximum bytes of one tenant's blocks, None for no limit."""
        return int(self.tenant_share * self.capacity) if self.tenant_share < 1 else None
