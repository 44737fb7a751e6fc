"""A short soak of all that comes and goes: nothing stays. And what does stay is found."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch")

from benchmarks import soak


@pytest.fixture(scope="module", autouse=True)
def young() -> None:
    """Leave what earlier tests made out of the soaks' collections, one after each round."""
    gc.collect()
    gc.freeze()


@pytest.mark.smokes("soak")
def test_nothing_stays_of_what_comes_and_goes() -> None:
    figures = asyncio.run(soak.run(0.0))
    assert figures["samples"] >= 2 * soak.SETTLED
    assert (figures["fd_growth"], figures["thread_growth"], figures["container_growth"]) == (
        0,
        0,
        0,
    )


@dataclass
class Leaky:
    """Keeps an entry, a file and a thread of each round."""

    kept: dict[int, list[int]] = field(default_factory=dict)
    files: tuple[int, ...] = ()
    ended: threading.Event = field(default_factory=threading.Event)
    threads: tuple[threading.Thread, ...] = ()

    async def turn(self, number: int) -> None:
        self.kept[number] = [number]
        self.files += (os.open("/dev/null", os.O_RDONLY),)
        self.threads += (threading.Thread(target=self.ended.wait, daemon=True),)
        self.threads[-1].start()

    def roots(self) -> Iterable[object]:
        yield self

    async def close(self) -> None:
        self.ended.set()
        for file in self.files:
            os.close(file)
        for thread in self.threads:
            thread.join()


def test_what_stays_is_found() -> None:
    async def leak() -> dict[str, float]:
        part = Leaky()
        try:
            return soak.judged(await soak.soak([part], 0.0))
        finally:
            await part.close()

    figures = asyncio.run(leak())
    assert figures["fd_growth"] > 0
    assert figures["thread_growth"] > 0
    assert figures["container_growth"] > 0
    assert figures["rss_growth_mib_per_hour"] >= 0


def test_memory_that_grows_has_a_slope() -> None:
    samples = [soak.Sample(float(at), (100 + at) * 2**20, 1, 1, {}) for at in range(10)]
    assert soak.slope(samples) == pytest.approx(3600)
    assert soak.judged(samples)["fd_growth"] == 0
