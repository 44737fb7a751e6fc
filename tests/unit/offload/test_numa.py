"""Which NUMA node a device is on, and asking for its memory."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvconnect.offload import numa
from kvconnect.offload.host_arena import HostArena

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("text", "node"), [("0\n", 0), ("3\n", 3), ("-1\n", None), ("", None), (None, None)]
)
def test_the_node_is_read_from_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, node: int | None
) -> None:
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    folder = tmp_path / "0001:0a:1f.0"
    folder.mkdir()
    if text is not None:
        (folder / "numa_node").write_text(text)
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=10, pci_device_id=31)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert numa.device_node(torch.device("cuda:0")) == node
    assert numa.device_node(torch.device("cpu")) is None


def test_a_torch_that_does_not_name_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert numa.device_node(torch.device("cuda:0")) is None


def test_an_arena_is_usable_whether_or_not_its_node_is_there() -> None:
    for node in (0, 1023, 5000, -1):
        store = HostArena(2, mmap.PAGESIZE, "off", node)
        store.view(1)[:] = bytes([7]) * mmap.PAGESIZE
        assert bytes(store.view(1)) == bytes([7]) * mmap.PAGESIZE
        store.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of the system calls, which all succeed and do nothing."""
    found: list[tuple[Any, ...]] = []

    def syscall(*arguments: Any) -> int:
        found.append(arguments)
        return 0

    monkeypatch.setattr(numa.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return found


@pytest.mark.parametrize("node", [0, 3, 63, 64, 1023])
def test_the_kernel_is_asked_for_the_node(calls: list[tuple[Any, ...]], node: int) -> None:
    assert numa.prefer_node(4096, 8192, node)
    ((number, address, nbytes, mode, mask, most, flags),) = calls
    values = [each.value for each in (number, address, nbytes, mode, most, flags)]
    assert values == [237, 4096, 8192, 1, 1024, 0]
    words = enumerate(mask._obj)
    assert sum(word << 64 * place for place, word in words) == 1 << node


def test_what_cannot_be_asked_is_not(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not numa.prefer_node(4096, 8192, -1)
    assert not numa.prefer_node(4096, 8192, 1024)
    monkeypatch.setattr("platform.machine", lambda: "m68k")
    assert not numa.prefer_node(4096, 8192, 0)
    assert calls == []


def test_what_the_kernel_refuses_is_not_preferred() -> None:
    assert not numa.prefer_node(1, 4096, 0)  # no page starts there
