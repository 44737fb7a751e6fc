"""The setting ``cache_peers``: with whom an engine shares the blocks of its host tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvconnect.settings.addresses import Listen, worker_addresses
from kvconnect.settings.quantities import Rule, Size
from kvconnect.settings.stores import Conflict


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """With whom an engine shares the blocks of its host tier.

    Attributes:
        ask: workers of other engines, as ``IP:PORT``, or ``IP:FIRST-LAST`` for several ranks at
            ports in a row. The engine's own addresses may be among them. ``[]``: only the engines
            that a router names.
        listen: ``IP:PORT`` at which this engine serves blocks, an address of this machine that the
            others reach. Worker r listens at port + r, counted over all data-parallel engines.
            ``off``: it serves none.
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
        Rule('use a list of workers such as ["10.1.2.4:7900"]', check=worker_addresses),
    ] = ()
    listen: Listen = "off"
    ask_s: Annotated[float, Meta(gt=0, le=10), Rule("use seconds, at most 10")] = 0.05
    serve_rate: Size = 0
    same_machine: Literal["auto", "memory", "network"] = "auto"
    page_tokens: Annotated[
        int,
        Meta(ge=0, le=2**31 - 1),
        Rule("use a number of tokens that divides the block size, or 0"),
    ] = 0

    def addresses(self) -> list[tuple[str, int]]:
        """Return (IP address, port) of all workers to ask."""
        return worker_addresses(self.ask)

    def conflicts(self) -> Iterator[Conflict]:
        """Yield settings that do not go together."""
        if not self.ask and self.listen == "off":
            yield "ask", [], "set ask, listen or both"
