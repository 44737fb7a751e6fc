"""Moving blocks between device memory and the host arena.

``reference`` (torch) defines the result for every device; ``native`` (C) must match it byte for
byte on CPU areas and is used for them when it was built. ``cuda`` (kernels and batched DMA) is for
CUDA areas, where CuPy and the driver are there and the arena is page-locked.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier
from kvconnect.errors import Incompatible, TransferFailed

if TYPE_CHECKING:
    import torch

    from kvconnect.copy.cuda import BlockCopier
    from kvconnect.copy.driver import Driver

logger = logging.getLogger(__name__)

__all__ = ["Copier", "make_block_copier", "make_copier", "native_unavailable_reason"]


def native_unavailable_reason() -> str | None:
    """Return why the C extension cannot be used, None if it can. Imports no torch."""
    try:
        from kvconnect import _native  # noqa: F401
    except ImportError as error:
        return f"kvconnect._native was not built or does not load ({error})"
    return None


def make_copier(area: torch.Tensor, arena: torch.Tensor, geometry: Geometry) -> Copier:
    """Return the fastest copier that serves this area, and log which one and why.

    ``area`` is the whole KV cache, uint8 ``[bytes]`` on its device; ``arena`` is the host tier,
    uint8 ``[num_slots * slot_bytes]`` on the CPU. Raises :class:`Misuse` if they do not fit the
    geometry.
    """
    reason: str | None
    if area.device.type == "cuda":
        found, reason = _cuda_copier(area, arena, geometry)
        if found is not None:
            return found
    elif area.device.type == "cpu":
        reason = native_unavailable_reason()
    else:
        reason = f"the KV cache is on {area.device}"
    if reason is None:
        from kvconnect.copy.native import NativeCopier

        logger.info("copying blocks with native code")
        return NativeCopier(area, arena, geometry)

    from kvconnect.copy.reference import ReferenceCopier

    logger.info("copying blocks with torch: %s", reason)
    return ReferenceCopier(area, arena, geometry)


def _cuda_copier(
    area: torch.Tensor, arena: torch.Tensor, geometry: Geometry
) -> tuple[Copier | None, str]:
    """Return the copier for CUDA areas, or None and why not."""
    if not arena.is_pinned():
        return None, "the host memory is not page-locked"
    from kvconnect.copy.calibration import calibrated
    from kvconnect.copy.cuda import CudaCopier, sample_move

    try:
        driver = open_driver(area.device)
        choice = calibrated(driver, lambda: sample_move(driver))
        copier = CudaCopier(area, arena, geometry, driver, choice)
    except (Incompatible, TransferFailed) as error:
        _warn_once(str(error))
        return None, str(error)
    logger.info(
        "copying blocks with CUDA: store by %s, load by %s",
        copier.method("store", 0),
        copier.method("load", 0),
    )
    return copier, ""


def make_block_copier(area: torch.Tensor) -> BlockCopier | None:
    """Return what packs wire blocks on the area's device; None, said once, if nothing can."""
    if area.device.type != "cuda":
        return None
    from kvconnect.copy.cuda import BlockCopier

    try:
        return BlockCopier(area, open_driver(area.device))
    except (Incompatible, TransferFailed) as error:
        _warn_once(str(error))
        return None


def open_driver(device: torch.device) -> Driver:
    """Return the driver of a CUDA device; raise :class:`Incompatible` for what is missing."""
    from kvconnect.copy.driver import CudaDriver

    return CudaDriver(device)


@functools.cache
def _warn_once(why: str) -> None:
    logger.warning("no CUDA kernels, copies go page by page and are slower: %s", why)
