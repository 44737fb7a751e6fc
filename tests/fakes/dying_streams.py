"""Streams of fake engines that end before their time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from aiohttp import web

HANG, END, RESET = "hang", "end", "reset"


class Death(NamedTuple):
    """How a stream ends.

    Attributes:
        after: so many bytes, or events if negative; None: all.
        how: ``HANG``: nothing comes any more. ``END``: as a whole one. ``RESET``: its connection
            breaks.
        last: sent before the end.
    """

    after: int | None = None
    how: str = RESET
    last: bytes = b""


async def sent_until(
    request: web.Request, stream: web.StreamResponse, events: Sequence[bytes], death: Death
) -> web.StreamResponse:
    """Send events of a stream that has begun, until it ends."""
    if death.after is not None and death.after < 0:
        events = events[: -death.after]
    whole = death.after is None or death.after < 0
    left = sum(map(len, events)) if whole or death.after is None else death.after
    for event in events:
        if sent := event[:left]:
            await stream.write(sent)
        left -= len(sent)
    if death.after is None:
        return stream
    if death.last:
        await stream.write(death.last)
    assert request.transport is not None
    if death.how == HANG:
        await asyncio.Event().wait()
    elif death.how == RESET:
        await asyncio.sleep(0)
        request.transport.close()
    return stream
