"""The contract of copies between device memory and the host arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence

from kvconnect.cache.layout import Geometry, GroupGeometry
from kvconnect.errors import Misuse

Digests = Callable[[], "array[int]"]
"""Returns XXH3-64 digests; to be called when the device has passed the point they were asked at."""


Runs = tuple[int, int]
"""Some of a group's segments: the first one, and the one behind the last."""


class Copier(ABC):
    """Moves whole blocks between a KV cache and the slots of a host arena.

    Block ``block_ids[i]`` of group ``group`` and slot ``slots[i]`` form a pair; a slot receives
    or gives the block's segments back to back, in the order of its :class:`GroupGeometry`.

    Contract:

    - *Blocks* until the bytes are there, but for the ``enqueue`` calls: those may return when the
      copy has been launched on the calling thread's current stream, where events order it.
    - *Threads*: one call at a time. It may come from any thread, and others run meanwhile: the GIL
      is not held for long.
    - *Idempotent*: yes, as long as the source does not change.
    - *Memory*: the copier keeps area and arena alive. During a call the caller guarantees that
      nobody writes the source or touches the destination, and that no destination occurs twice.
    - *Raises* :class:`Misuse` before any byte moved for a group, block or slot that does not
      exist or sequences of different length, :class:`TransferFailed` if the copy broke off: the
      contents of all destinations of that call are then unknown.

    No pairs at all is fine and does nothing.
    """

    @abstractmethod
    def store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks from the KV cache into slots."""

    @abstractmethod
    def load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots back into blocks of the KV cache."""

    def enqueue_store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Start a store, or do it."""
        self.store(group, block_ids, slots)

    def enqueue_load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Start a load, or do it."""
        self.load(group, block_ids, slots)

    def enqueue_runs(
        self, group: int, block_ids: Sequence[int], slots: Sequence[int], runs: Runs
    ) -> None:
        """Start to load some runs of blocks, or do it.

        The calls for one load begin at run 0, and each goes on where the last one ended. A copier
        that cannot load a part of a block loads all of it at the first call.
        """
        if runs[0] == 0:
            self.enqueue_load(group, block_ids, slots)

    def hashes(self, group: int) -> bool:  # noqa: ARG002
        """Whether blocks of a group can be hashed where they are in the KV cache."""
        return False

    def enqueue_digests(self, group: int, block_ids: Sequence[int]) -> Digests:
        """Start to hash blocks as slots would hold them, behind copies that were started.

        Raises :class:`Misuse` where :meth:`hashes` says no.
        """
        raise Misuse(f"blocks {list(block_ids)} of group {group} cannot be hashed in the KV cache")


def check_sizes(geometry: Geometry, area_bytes: int, arena_bytes: int) -> int:
    """Return how many slots the arena has; raise :class:`Misuse` if the memory does not fit.

    For a copier's constructor: the area must span all blocks, the arena be whole slots.
    """
    if area_bytes < geometry.area_bytes:
        raise Misuse(f"KV area has {area_bytes} bytes, its blocks need {geometry.area_bytes}")
    num_slots, rest = divmod(arena_bytes, geometry.slot_bytes)
    if rest:
        raise Misuse(f"arena of {arena_bytes} bytes is not whole slots of {geometry.slot_bytes}")
    return num_slots


def check_request(
    geometry: Geometry, num_slots: int, group: int, block_ids: Sequence[int], slots: Sequence[int]
) -> GroupGeometry:
    """Return the group's geometry; raise :class:`Misuse` for a request that cannot be meant."""
    if not 0 <= group < len(geometry.groups):
        raise Misuse(f"group {group} does not exist, there are {len(geometry.groups)}")
    if len(block_ids) != len(slots):
        raise Misuse(f"{len(block_ids)} blocks but {len(slots)} slots")
    found = geometry.groups[group]
    if block_ids:
        _check_range("block", block_ids, found.num_blocks)
        _check_range("slot", slots, num_slots)
    return found


def _check_range(what: str, numbers: Sequence[int], limit: int) -> None:
    for number in (min(numbers), max(numbers)):
        if not 0 <= number < limit:
            raise Misuse(f"{what} {number} does not exist, there are {limit}")
