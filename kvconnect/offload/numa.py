"""NUMA nodes of devices and memory: copies between sockets run at half the speed."""

from __future__ import annotations

import ctypes
import logging
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the mbind system call; the C library has no function for it."""
_PREFERRED = 1  # memory of other nodes is used when this node is full
_MAX_NODES = 1024
_PCI = Path("/sys/bus/pci/devices")


def device_node(device: torch.device) -> int | None:
    """Return the NUMA node of a CUDA device; None for other devices or if unknown."""
    if device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:
        return None
    domain, bus, number = numbers
    return pci_node(f"{domain:04x}:{bus:02x}:{number:02x}.0")


def pci_node(address: str) -> int | None:
    """Return the NUMA node of a PCI device; None if the system has one node or does not say."""
    try:
        node = int((_PCI / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Prefer a NUMA node for memory that was not touched yet; return whether the kernel accepted.

    A refusal (missing permission in a container, another processor) only costs speed.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    status: int = library.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(_MAX_NODES),
        ctypes.c_uint(0),
    )
    if status:
        logger.info("host tier: NUMA node %d refused (errno %d)", node, ctypes.get_errno())
    return status == 0
