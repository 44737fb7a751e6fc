"""Decodes engines' KV events: blocks into a prefix index, and receipts. Pure.

vLLM and SGLang use one format: messages numbered from 0, each a msgpack array ``[time, events,
rank]``. An event is a map with a ``type``; older versions send an array that begins with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from kvconnect.errors import Refused
from kvconnect.protocol.options import RECEIPT_EVENT
from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.prefixes import (
    TIER_OF_MEDIUM,
    CacheTier,
    EngineHash,
    PrefixIndex,
    StoredBlocks,
)

_FULL_ATTENTION = (None, "full_attention", "mla_attention")
_Token = int | Annotated[list[int], Meta(min_length=1)]
"""SGLang with EAGLE reports each token with the next one, as its cache keys hold both."""


class _Batch(msgspec.Struct, array_like=True):
    time: Raw
    events: list[Raw]


class _Kind(msgspec.Struct):
    type: str


class _KindFirst(msgspec.Struct, array_like=True):
    type: str


class _BlockStored(msgspec.Struct):
    """Fields of a map; those missing in the array form come last."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[_Token]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None

    @property
    def salt(self) -> str | None:
        """Salt of the prompt, "" without one; None: its tokens and a salt do not identify it."""
        salt, keys = self.cache_salt or "", self.extra_keys or []
        match keys[:1]:
            case [[str(first)]] if self.parent_block_hash is None:
                salt, keys = first, keys[1:]  # vLLM names the salt with a prompt's first block
        adapter = self.lora_id is not None or self.lora_name is not None
        return None if adapter or any(keys) else salt


class _BlockRemoved(msgspec.Struct):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _StoredInOrder(_BlockStored, array_like=True, tag="BlockStored"):
    """The array form, from older versions."""


class _RemovedInOrder(_BlockRemoved, array_like=True, tag="BlockRemoved"):
    """The array form, from older versions."""


class PublishedReceipt(msgspec.Struct):
    """A request's receipt, and the nonce that the request came with."""

    nonce: str
    receipt: dict[str, int | float | str]


_Event = _BlockStored | _BlockRemoved
_KINDS: dict[str, tuple[type[_Event], type[_Event]]] = {
    "BlockStored": (_BlockStored, _StoredInOrder),
    "BlockRemoved": (_BlockRemoved, _RemovedInOrder),
}
_CLEARED = "AllBlocksCleared"
_MOST_GROUPS = 64  # limit of layer groups
_MOST_RECEIPT = 2048  # bytes of a receipt's event; one has about 200


class RankEvents:
    """Applies the messages of one rank to the index, in order. Not thread-safe.

    A lost message may have reported removed blocks. If it cannot be recovered, all blocks of the
    rank are dropped from the index.
    """

    def __init__(self, target: Target, index: PrefixIndex) -> None:
        self.next_number = 0  # number of the next message
        self._target = target
        self._index = index
        self._live = -1  # number of the last live message
        self._partial_groups: set[int] = (
            set()
        )  # groups of layers that keep less than the whole prefix

    def receive(self, number: int, payload: bytes) -> bool:
        """Apply a live message; return False if messages before it were lost.

        Then request those from :attr:`next_number` on, and pass them and this one to
        :meth:`recover`.

        Raises:
            Refused: the message is invalid.
        """
        if number <= self._live:  # the engine restarted, and counts from 0 again
            self._index.cleared(self._target)
            self._partial_groups.clear()
            self.next_number = 0
        self._live = number
        if number > self.next_number:
            return False
        if number == self.next_number:  # otherwise a replay has applied it
            self._apply_in_order(number, payload)
        return True

    def recover(self, number: int, payload: bytes) -> bool:
        """Apply a replayed message, or the live one after a replay; return whether none before it
        was lost.

        Raises:
            Refused: the message is invalid.
        """
        if number < self.next_number:
            return True
        whole = number == self.next_number
        if not whole:
            self._index.cleared(self._target)
        self._apply_in_order(number, payload)
        return whole

    def _apply_in_order(self, number: int, payload: bytes) -> None:
        self.next_number = number + 1
        if number == 0:
            self._index.began(self._target)
        try:
            self._apply(payload)
        except Refused:  # it may have reported removed blocks
            self._index.cleared(self._target)
            raise

    def _apply(self, payload: bytes) -> None:
        for event in _events(payload):
            if event is None:
                self._index.began(self._target)
            elif self._is_partial(event):
                continue
            elif isinstance(event, _BlockRemoved):
                self._index.removed(self._target, event.block_hashes, _tier(event))
            elif event.salt is not None:
                self._index.stored(self._target, _stored(event, event.salt))

    def _is_partial(self, event: _Event) -> bool:
        """Whether blocks belong to a layer group without full attention. Such blocks have the same
        hashes as others and are removed earlier; only stored events name a group's kind."""
        group, partial = event.group_idx, event.kv_cache_spec_kind not in _FULL_ATTENTION
        if group is None:
            return partial
        if partial and len(self._partial_groups) < _MOST_GROUPS:
            self._partial_groups.add(group)
        return partial or group in self._partial_groups


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding an invalid batch of events."""


def _events(payload: bytes) -> Iterator[_Event | None]:
    """Yield the known events; None means that all blocks were removed."""
    try:
        for event in msgspec.msgpack.decode(payload, type=_Batch).events:
            kind, form = _kind_of(event)
            if kind == _CLEARED:
                yield None
            elif kind in _KINDS:
                yield msgspec.msgpack.decode(event, type=_KINDS[kind][form])
    except _UNREADABLE as error:
        raise Refused("events", f"malformed KV event message: {error!r}") from error


def receipts_in(payload: bytes) -> Iterator[PublishedReceipt]:
    """Yield the receipts in a message. Their order among other messages does not matter.

    Raises:
        Refused: the message, or one of them, is invalid.
    """
    if RECEIPT_EVENT.encode() not in payload:
        return
    try:
        for event in msgspec.msgpack.decode(payload, type=_Batch).events:
            if _kind_of(event) == (RECEIPT_EVENT, 0):
                if len(memoryview(event)) > _MOST_RECEIPT:
                    raise Refused("events", f"a receipt of more than {_MOST_RECEIPT} bytes")
                yield msgspec.msgpack.decode(event, type=PublishedReceipt)
    except _UNREADABLE as error:
        raise Refused("events", f"malformed receipt in a KV event message: {error!r}") from error


def _kind_of(event: Raw) -> tuple[str, int]:
    """Return an event's kind, empty if invalid, and 1 if it is an array, else 0."""
    forms: tuple[type[_Kind | _KindFirst], ...] = (_Kind, _KindFirst)
    for place, form in enumerate(forms):
        try:
            return msgspec.msgpack.decode(event, type=form).type, place
        except _UNREADABLE:
            continue
    return "", 0


def _stored(event: _BlockStored, salt: str) -> StoredBlocks:
    tokens = [token[0] if isinstance(token, list) else token for token in event.token_ids]
    hashes, parent = event.block_hashes, event.parent_block_hash
    return StoredBlocks(hashes, parent, tokens, event.block_size, _tier(event), salt)


def _tier(event: _Event) -> CacheTier:
    """Return the tier of blocks; an unknown name counts as the farthest tier."""
    return TIER_OF_MEDIUM.get(event.medium, CacheTier.REMOTE)
