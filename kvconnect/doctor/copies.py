"""``kvconnect doctor copy``: copies blocks between KV cache and host tier, as engines do."""

from __future__ import annotations

import ctypes
import random
import statistics
from collections.abc import Callable
from functools import partial

import torch

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy import make_copier, native_unavailable_reason
from kvconnect.copy.base import Copier
from kvconnect.doctor import Finding, FindingsReport, rate
from kvconnect.doctor.buffers import pattern
from kvconnect.errors import KVConnectError
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.streams import Streams, make_streams
from kvconnect.types import TransferType

PAGES = (64 << 10, 1 << 20)
SLOW = 0.5
"""A copy slower than this share of one large memcpy gets a warning."""

_MIB = 1 << 20
_GOOD = "blocks can be copied here"
_BAD = "blocks cannot be copied here: see the fail lines"
_KINDS = {"store": TransferType.GPU_TO_CPU, "load": TransferType.CPU_TO_GPU}


def examine(
    device: str, buffer_bytes: int = 192 * _MIB, sample_bytes: int = 64 * _MIB
) -> FindingsReport:
    """Copy ``sample_bytes`` of random pages between buffers of ``buffer_bytes``, both ways.

    ``device`` holds the KV cache: ``cpu`` or ``cuda``. Both sizes must be whole MiB.
    """
    if device == "cuda" and not torch.cuda.is_available():
        fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
        return FindingsReport((Finding("copy", "fail", "no CUDA device", fix),), _GOOD, _BAD)
    try:
        bench = _Bench(device, buffer_bytes, sample_bytes)
    except (OSError, RuntimeError, MemoryError) as error:
        fix = f"free {2 * buffer_bytes / 2**20:.0f} MiB of memory"
        return FindingsReport((Finding("copy", "fail", str(error), fix),), _GOOD, _BAD)
    findings: list[Finding] = []
    measured: dict[str, object] = {"device": device, "pinned": bench.pinned}
    try:
        for page in PAGES:
            found, figures = bench.page(page)
            findings += found
            measured |= figures
    except (KVConnectError, RuntimeError) as error:
        findings.append(Finding("copy", "fail", str(error), "check the device and its driver"))
    finally:
        bench.close()
    return FindingsReport(tuple(findings), _GOOD, _BAD, measured)


class _Bench:
    """A KV cache, a host tier, and copies of a sample between them."""

    def __init__(self, device: str, buffer_bytes: int, sample_bytes: int) -> None:
        self._random = random.Random(0)
        self._nbytes = buffer_bytes
        self._sample = sample_bytes
        self._cache = torch.frombuffer(pattern(buffer_bytes), dtype=torch.uint8).to(device)
        self._store = HostArena(buffer_bytes // _MIB, _MIB, "off")
        self._on_cuda = self._cache.is_cuda
        self.pinned = self._on_cuda and self._store.pin()
        self._arena = self._store.tensor()
        self._streams: Streams = make_streams(self._cache.device)

    def close(self) -> None:
        self._store.close()

    def page(self, page: int, rounds: int = 3) -> tuple[list[Finding], dict[str, object]]:
        """Measure pages of one size; return findings and figures."""
        copier = self._copier(page)
        label = f"{page >> 10}k"
        findings, figures = [], dict[str, object]()
        for direction in _KINDS:
            copy, whole = [], []
            for number in range(rounds + 1):  # the first round is verified, not counted
                blocks, slots = self._pick(page)
                move = partial(getattr(copier, direction), 0, blocks, slots)
                seconds = self._seconds(direction, move)
                if not number and (wrong := self._wrong(page, blocks, slots)):
                    value = f"{wrong} of {len(blocks)} pages were copied wrong"
                    fix = "do not offload here: check memory, and report this"
                    return [Finding(f"{direction} {label}", "fail", value, fix)], figures
                large = self._seconds(direction, partial(self._memcpy, direction))
                if number:
                    copy.append(self._sample / seconds)
                    whole.append(self._sample / large)
            speed, best = statistics.median(copy), statistics.median(whole)
            findings.append(self._finding(f"{direction} {label}", speed, best))
            figures[f"{direction}_{label}_bytes_per_s"] = speed
            figures[f"{direction}_{label}_ratio"] = speed / best
        return findings, figures

    def _finding(self, name: str, speed: float, best: float) -> Finding:
        value = f"{rate(speed)}, {speed / best:.2f} of one large copy ({rate(best)})"
        if speed >= SLOW * best:
            return Finding(name, "ok", value)
        if self._on_cuda and not self.pinned:
            fix = "raise the memlock limit: ulimit -l unlimited, or docker --ulimit memlock=-1"
            return Finding(name, "warn", f"{value}: the host tier is not page-locked", fix)
        if self._on_cuda:
            fix = (
                "pip install kvconnect[cuda12] or kvconnect[cuda13], or larger blocks: --block-size"
            )
            return Finding(name, "warn", value, fix)
        if reason := native_unavailable_reason():
            fix = "install a C compiler and reinstall with KVCONNECT_BUILD_NATIVE=1"
            return Finding(name, "warn", f"{value}: {reason}", fix)
        return Finding(name, "warn", value, "measure again on a machine that is not busy")

    def _copier(self, page: int) -> Copier:
        blocks = GroupGeometry((ByteRun(0, page, page),), self._nbytes // page)
        return make_copier(self._cache, self._arena, Geometry((blocks,)))

    def _pick(self, page: int) -> tuple[list[int], list[int]]:
        """Return random blocks and slots, one per page of a sample."""
        everything, count = range(self._nbytes // page), self._sample // page
        return self._random.sample(everything, count), self._random.sample(everything, count)

    def _seconds(self, direction: str, copy: Callable[[], None]) -> float:
        return self._streams.run(_KINDS[direction], self._streams.fence(), copy)

    def _memcpy(self, direction: str) -> None:
        """Move a sample in one piece."""
        last = (self._nbytes - self._sample) // _MIB
        here, there = (self._random.randint(0, last) * _MIB for _ in range(2))
        cache = self._cache.narrow(0, here, self._sample)
        arena = self._arena.narrow(0, there, self._sample)
        target, source = (arena, cache) if direction == "store" else (cache, arena)
        if self._on_cuda:
            target.copy_(source, non_blocking=self.pinned)
        else:  # one thread, like a copier; torch would use several
            ctypes.memmove(target.data_ptr(), source.data_ptr(), self._sample)

    def _wrong(self, page: int, blocks: list[int], slots: list[int]) -> int:
        """Return how many pages differ between cache and arena."""
        shape = (-1, page // 8)
        cache = self._cache.view(torch.int64).view(shape)[blocks].cpu()
        arena = self._arena.view(torch.int64).view(shape)[slots]
        return int((cache != arena).any(dim=1).sum())
