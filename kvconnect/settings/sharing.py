"""The setting ``cache_peers``: with whom an engine shares the blocks of its host tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvconnect.settings.addresses import Listen, worker_addresses
from kvconnect.settings.quantities import Flag, Rule, Size
from kvconnect.settings.stores import Conflict


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """With whom an engine shares the blocks of its host tier.

    Attributes:
        ask: workers of other engines, as ``IP:PORT``, or ``IP:FIRST-LAST`` for several ranks at
            ports in a row. The engine's own addresses may be among them. ``[]``: only the engines
            that a router names.
        serve: ``true``: this engine serves its blocks to others, at the address and port of the
            setting ``listen``, where hand-offs are read too.
        listen: a port of its own for serving, ``IP:PORT``. Use ``serve`` instead: this setting goes
            with the next version. ``off``: none.
        ask_s: seconds that a request waits for answers.
        serve_rate: limit of one worker's sending, in bytes per second. ``0``: no limit.
        same_machine: ``memory``: engines on the same machine copy blocks from one another's memory,
            where the system lets them and the source has no ``serve_rate``. ``network``: they do
            not. ``auto``: ``network`` where ``key_file`` is set, otherwise ``memory``.
        page_tokens: tokens of a page, the unit in which engines with different block sizes share
            blocks: the same number for all of them, which divides each block size. ``0``: the block
            size.
    """

    ask: Annotated[
        tuple[str, ...],
        Rule('use a list of workers such as ["10.1.2.4:14580"]', check=worker_addresses),
    ] = ()
    serve: Flag = False
    listen: Listen = "off"
    ask_s: Annotated[float, Meta(gt=0, le=10), Rule("use seconds, at most 10")] = 0.05
    serve_rate: Size = 0
    same_machine: Literal["auto", "memory", "network"] = "auto"
    page_tokens: Annotated[
        int,
        Meta(ge=0, le=2**31 - 1),
        Rule("use a number of tokens that divides the block size, or 0"),
    ] = 0

    @property
    def serves(self) -> bool:
        """Whether other engines may read this one's blocks."""
        return self.serve or self.listen != "off"

    def addresses(self) -> list[tuple[str, int]]:
        """Return (IP address, port) of all workers to ask."""
        return worker_addresses(self.ask)

    def conflicts(self) -> Iterator[Conflict]:
        """Yield settings that do not go together."""
        if not self.ask and not self.serves:
            yield "ask", [], "set ask, serve or both"
        if self.serve and self.listen != "off":
            yield "listen", self.listen, "remove it: serve uses the port of hand-offs"
