"""Stands in for torch's calls about a thread's current CUDA stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def stand_in(
    patch: pytest.MonkeyPatch,
    current: Callable[[], Any],
    change: Callable[[Any], None] = lambda _: None,
) -> None:
    """``current`` has the calling thread's stream, ``change`` makes another one its current one.

    As torch's, a stream is known by ``stream_id``, here itself, ``device_index``, ``device_type``.
    """

    def set_stream(*, stream_id: Any, device_index: int, device_type: int) -> None:
        assert (device_index, device_type) == (stream_id.device_index, stream_id.device_type)
        change(stream_id)

    def identity(_: int) -> tuple[Any, int, int]:
        stream = current()
        return stream, stream.device_index, stream.device_type

    patch.setattr(torch.cuda, "current_stream", lambda _=None: current())
    for name, stands_in in {
        "_cuda_getCurrentRawStream": lambda _: current().cuda_stream,
        "_cuda_getCurrentStream": identity,
        "_cuda_setStream": set_stream,
    }.items():
        patch.setattr(torch._C, name, stands_in, raising=False)  # torch for CPUs has none of them
