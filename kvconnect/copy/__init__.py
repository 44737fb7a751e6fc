"""Copies of blocks between device memory and the host arena.

``reference`` (torch) works on every device and defines the result. ``native`` (C) serves CPU areas
if it was built. ``cuda`` (batched DMA, and kernels if they load) serves CUDA areas if the
arena is page-locked. All give the same bytes.
"""

from __future__ import annotations

import functools
import logging
from functools import partial
from typing import TYPE_CHECKING

from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier
from kvconnect.errors import Incompatible, TransferFailed

if TYPE_CHECKING:
    import torch

    from kvconnect.copy.driver import Driver
    from kvconnect.copy.wire_blocks import BlockCopier

logger = logging.getLogger(__name__)

_WITHOUT_KERNELS = (
    "Without kernels, short runs are copied more slowly, and the CPU computes digests and packs "
    "blocks for other layouts"
)

__all__ = ["Copier", "make_block_copier", "make_copier", "native_unavailable_reason"]


def native_unavailable_reason() -> str | None:
    """Return why the C extension cannot be used; None if it can. Does not import torch."""
    try:
        from kvconnect import _native  # noqa: F401
    except ImportError as error:
        return f"kvconnect._native was not built or does not load ({error})"
    return None


def make_copier(area: torch.Tensor, arena: torch.Tensor, geometry: Geometry) -> Copier:
    """Return the fastest copier for an area; log which one and why.

    Args:
        area: the whole KV cache, uint8 ``[bytes]`` on its device.
        arena: the host tier, uint8 ``[num_slots * slot_bytes]`` on the CPU.

    Raises:
        Misuse: area or arena do not fit the geometry.
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
    """Return (copier for CUDA areas, ""), or (None, why there is none)."""
    if not arena.is_pinned():
        return None, "the host memory is not page-locked"
    from kvconnect.copy.calibration import calibrated
    from kvconnect.copy.cuda import CudaCopier, sample_move
    from kvconnect.copy.staged import Staging

    try:
        driver = open_driver(area.device)
        measured = calibrated(driver, lambda: sample_move(driver))
        make_staging = partial(Staging, driver, segment_bytes=measured.segment_bytes)
        copier = CudaCopier(area, arena, geometry, driver, measured.threshold, make_staging)
    except (Incompatible, TransferFailed) as error:
        _warn_once(f"blocks are copied page by page, which is slower: {error}")
        return None, str(error)
    ways, no_kernels = measured.describe(), driver.kernels_unavailable_reason
    if no_kernels is None:
        logger.info("copying blocks with CUDA: %s", ways)
    else:
        logger.warning("copying blocks with CUDA: %s. %s: %s", ways, _WITHOUT_KERNELS, no_kernels)
    return copier, ""


def make_block_copier(area: torch.Tensor) -> BlockCopier | None:
    """Return the packer of wire blocks on the area's device. If there is none, log that once and
    return None."""
    if area.device.type != "cuda":
        return None
    from kvconnect.copy.wire_blocks import BlockCopier

    try:
        return BlockCopier(area, open_driver(area.device))
    except (Incompatible, TransferFailed) as error:
        _warn_once(f"blocks for other layouts are packed page by page, which is slower: {error}")
        return None


def open_driver(device: torch.device) -> Driver:
    """Return the driver of a CUDA device. Raises :class:`Incompatible` without libcuda."""
    from kvconnect.copy.driver import CudaDriver

    return CudaDriver(device)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
