"""The setting ``cache_peers``: with whom an engine shares the blocks of its host tier."""

from __future__ import annotations

import ipaddress
from typing import Literal

import msgspec

from kvconnect.config import listen_address
from kvconnect.errors import ConfigError

_MOST_ADDRESSES = 256


class PeerOptions(msgspec.Struct, frozen=True, kw_only=True):
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

    ask: tuple[str, ...] = ()
    listen: str = "off"
    ask_s: float = 0.05
    serve_rate: int = 0
    same_machine: Literal["auto", "memory", "network"] = "auto"
    page_tokens: int = 0

    def __post_init__(self) -> None:
        listen_address(self.listen)
        self.addresses()
        if not 0 < self.ask_s <= 10:
            raise ConfigError("ask_s", self.ask_s, "use seconds, at most 10")
        if self.page_tokens < 0:
            fix = "use a number of tokens that divides the block size, or 0"
            raise ConfigError("page_tokens", self.page_tokens, fix)
        if not self.ask and self.listen == "off":
            raise ConfigError("cache_peers", {}, "set ask, listen or both")

    def addresses(self) -> list[tuple[str, int]]:
        """Return (IP address, port) of all workers to ask.

        Raises:
            ConfigError: one is not an IP address and a port, or there are too many.
        """
        found = []
        for text in self.ask:
            host, _, ports = text.rpartition(":")
            first, _, last = ports.partition("-")
            try:
                address = str(ipaddress.ip_address(host.strip("[]")))
                numbers = range(int(first), int(last or first) + 1)
            except ValueError as error:
                fix = f"use an IP address and a port such as 10.1.2.3:7900 ({error})"
                raise ConfigError("ask", text, fix) from error
            if not numbers or not 0 < numbers[0] <= numbers[-1] < 2**16:
                raise ConfigError("ask", text, "use ports from 1 to 65535, the first one first")
            found += [(address, number) for number in numbers]
        if len(found) > _MOST_ADDRESSES:
            raise ConfigError("ask", len(found), f"name at most {_MOST_ADDRESSES} workers")
        return found
