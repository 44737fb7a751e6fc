"""Pages between KV caches on a CUDA device, written by NIXL without a copy through the host."""

from __future__ import annotations

import importlib.util
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
if not any(map(importlib.util.find_spec, ("nixl_cu12", "nixl_cu13"))):
    pytest.skip("NIXL is not installed", allow_module_level=True)

from kvconnect.disaggregation.staging import make_memory
from kvconnect.testing.page_memory import plain_unit, split_unit
from kvconnect.testing.transport import Side
from kvconnect.transport import make_transport
from kvconnect.transport.base import IncomingPages, OutgoingPages, PagesReceived, PeerUp
from tests.links import NIXL_QUICK, OPEN

PAGES, RUN = 64, 32 << 10
POLLS = 3000


def cache(high: int) -> torch.Tensor:
    area = torch.randint(0, high, (4 * PAGES * RUN,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return area


def side(area: torch.Tensor) -> Side:
    transport = make_transport("nixl", OPEN, replace(NIXL_QUICK, digest="full"))
    return Side(transport, make_memory(area))  # type: ignore[arg-type]


def poll(*sides: Side) -> None:
    for each in sides:
        each.poll()


def test_pages_go_from_device_to_device() -> None:
    here, there = cache(256), cache(1)
    reader, source = side(there), side(here)
    ours, theirs = plain_unit(4 * RUN), split_unit(RUN, 4, PAGES)
    sources, targets = (array("q", torch.randperm(PAGES).tolist()) for _ in range(2))
    try:
        peer = reader.transport.connect(*source.transport.listen("127.0.0.1", 0))
        for _ in range(POLLS):
            poll(reader, source)
            if reader.of(PeerUp) and source.of(PeerUp):
                break
        reader.transport.submit(IncomingPages(peer, 1, [theirs], [(0, targets)], None, "nixl"))
        source.transport.submit(OutgoingPages(source.of(PeerUp)[0].peer, 1, 0, ours, 0, sources))
        for _ in range(POLLS):
            poll(reader, source)
            if sum(event.count for event in reader.of(PagesReceived)) == PAGES:
                break
    finally:
        reader.transport.close()
        source.transport.close()
    assert sum(event.count for event in reader.of(PagesReceived)) == PAGES
    assert not any(event.bad for event in reader.of(PagesReceived))
    wanted = here.view(PAGES, 4, RUN)[torch.tensor(sources)]
    found = there.view(4, PAGES, RUN).transpose(0, 1)[torch.tensor(targets)]
    assert torch.equal(found, wanted)
    assert not torch.equal(found, wanted.roll(1, 0))  # pages differ from one another
