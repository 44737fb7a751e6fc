"""Streams that nobody else in the process has."""

from __future__ import annotations

import torch

from kvconnect.cuda import CudaContext


def own_stream(device: torch.device, urgent: bool = False) -> torch.cuda.Stream:
    """Return a new stream of a CUDA device; ``urgent``: work on it goes before the model's.

    torch gives its 32 streams per priority out in turns, so any of them may be the engine's too:
    a copy would then stand in line with the model. This one lives until the process ends, because
    torch's allocators remember streams by their handles.

    Raises:
        Incompatible: there is no CUDA driver.
        TransferFailed: the driver refuses.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = CudaContext(index).stream(urgent)
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))
