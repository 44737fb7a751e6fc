"""How many bytes of host memory the setting ``host_bytes`` stands for."""

from __future__ import annotations

from kvconnect.errors import ConfigError
from kvconnect.settings.fields import Settings

AUTO_HOST_SHARE = 0.25  # leaves room for weights being loaded, page cache and the engine itself


def share_of_host_bytes(settings: Settings, *, memory_bytes: int | None, engines: int) -> int:
    """Return one engine's host tier in bytes.

    Args:
        memory_bytes: memory of the machine or container; None if the system does not say.
        engines: data-parallel engines on this machine, among which ``auto`` is divided.

    Raises:
        ConfigError: ``auto`` on a system that does not say how much memory it has.
    """
    if settings.host_bytes == "off":
        return 0
    if settings.host_bytes != "auto":
        return settings.host_bytes
    if memory_bytes is None:
        raise ConfigError("host_bytes", "auto", "the memory size is unknown here; set a size")
    return int(memory_bytes * AUTO_HOST_SHARE) // max(engines, 1)


def check_fits(host_bytes: int, *, memory_bytes: int | None, what: str) -> None:
    """Refuse a host tier that the memory cannot hold, before it is allocated.

    Args:
        what: which memory that is, for the message: ``"in this machine"``.

    Raises:
        ConfigError: more bytes than there are.
    """
    if memory_bytes is not None and host_bytes > memory_bytes:
        gib = f"{memory_bytes / 2**30:.1f} GiB"
        raise ConfigError("host_bytes", host_bytes, f"there are only {gib} {what}; use less")
