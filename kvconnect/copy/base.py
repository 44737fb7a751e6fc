"""Contract of copies between device memory and the host arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from kvconnect.cache.layout import Geometry, GroupGeometry
from kvconnect.errors import Misuse

Digests = Callable[[], "array[int]"]
"""Returns XXH3-64 digests. Call it only after the device has run the work that computes them."""

Direction = Literal["store", "load"]

MAX_DESCRIPTORS = 1024
"""Copies in one call of ``cuMemcpyBatchAsync``. A call takes about 0.5 us for each (measured on an
H100: vLLM's pull request 48434), and one of 51,828 crashed a driver (vLLM's issue 49276)."""

MAX_IN_FLIGHT = 4
"""Chunks of one direction in flight: the link has work while the next one is launched."""

Runs = tuple[int, int]
"""Range [first, end) of a group's segments."""


class StagedCopy(NamedTuple):
    """A copy by way of device memory.

    ``work`` launches it on the calling thread's current stream. Copies with the same ``lane`` must
    run on the same stream. ``digests`` has those of all its blocks, None if they are not hashed.
    ``release`` gives its memory to another copy: call it once, when nothing of it is in flight.
    """

    lane: int
    work: Callable[[], None]
    digests: Digests | None
    release: Callable[[], None]


class Copier(ABC):
    """Copies whole blocks between a KV cache and the slots of a host arena.

    Block ``block_ids[i]`` of a group and slot ``slots[i]`` form a pair. The slot holds the block's
    segments back to back, in the order of the group's :class:`GroupGeometry`. A call without pairs
    does nothing.

    Contract:

    - *Blocking*: ``store`` and ``load`` return when the bytes have arrived. The ``enqueue`` calls
      may return when the copy is launched on the calling thread's current stream; events order it.
    - *Threads*: one call at a time, from any thread. Other threads run meanwhile: no call holds
      the GIL for long.
    - *Idempotent*: yes, as long as the source does not change.
    - *Memory*: the copier keeps area and arena alive. During a call the caller guarantees that
      nobody writes the source or touches the destination, and that no destination occurs twice.

    Raises:
        Misuse: a group, block or slot does not exist, or the sequences differ in length. No byte
            was copied.
        TransferFailed: the copy failed. The content of all destinations of the call is unknown.
    """

    @abstractmethod
    def store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks from the KV cache into slots."""

    @abstractmethod
    def load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots back into blocks of the KV cache."""

    def enqueue_store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Start a store. This default runs it."""
        self.store(group, block_ids, slots)

    def enqueue_load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Start a load. This default runs it."""
        self.load(group, block_ids, slots)

    def enqueue_runs(
        self, group: int, block_ids: Sequence[int], slots: Sequence[int], runs: Runs
    ) -> None:
        """Start to load some runs of blocks.

        The first call of a load begins at run 0, each later one at the end of the previous one. A
        copier that cannot load parts of blocks loads whole blocks at the first call.
        """
        if runs[0] == 0:
            self.enqueue_load(group, block_ids, slots)

    def stage(
        self,
        direction: Direction,  # noqa: ARG002
        group: int,  # noqa: ARG002
        block_ids: Sequence[int],  # noqa: ARG002
        slots: Sequence[int],  # noqa: ARG002
        hashed: bool,  # noqa: ARG002
    ) -> StagedCopy | None:
        """Return a copy of blocks by way of device memory; None: use the ``enqueue`` calls.

        Nothing is launched yet. Raises :class:`Misuse` as these do.
        """
        return None

    def most_blocks(self, direction: Direction, group: int) -> int:
        """Return how many blocks one copy should have at most; 0: as many as wanted."""
        descriptors = self.descriptors(direction, group)
        return max(1, MAX_DESCRIPTORS // descriptors) if descriptors else 0

    def descriptors(self, direction: Direction, group: int) -> int:  # noqa: ARG002
        """Return how many copies the device's driver is told of for one block; 0: of none, however
        many blocks there are."""
        return 0

    def hashes(self, group: int) -> bool:  # noqa: ARG002
        """Return whether the copier can hash a group's blocks in the KV cache."""
        return False

    def enqueue_digests(self, group: int, block_ids: Sequence[int]) -> Digests:
        """Start to hash blocks, in the byte order of a slot, behind the copies already started.

        Raises :class:`Misuse` if :meth:`hashes` is false for the group.
        """
        raise Misuse(f"blocks {list(block_ids)} of group {group} cannot be hashed in the KV cache")


def check_sizes(geometry: Geometry, area_bytes: int, arena_bytes: int) -> int:
    """Return the number of slots in an arena. For the constructors of copiers.

    Raises:
        Misuse: the area does not span all blocks, or the arena is not whole slots.
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
    """Return the group's geometry. Raises :class:`Misuse` if a group, block or slot does not exist,
    or if the sequences differ in length."""
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
