"""Bodies that have come whole before anybody reads them, as most small ones have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvconnect.router.http.admission import BodyAllocation, BodyMemory, Busy
from kvconnect.router.http.http_request import HttpError, RequestContent
from kvconnect.router.http.request_reader import RequestReader
from kvconnect.router.policy.caches import Caches
from kvconnect.router.policy.rules import RoutingRules
from tests.fakes.engine import on_loop


def sent(*pieces: bytes, whole: bool = True) -> Any:
    """A request whose body has come in these pieces."""
    content = RequestContent(lambda: None)
    for piece in pieces:
        content.feed(piece)
    if whole:
        content.end()
    return SimpleNamespace(content=content)


async def read(request: Any, room: BodyAllocation, most: int = 100) -> bytes:
    reader = RequestReader(most, Caches(RoutingRules()))
    try:
        return bytes(await reader._whole(request, room))
    finally:
        reader.close()


@pytest.mark.parametrize("pieces", [(), (b"ab",), (b"a", b"b", b"c")])
@on_loop
async def test_a_body_that_has_come_is_read_and_counted_without_a_wait(
    pieces: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies, waits = BodyMemory("bodies", 100, 100), list[Any]()
    pieces_of = RequestReader._pieces

    async def count(reader: RequestReader, *asked: Any) -> bytearray:
        waits.append(asked)
        return await pieces_of(reader, *asked)

    monkeypatch.setattr(RequestReader, "_pieces", count)
    with bodies.allocation("a") as room:
        body = b"".join(pieces)
        assert await read(sent(*pieces), room) == body
        assert (room.taken, len(waits)) == (len(body), 0)
        late = sent(b"d", whole=False)  # the control
        late.content._wanted = late.content.end
        assert await read(late, room) == b"d"
        assert (room.taken, len(waits)) == (len(body) + 1, 1)
    assert (bodies._free_bytes, bodies._by_client) == (100, {})


@on_loop
async def test_a_body_that_has_come_has_the_limits_of_others() -> None:
    bodies = BodyMemory("bodies", 100, 100)
    with bodies.allocation("a") as room:
        with pytest.raises(HttpError, match="more than") as refused:
            await read(sent(b"x" * 60), room, most=50)
        assert refused.value.status == 413
    with bodies.allocation("a") as other, bodies.allocation("b") as room:
        other.take(60)
        with pytest.raises(Busy):
            await read(sent(b"x" * 60), room)
        assert room.taken == 0
        assert await read(sent(b"x" * 40), room) == b"x" * 40
    assert (bodies._free_bytes, bodies._by_client) == (100, {})
