"""Tables that a copier keeps on the device: made on one stream, read on all."""

from __future__ import annotations

from array import array
from functools import partial
from random import Random

import pytest
import torch

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy.calibration import CopyThreshold
from kvconnect.copy.cuda import CudaCopier
from kvconnect.copy.wire_blocks import BlockCopier
from tests.emulated.device import EmulatedDriver, Emulator, Site
from tests.emulated.world import World

SIZE, COUNT = 64, 4
ALWAYS = CopyThreshold(1 << 30, 1 << 30, fewest_rows=1)
IDS = array("q", range(COUNT))


def play(random: Random, disabled: frozenset[Site] = frozenset()) -> Emulator:
    """Copy on streams that wait for nothing else; raise if something is wrong."""
    world = World(random)
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulator = Emulator(world, disabled)
        emulator.install(monkeypatch)
        world.run(lambda: _copy_blocks(emulator))
        world = emulator.world = World(random)
        emulator.default = emulator.stream()
        world.run(lambda: _pack_blocks(emulator))
    return emulator


def _copy_blocks(emulator: Emulator) -> None:
    area = torch.randint(1, 256, (COUNT * SIZE,), dtype=torch.uint8)
    geometry = Geometry((GroupGeometry((ByteRun(0, SIZE, SIZE),), COUNT),))
    slots = torch.zeros(COUNT * geometry.slot_bytes, dtype=torch.uint8)
    driver = EmulatedDriver(emulator)
    copier = CudaCopier(area, slots, geometry, driver, ALWAYS)
    with emulator.on(emulator.stream()):
        copier.store(0, IDS, IDS)
        assert torch.equal(slots.view(COUNT, -1)[:, :SIZE].flatten(), area)
        wanted = area.clone()
        area.zero_()
        copier.load(0, IDS, IDS)
        assert torch.equal(area, wanted)


def _pack_blocks(emulator: Emulator) -> None:
    """One half of the blocks is packed, the other unpacked; whichever comes first makes the table,
    and is not waited for."""
    area = torch.randint(1, 256, (COUNT * SIZE,), dtype=torch.uint8)
    source = torch.randint(1, 256, (COUNT * SIZE // 2,), dtype=torch.uint8)
    target, half = torch.zeros_like(source), COUNT // 2
    driver = EmulatedDriver(emulator)
    copier, unit = BlockCopier(area, driver), array("q", [0, SIZE, SIZE])
    pack = partial(copier.pack, unit, 1, IDS[:half], target.data_ptr())
    unpack = partial(copier.unpack, unit, 1, IDS[half:], source.data_ptr())
    work = [pack, unpack]
    emulator.world.random.shuffle(work)
    streams = [emulator.stream(), emulator.stream()]
    for stream, each in zip(streams, work, strict=True):
        with emulator.on(stream):
            each()
    for stream in streams:
        with emulator.on(stream):
            driver.synchronize()
    assert torch.equal(target, area[: len(target)])
    assert torch.equal(source, area[len(target) :])
