"""Moving blocks between device memory and the host arena.

``reference`` (torch) defines the result for every device; ``native`` (C) must match it byte for
byte on CPU areas and is used for them when it was built.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvconnect.copy.base import Copier
from kvconnect.geometry import Geometry

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

__all__ = ["Copier", "make_copier", "native_unavailable_reason"]


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
    if area.device.type == "cpu":
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
