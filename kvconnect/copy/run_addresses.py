"""Addresses of many runs of bytes: by the C extension, else by torch."""

from __future__ import annotations

from array import array

import torch


def torch_run_addresses(
    starts: array[int], strides: array[int], ids: array[int], limit: int
) -> bytes:
    """As ``run_addresses`` of the C extension, but each call of torch gives up the GIL."""
    numbers, first, step = (torch.frombuffer(n, dtype=torch.int64) for n in (ids, starts, strides))
    if not 0 <= int(numbers.min()) <= int(numbers.max()) < limit:
        raise IndexError(f"not all in [0, {limit}): {ids.tolist()}")
    return bytes((first + numbers.unsqueeze(1) * step).numpy())


try:
    from kvconnect._native import run_addresses
except ImportError:  # no C compiler when KVConnect was installed
    run_addresses = torch_run_addresses
