"""The copy thread with a KV cache on a CUDA device: own streams, ordered by events."""

from __future__ import annotations

from array import array

import pytest

torch = pytest.importorskip("torch")

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry  # noqa: E402
from kvconnect.copy import make_copier  # noqa: E402
from kvconnect.offload.copy_executor import CopyExecutor, FinishedCopy  # noqa: E402
from kvconnect.offload.host_arena import HostArena  # noqa: E402
from kvconnect.offload.messages import GroupBlocks, LoadBlocks, StoreBlocks  # noqa: E402
from kvconnect.offload.streams import make_streams  # noqa: E402
from kvconnect.types import JobId, TransferType  # noqa: E402

BLOCKS, PAGE = 32, 48 << 10


def wait_for(executor: CopyExecutor, count: int) -> list[FinishedCopy]:
    done: list[FinishedCopy] = []
    stop = torch.cuda.Event()
    while len(done) < count:
        stop.record()
        stop.synchronize()
        done += executor.poll()
    return done


def test_the_device_waits_for_each_layer_of_a_synchronous_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvconnect.offload.layer_loads.PIECE_BYTES", 1)
    device = torch.device("cuda")
    wanted = torch.randint(1, 256, (2 * BLOCKS * PAGE,), dtype=torch.uint8, device=device)
    area = wanted.clone()
    segments = tuple(ByteRun(layer * BLOCKS * PAGE, PAGE, PAGE) for layer in range(2))
    geometry = Geometry((GroupGeometry(segments, BLOCKS),))
    store = HostArena(BLOCKS, geometry.slot_bytes, "full")
    assert store.pin()
    copier = make_copier(area, store.tensor(), geometry)
    executor = CopyExecutor(copier, store, geometry, make_streams(device))
    executor.sync.layers = {"first": (0, 1), "second": (0, 2)}
    part = GroupBlocks(0, array("q", range(BLOCKS)), array("q", range(BLOCKS)))
    executor.submit(StoreBlocks(JobId(1), (part,), 60.0), executor.fence())
    wait_for(executor, 1)
    area.zero_()

    slow = torch.cuda.Stream()
    slow.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(slow):
        torch.cuda._sleep(1_000_000_000)  # about half a second, which the load waits for
        fence = executor.fence()
    executor.submit(LoadBlocks(JobId(2), "request", (part,), 60.0, True), fence)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        early = area.clone()  # nothing waits for the load here
    seen = []
    for name, layer in zip(executor.sync.layers, area.chunk(2), strict=True):
        executor.sync.before_layer(name)
        seen.append(layer.clone())
    executor.sync.finish()
    (loaded,) = wait_for(executor, 1)
    torch.cuda.synchronize()
    assert not loaded.report.failures
    assert torch.equal(torch.cat(seen), wanted)
    assert not early.any()  # negative control
    executor.close()
    store.close()


def test_blocks_survive_the_trip_behind_the_work_that_wrote_them() -> None:
    device = torch.device("cuda")
    area = torch.zeros(2 * BLOCKS * PAGE, dtype=torch.uint8, device=device)
    segments = tuple(ByteRun(layer * BLOCKS * PAGE, PAGE, PAGE) for layer in range(2))
    geometry = Geometry((GroupGeometry(segments, BLOCKS),))
    store = HostArena(BLOCKS, geometry.slot_bytes, "full")
    assert store.pin()
    copier = make_copier(area, store.tensor(), geometry)
    executor = CopyExecutor(copier, store, geometry, make_streams(device))
    part = GroupBlocks(0, array("q", range(0, BLOCKS, 2)), array("q", range(BLOCKS - 1, -1, -2)))

    torch.cuda._sleep(200_000_000)  # the model is still busy when the store is submitted ...
    wanted = torch.randint(0, 256, area.shape, dtype=torch.uint8, device=device)
    area.copy_(wanted)  # ... and writes the blocks only then
    executor.submit(StoreBlocks(JobId(1), (part,), 60.0), executor.fence())
    (stored,) = wait_for(executor, 1)
    assert stored.kind is TransferType.GPU_TO_CPU
    assert not stored.report.failures
    assert stored.nbytes == len(part.slots) * 2 * PAGE
    assert stored.seconds > 0

    area.zero_()
    executor.submit(LoadBlocks(JobId(2), "request", (part,), 60.0, True), executor.fence())
    executor.sync.finish()
    (loaded,) = wait_for(executor, 1)
    assert not loaded.report.failures
    got, want = area.view(2, BLOCKS, PAGE), wanted.view(2, BLOCKS, PAGE)
    assert torch.equal(got[:, ::2], want[:, ::2])
    assert not got[:, 1::2].any()  # negative control: nobody touched the other blocks
    executor.close()
    store.close()
