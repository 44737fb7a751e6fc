"""The host tier as a transport reads and writes it: its memory, and the units of its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Sequence

from kvconnect.cache.head_shards import HeadUnit, merged
from kvconnect.offload.host_arena import HostArena
from kvconnect.tiers.peers.serving import GroupUnits
from kvconnect.transport.base import MemoryRegion, PageChunk, PageUser, Unit


class ArenaMemory:
    """The host tier as a transport reads and writes it, in place. Slot n is wire block n."""

    def __init__(self, host: HostArena) -> None:
        self._host = host
        self._region = MemoryRegion(host.address, host.nbytes)

    def regions(self) -> tuple[MemoryRegion, ...]:
        return (self._region,)

    def region_of(self, unit: Unit) -> MemoryRegion:  # noqa: ARG002 - there is one region
        return self._region

    def outgoing(
        self,
        unit: Unit,
        ids: array[int],
        user: PageUser | None = None,  # noqa: ARG002 - there is nothing to wait for
    ) -> Generator[PageChunk, None, None]:
        yield PageChunk(self._region.address, self._region.nbytes, unit, ids)

    incoming = outgoing


def transport_units(page: Sequence[HeadUnit], slot_bytes: int) -> GroupUnits:
    """Return the units of a page, with their places in slots."""

    def unit(runs: Iterable[tuple[int, int]], nbytes: int) -> Unit:
        numbers = [number for start, length in runs for number in (start, slot_bytes, length)]
        return Unit(array("q", numbers), 1, nbytes)

    parts = {part.number: unit(part.runs, part.nbytes) for part in page}
    whole = merged(sorted(run for part in page for run in part.runs))
    return GroupUnits(parts, unit(whole, sum(part.nbytes for part in page)))
