"""Receives come after both of SGLang's streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvconnect.engines.sglang import layerwise
from kvconnect.engines.sglang.layerwise import EngineStreams


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.device, self.after = name, torch.device("cuda", 0), [name]

    def wait_stream(self, other: Stream) -> None:
        self.after.append(other.name)


class Streams:
    """Stands in for torch's, of which there are none on a CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = Stream("scheduler")
        self.join = Stream("join")
        monkeypatch.setattr(layerwise, "own_stream", lambda _: self.join)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.use)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.after = streams, []  # type: tuple[Streams, list[str]]

    def record(self) -> None:
        self.after = list(self.streams.current.after)


def test_what_is_received_comes_after_the_forward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    both = EngineStreams(torch.device("cuda", 0))
    scheduler = streams.current
    with both.joined():
        assert streams.current is scheduler  # nothing has run yet: no stream of forwards is known
    both.forward = Stream("forward")
    with both.joined():
        assert streams.current.after == ["join", "scheduler", "forward"]
    assert streams.current is scheduler
    assert scheduler.after == ["scheduler"]  # which waits for nothing


def test_a_mark_is_after_both(monkeypatch: pytest.MonkeyPatch) -> None:
    Streams(monkeypatch)
    both = EngineStreams(torch.device("cuda", 0))
    both.forward = Stream("forward")
    fence: Any = both.mark()
    assert fence._event.after == ["join", "scheduler", "forward"]


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    both = EngineStreams(torch.device("cpu"))
    both.forward = Stream("forward")
    with both.joined():
        pass
    assert both.mark() is None
