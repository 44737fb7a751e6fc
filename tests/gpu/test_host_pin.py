"""Page-locking of the host arena and the copy it is for, on a real CUDA device."""

from __future__ import annotations

import pytest

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.offload.host_arena import HostArena, arena_bytes
from kvconnect.offload.shared_memory import SharedMemory

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(("pinned", "is_shared"), [(True, False), (False, False), (True, True)])
def test_blocks_come_back_from_the_arena(pinned: bool, is_shared: bool) -> None:
    from kvconnect.copy import make_copier

    block, num_blocks = 64 << 10, 16
    geometry = Geometry((GroupGeometry((ByteRun(0, block, block),), num_blocks),))
    shared = SharedMemory.make(arena_bytes(num_blocks, block), 2) if is_shared else None
    store = HostArena(num_blocks, geometry.slot_bytes, "full", shared=shared)
    assert not store.tensor().is_pinned()  # negative control
    if pinned:
        assert store.pin()
        assert store.tensor().is_pinned()
    reader = store
    if shared is not None:  # as another rank has it
        memory = SharedMemory.open(shared.offer(), len(shared.mapping), 1, 2)
        reader = HostArena(num_blocks, geometry.slot_bytes, "full", shared=memory)
        assert reader.pin()

    size = (block * num_blocks,)
    area = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
    expected = area.clone()
    copier = make_copier(area, store.tensor(), geometry)
    ids = list(range(num_blocks))
    copier.store(0, ids, ids[::-1])
    for slot in ids:
        store.seal(slot, block)
    area.zero_()
    loader = make_copier(area, reader.tensor(), geometry)
    loader.load(0, ids, ids[::-1])
    assert torch.equal(area, expected)
    for slot in ids:
        reader.verify(slot, block)

    store.view(0)[0] ^= 1  # negative control
    loader.load(0, ids, ids[::-1])
    assert not torch.equal(area, expected)
    reader.close()
    store.close()
