"""The ledger of device blocks that jobs hold while a copy reads or writes them.

It proves at any time that a held block has one owner, that every owner has a deadline, and that
whatever was granted is returned or still held.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.types import JobId


class Owner(StrEnum):
    """Kind of job that holds blocks. Values are metric labels."""

    STORE = "store"
    LOAD = "load"
    SEND = "send"
    RECV = "recv"


class Hold(NamedTuple):
    """Device blocks held by one job; ``since`` and ``deadline`` in seconds of one clock."""

    job: JobId
    owner: Owner
    blocks: tuple[int, ...]
    since: float
    deadline: float


class Ledger:
    """All held device blocks. Owned by the scheduler's thread; has no clock of its own."""

    def __init__(self) -> None:
        self.granted = 0
        self.returned = 0
        self._holds: dict[JobId, Hold] = {}
        self._owner_of: dict[int, JobId] = {}
        self._held_by = dict.fromkeys(Owner, 0)

    def __repr__(self) -> str:
        return f"<Ledger {len(self._owner_of)} blocks held by {len(self._holds)} jobs>"

    @property
    def held(self) -> int:
        """Device blocks held now."""
        return len(self._owner_of)

    def holds_block(self, block_id: int) -> bool:
        """Whether some job holds this device block."""
        return block_id in self._owner_of

    def grant(self, hold: Hold) -> None:
        """Add a hold.

        Raises:
            Misuse: the job already holds blocks, or one of the blocks has an owner.
        """
        if hold.job in self._holds:
            raise Misuse(f"job {hold.job} is granted blocks twice")
        for block in hold.blocks:
            if block in self._owner_of:
                owner = self._owner_of[block]
                raise Misuse(f"block {block} is held by job {owner}, not free for {hold.job}")
            self._owner_of[block] = hold.job
        self._holds[hold.job] = hold
        self._held_by[hold.owner] += len(hold.blocks)
        self.granted += len(hold.blocks)

    def settle(self, job: JobId) -> Hold | None:
        """Remove a job's hold and return it; None if it was settled before (expired)."""
        hold = self._holds.pop(job, None)
        if hold is not None:
            for block in hold.blocks:
                del self._owner_of[block]
            self._held_by[hold.owner] -= len(hold.blocks)
            self.returned += len(hold.blocks)
        return hold

    def held_by(self, owner: Owner) -> int:
        """Device blocks held by jobs of one kind."""
        return self._held_by[owner]

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest hold was granted; 0 when nothing is held."""
        return max((now - hold.since for hold in self._holds.values()), default=0.0)

    def check(self) -> None:
        """Prove that holds, owners and counts agree.

        Raises:
            Misuse: an entry does not add up; the message names it.
        """
        owners = {block: hold.job for hold in self._holds.values() for block in hold.blocks}
        if owners != self._owner_of:
            raise Misuse("held blocks and owners do not match")
        if self.granted != self.returned + len(self._owner_of):
            raise Misuse(
                f"granted {self.granted} != returned {self.returned} + held {len(self._owner_of)}"
            )
        if sum(self._held_by.values()) != len(self._owner_of):
            raise Misuse(f"{len(self._owner_of)} blocks are held, by kind {self._held_by}")
        for hold in self._holds.values():
            if not hold.deadline > hold.since:
                raise Misuse(f"job {hold.job} has no deadline after {hold.since}")
