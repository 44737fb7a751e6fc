"""Pages: the parts of a block that engines with other block sizes read.

Engines whose blocks have different numbers of tokens share pages of ``page_tokens`` tokens. A page
is named as a block of that size is, so an engine with such blocks has them without more ado::

    blocks of 64, page_tokens 32   |  page 0  |  page 1  |  page 0  |  page 1  |
    blocks of 32                   |  block   |  block   |  block   |  block   |

Disks and remote stores know nothing of pages.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from kvconnect.bounded import remember
from kvconnect.cache.keys import group_of
from kvconnect.errors import ConfigError

_MOST_REMEMBERED = 1 << 16


def pages_per_block(page_tokens: int, block_tokens: int) -> int:
    """Return in how many pages peers read a block of ``block_tokens`` tokens.

    Raises:
        ConfigError: ``page_tokens`` does not divide the block.
    """
    if page_tokens and block_tokens % page_tokens:
        fix = f"use a number of tokens that divides the block size, {block_tokens}"
        raise ConfigError("page_tokens", page_tokens, fix)
    return block_tokens // page_tokens if page_tokens else 1


class PageKeys:
    """By which keys peers know the pages of blocks. ``counts``: pages of a block, per group.
    Thread-safe."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[bytes, ...]] = {}

    def learn(self, pages: Mapping[bytes, tuple[bytes, ...]]) -> None:
        """Take the keys of the pages of blocks. They never change, so old ones may be forgotten."""
        if pages:
            with self._lock:
                for key, names in pages.items():
                    remember(self._known, key, names, _MOST_REMEMBERED)

    def of(self, key: bytes) -> tuple[bytes, ...]:
        """Return the keys of a block's pages: its own if it is one page; () if they are not
        known."""
        group = group_of(key)
        count = self._counts[group] if group < len(self._counts) else 1
        if count == 1:
            return (key,)
        with self._lock:
            found = self._known.get(key, ())
        return found if len(found) == count else ()
