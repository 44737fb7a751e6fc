"""What engines publish about their caches, read into a prefix index. Pure.

vLLM and SGLang publish alike: messages numbered from 0 on, each a msgpack array ``[time, events,
rank]``; an event is a map with ``type``, or, from older versions, an array that begins with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvconnect.errors import Refused
from kvconnect.router.prefixes import MEDIA, Hash, PrefixIndex, Stored, Tier
from kvconnect.router.view import Target

_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Order of the fields in an event that is an array."""

_FULL_ATTENTION = (None, "full_attention", "mla_attention")


class Feed:
    """The messages of one rank, in order, into the index. Not thread-safe.

    A lost message may have told of blocks that are gone, so when one cannot be had again, all that
    is known of the rank is dropped.
    """

    def __init__(self, target: Target, index: PrefixIndex) -> None:
        self.wanted = 0  # number of the next message
        self._target = target
        self._index = index
        self._live = -1  # number of the last one that came live
        self._partial: set[int] = set()  # groups of layers that keep less than the whole prefix

    def message(self, number: int, payload: bytes) -> bool:
        """A message came; return False if others were lost before it: then ask for those from
        :attr:`wanted` on, and pass these and this one to :meth:`settle`.

        Raises:
            Refused: it cannot be read.
        """
        if number <= self._live:  # another incarnation, that counts from 0 again
            self._index.cleared(self._target)
            self._partial.clear()
            self.wanted = 0
        self._live = number
        if number > self.wanted:
            return False
        if number == self.wanted:  # else a replay had it
            self._take(number, payload)
        return True

    def settle(self, number: int, payload: bytes) -> bool:
        """Go on with a message that came again, or live after that, whatever lies before it;
        return whether nothing was lost.

        Raises:
            Refused: it cannot be read.
        """
        if number < self.wanted:
            return True
        whole = number == self.wanted
        if not whole:
            self._index.cleared(self._target)
        self._take(number, payload)
        return whole

    def _take(self, number: int, payload: bytes) -> None:
        self.wanted = number + 1
        try:
            self._apply(payload)
        except Refused:  # it may have told of blocks that are gone
            self._index.cleared(self._target)
            raise

    def _apply(self, payload: bytes) -> None:
        for kind, event in _events(payload):
            if kind == "AllBlocksCleared":
                self._index.cleared(self._target)
            elif self._is_partial(event):
                continue
            elif kind == "BlockRemoved":
                gone, tier = _removed(event)
                self._index.removed(self._target, gone, tier)
            elif kind == "BlockStored" and _plain(event):
                self._index.stored(self._target, _stored(event))

    def _is_partial(self, event: Mapping[str, Any]) -> bool:
        """Whether blocks are of a group without full attention. Its blocks have the same hashes as
        those of the others and go earlier, and only what is stored tells the group's kind."""
        group = event.get("group_idx")
        if not isinstance(group, int):
            return event.get("kv_cache_spec_kind") not in _FULL_ATTENTION
        if event.get("kv_cache_spec_kind") not in _FULL_ATTENTION:
            self._partial.add(group)
        return group in self._partial


_NONE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, IndexError, KeyError)
"""What bytes that are no batch of events may raise."""


def _events(payload: bytes) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        batch = msgspec.msgpack.decode(payload)
        events = list(batch[1])
    except _NONE as error:
        raise Refused("events", f"a message that is none: {error!r}") from error
    for event in events:
        if isinstance(event, dict) and isinstance(event.get("type"), str):
            yield event["type"], event
        elif isinstance(event, list) and event and isinstance(event[0], str):
            yield event[0], dict(zip(_FIELDS.get(event[0], ()), event[1:], strict=False))


def _plain(event: Mapping[str, Any]) -> bool:
    """Whether the blocks follow from their tokens alone."""
    extra = event.get("extra_keys")
    return (
        event.get("lora_id") is None
        and event.get("lora_name") is None
        and event.get("cache_salt") is None
        and not (isinstance(extra, list) and any(extra))
    )


def _stored(event: Mapping[str, Any]) -> Stored:
    hashes, tokens = event.get("block_hashes"), _tokens(event.get("token_ids"))
    size, parent = event.get("block_size"), event.get("parent_block_hash")
    good = (
        _all(hashes, int, bytes)
        and _all(tokens, int)
        and type(size) is int
        and isinstance(parent, int | bytes | None)
    )
    if not good:
        raise Refused("events", "a BlockStored that is none")
    assert isinstance(hashes, list) and isinstance(tokens, list) and isinstance(size, int)
    return Stored(hashes, parent, tokens, size, _tier(event))


def _tokens(told: object) -> object:
    """Return the tokens of blocks. SGLang with EAGLE tells each with the next one, as its cache is
    keyed by both."""
    if not isinstance(told, list):
        return told
    return [token[0] if isinstance(token, list) and token else token for token in told]


def _removed(event: Mapping[str, Any]) -> tuple[list[Hash], Tier]:
    hashes = event.get("block_hashes")
    if not _all(hashes, int, bytes):
        raise Refused("events", "a BlockRemoved that is none")
    assert isinstance(hashes, list)
    return hashes, _tier(event)


def _tier(event: Mapping[str, Any]) -> Tier:
    """Return where blocks are; a tier of an unknown name is taken for the farthest."""
    medium = event.get("medium")
    return MEDIA.get(medium if isinstance(medium, str) else None, Tier.REMOTE)


def _all(values: object, *kinds: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kinds) for value in values)
