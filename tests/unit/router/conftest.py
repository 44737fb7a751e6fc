"""What tests of the router see of its relay."""

from __future__ import annotations

from typing import Any

import pytest

from kvconnect.router.connections.relay import RelayedStream, Returned, StreamRelay


class Seen(list[Returned]):
    """Streams that came back from relays; ``started``: how many were left to one."""

    started = 0

    @property
    def chunks(self) -> int:
        return sum(each.chunks for each in self)


def note_streams(patch: pytest.MonkeyPatch) -> Seen:
    """Note the streams of all relays from now on."""
    found = Seen()
    give, start = StreamRelay._give, StreamRelay.start

    def started(*args: Any, **named: Any) -> RelayedStream | None:
        stream = start(*args, **named)
        found.started += stream is not None
        return stream

    def noted(relay: StreamRelay, returned: Returned) -> None:
        found.append(returned)
        give(relay, returned)

    patch.setattr(StreamRelay, "_give", noted)
    patch.setattr(StreamRelay, "start", started)
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return note_streams(monkeypatch)
