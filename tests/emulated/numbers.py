"""Numbers of a table on the device, read on the host while the engine goes on writing to it."""

from __future__ import annotations

from random import Random

import pytest
import torch

from kvconnect.engines.sglang.device_numbers import DeviceNumbers
from tests.emulated.device import Emulator, OnDevice, Site
from tests.emulated.world import World

ROWS, ROW = 4, 3
NOT_YET = -1


class Row(OnDevice):
    """A row of a table on the device, which a copy reads when the stream gets to it."""

    def __init__(self, emulator: Emulator, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._emulator = emulator

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        assert device == "cpu" and non_blocking
        host = torch.full_like(self.tensor, NOT_YET)
        self._emulator.launch(lambda: host.copy_(self.tensor))  # type: ignore[arg-type,return-value]
        return host


def play(random: Random, disabled: frozenset[Site] = frozenset()) -> Emulator:
    """Read some rows; raise if one is not what was written before it was asked for."""
    world = World(random)
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulator = Emulator(world, disabled)
        emulator.install(monkeypatch)
        world.run(lambda: _read_rows(emulator))
    return emulator


def _read_rows(emulator: Emulator) -> None:
    table = torch.full((ROW,), NOT_YET)
    with emulator.on(emulator.stream()):
        for number in range(ROWS):
            emulator.launch(lambda number=number: table.fill_(number))
            numbers = DeviceNumbers(Row(emulator, table))  # type: ignore[arg-type]
            emulator.launch(lambda: table.fill_(NOT_YET))  # its next owner's
            if emulator.world.random.random() < 0.5:
                numbers.wait()
            else:
                emulator.world.block(numbers.are_here)
            assert numbers.read() == [number] * ROW
