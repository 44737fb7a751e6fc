"""Which request has a bootstrap room, and the boundary around what SGLang's scheduler calls.

SGLang keeps the state of a hand-off by its room alone. Clients choose rooms, and SGLang's tokenizer
gives one room to all samples of a prompt (``n > 1``). So each sender and each receiver claims its
room. A second live one of a room has failed from its start and touches nothing of the first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvconnect.engines.sglang.rooms import contain_room_errors, is_room

_Method = TypeVar("_Method", bound=Callable[..., Any])

_NO_REASON = "Failed due to an unknown reason from another rank"


class RoomClaims:
    """The live senders or receivers of one rank, by room. For the scheduler's thread.

    A claim ends with its owner at the latest: SGLang drops some without a call.
    """

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[int, RoomOwner] = WeakValueDictionary()
        self._spare = itertools.count(-1, -1)

    def refusal(self, room: object) -> str:
        """Return why nobody may claim ``room`` now; "" if somebody may."""
        if not is_room(room):
            return f"bootstrap_room={room!r} is no number from 1 to 2**63 - 1"
        if room in self._owners:
            return (
                f"bootstrap_room={room} is used by another request: give each request, and each "
                "sample of a prompt (n > 1), a room of its own"
            )
        return ""

    def spare(self) -> int:
        """Return a number under which SGLang can keep the state of a request without a room."""
        return next(self._spare)

    def take(self, room: int, owner: RoomOwner) -> None:
        """Give a room to its owner."""
        self._owners[room] = owner

    def owner(self, room: object) -> RoomOwner | None:
        """Return who has a room."""
        return self._owners.get(room) if is_room(room) else None  # type: ignore[call-overload]

    def release(self, room: int) -> None:
        """Let others claim a room."""
        self._owners.pop(room, None)


class RoomOwner:
    """Base of senders and receivers: a request that has its room to itself, or has failed.

    ``reason``: why it failed, once SGLang's own records of the room may be another request's.
    """

    kv_mgr: Any
    bootstrap_room: int
    conclude_state: Any
    clear: Any
    owns_room = False
    reason = ""

    def claim(self, manager: Any, room: Any) -> int:
        """Claim ``room``; return it, or a number of nobody's with ``reason`` set. Called before
        SGLang's own constructor."""
        self.reason = manager.claims.refusal(room)
        if self.reason:
            spare: int = manager.claims.spare()
            return spare
        manager.claims.take(room, self)
        # What the last owner left, if SGLang dropped it without a call.
        manager.request_status.pop(room, None)
        self.owns_room = True
        return int(room)

    def give_up(self, _room: int, why: str) -> None:
        """Fail this request; the first reason counts."""
        self.reason = self.reason or why
        if self.owns_room:
            self.kv_mgr.fail(self.bootstrap_room, why)
        self.conclude_state = KVPoll.Failed

    def release(self) -> None:
        """Let go of the room, with SGLang's own records of it. Idempotent."""
        if self.owns_room:
            self.reason = self.reason or self.kv_mgr.take_reason(self.bootstrap_room)
            self.owns_room = False
            self.kv_mgr.request_status.pop(self.bootstrap_room, None)
            self.kv_mgr.claims.release(self.bootstrap_room)

    def failure_exception(self) -> None:
        """Raise why the request failed, as SGLang expects."""
        self.conclude_state = KVPoll.Failed
        self.clear()
        why = self.reason
        raise KVTransferError(self.bootstrap_room, why or _NO_REASON, is_from_another_rank=not why)


def contains_errors(result: Any = None) -> Callable[[_Method], _Method]:
    """Decorate what SGLang's scheduler calls of a :class:`RoomOwner`: an error fails its request,
    is counted and logged, and the call returns ``result``. SGLang ends its server when its
    scheduler's thread raises."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: RoomOwner, *args: Any, **kwargs: Any) -> Any:
            returned = result
            with contain_room_errors(self.kv_mgr.agent, self.bootstrap_room, self.give_up):
                returned = method(self, *args, **kwargs)
            return returned

        return call  # type: ignore[return-value]

    return decorate
