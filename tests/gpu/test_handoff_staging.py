"""A KV cache on a CUDA device behind the staging ring: its bytes, and their order in time."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from kvconnect.disaggregation.staging import BUFFERS, StagedMemory, make_memory
from kvconnect.offload.streams import DeviceFence, make_streams
from kvconnect.testing.page_memory import phased_unit, plain_unit, split_unit
from kvconnect.transport import ConnectionOptions, Security, make_transport
from kvconnect.transport.base import (
    Event,
    IncomingPages,
    OutgoingPages,
    PagesReceived,
    PeerUp,
    Transport,
    Unit,
)

PAGES, RUN, RUNS = 24, 16 << 10, 6
NBYTES = PAGES * RUN * RUNS
SHARE_BYTES = 5 * RUN  # less than a block of all runs
BUSY_CYCLES = 1_000_000_000  # about half a second

UNITS = pytest.mark.parametrize(
    "unit",
    [plain_unit(RUN), split_unit(RUN, RUNS, PAGES), phased_unit(RUN, RUNS // 2, 2)],
    ids=["one run", "layers apart", "parts of a page"],
)


def make_area(high: int) -> torch.Tensor:
    """Return bytes below ``high`` that are there already: the ring's streams do not wait."""
    area = torch.randint(0, high, (NBYTES,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return area


def random_area() -> torch.Tensor:
    return make_area(256)


def zero_area() -> torch.Tensor:
    return make_area(1)


def staged(area: torch.Tensor) -> StagedMemory:
    return StagedMemory(area, 2 * BUFFERS * SHARE_BYTES)


def places(unit: Unit, ids: array[int]) -> Iterator[slice]:
    """Yield where in the area the runs of wire blocks are, in wire order."""
    triples = len(unit.segments) // unit.phases
    for number in ids:
        page, phase = divmod(number, unit.phases)
        for i in range(phase * triples, (phase + 1) * triples, 3):
            offset, stride, length = unit.segments[i : i + 3]
            yield slice(offset + page * stride, offset + page * stride + length)


def read(memory: StagedMemory, unit: Unit, ids: array[int]) -> bytes:
    """Return what a transport would send: a piece's blocks lie back to back in the ring."""
    return b"".join(
        ctypes.string_at(piece.address, len(piece.ids) * unit.block_bytes)
        for piece in memory.outgoing(unit, ids)
    )


@UNITS
def test_pages_leave_the_device_and_arrive_on_it(unit: Unit) -> None:
    source, target = random_area(), random_area()
    expected = target.clone()
    torch.cuda.synchronize()
    ids = array("q", [11, 2, 7, 3, 9, 0, 1])
    content = read(staged(source), unit, ids)
    host = source.cpu()
    assert content == b"".join(host[run].numpy().tobytes() for run in places(unit, ids))

    start = 0
    for piece in staged(target).incoming(unit, ids):
        size = len(piece.ids) * unit.block_bytes
        ctypes.memmove(piece.address, content[start : start + size], size)
        start += size
    assert start == len(content)
    assert not torch.equal(target, expected)  # negative control
    for run in places(unit, ids):
        expected[run] = source[run]
    assert torch.equal(target, expected)


def test_a_piece_dropped_midway_stays_off_the_device() -> None:
    target = zero_area()
    memory, unit = staged(target), plain_unit(RUN)
    pieces = memory.incoming(unit, array("q", range(PAGES)))
    for _ in range(2):
        piece = next(pieces)
        ctypes.memset(piece.address, 1, piece.nbytes)
    pieces.close()
    assert target[: 5 * RUN].eq(1).all()  # the first piece, which was complete
    assert not target[5 * RUN :].any()


def test_the_ring_is_page_locked() -> None:
    memory = staged(random_area())
    with memory._sending.buffer(RUN) as share:
        assert share.is_pinned()
    with memory._receiving.buffer(2 * SHARE_BYTES) as share:  # also once it has grown
        assert share.is_pinned()


def layer_by_layer(area: torch.Tensor, wanted: torch.Tensor, halves: int) -> list[DeviceFence]:
    """Launch a slow model that writes the area in equal parts; return a fence after each."""
    streams = make_streams(area.device)
    fences = []
    for target, source in zip(area.chunk(halves), wanted.chunk(halves), strict=True):
        torch.cuda._sleep(BUSY_CYCLES)
        target.copy_(source)
        fence = streams.mark()
        assert fence is not None
        fences.append(fence)
    return fences


def test_each_layer_can_be_read_behind_its_own_fence() -> None:
    area, wanted = zero_area(), random_area()
    memory = staged(area)
    layers = [plain_unit(RUN), plain_unit(RUN, NBYTES // 2)]
    ids = array("q", range(PAGES * RUNS // 2))
    first, second = (half.cpu().numpy().tobytes() for half in wanted.chunk(2))
    read(memory, layers[0], ids)  # what the first use sets up must not wait for the model

    fences = layer_by_layer(area, wanted, 2)
    assert read(memory, layers[0], ids) != first  # negative control: nobody waited
    fences[0].wait()
    assert read(memory, layers[0], ids) == first
    assert read(memory, layers[1], ids) != second  # and the model has gone on meanwhile
    waiter = threading.Thread(target=fences[1].wait)  # from any thread
    waiter.start()
    waiter.join()
    assert read(memory, layers[1], ids) == second


def poll(transport: Transport, kind: type[Event], count: int = 1) -> list[Event]:
    """Return the next ``count`` events of a kind."""
    found: list[Event] = []
    for _ in range(600):
        found += [event for event in transport.poll(0.05) if isinstance(event, kind)]
        if len(found) >= count:
            return found
    raise AssertionError(f"{len(found)} of {count} {kind.__name__} came")


def test_layers_cross_a_socket_from_device_to_device() -> None:
    area, target, wanted = zero_area(), zero_area(), random_area()
    layers = [plain_unit(RUN), plain_unit(RUN, NBYTES // 2)]
    ids = array("q", range(PAGES * RUNS // 2))
    options = ConnectionOptions(digest="full")
    reader, source = (make_transport("tcp", Security(), options) for _ in range(2))
    try:
        reader.register(make_memory(target))
        source.register(make_memory(area))
        peer = reader.connect(*source.listen("127.0.0.1", 0))
        (up,) = poll(source, PeerUp)
        reader.submit(IncomingPages(peer, 1, layers, [(0, ids), (0, ids)]))
        for number, fence in enumerate(layer_by_layer(area, wanted, 2)):
            source.submit(OutgoingPages(up.peer, 1, number, layers[number], 0, ids, fence))
        arrived = poll(reader, PagesReceived, 2)
        assert not any(event.bad for event in arrived)
    finally:
        reader.close()
        source.close()
    assert torch.equal(target, wanted)
    target[NBYTES // 2] ^= 1
    assert not torch.equal(target, wanted)  # negative control
