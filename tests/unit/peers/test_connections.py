"""Which path a service's pages take, and what becomes of one that does not work here."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigError
from kvconnect.peers import connections
from kvconnect.peers.connections import open_transport, page_path
from kvconnect.settings import Settings
from kvconnect.testing.inproc import InprocTransport
from kvconnect.testing.page_memory import PageMemory
from kvconnect.transport.base import ConnectionOptions, Memory, Security


@pytest.mark.parametrize(
    ("transport", "tls_dir", "hand_off", "share"),
    [
        ("auto", "", "auto", "tcp"),
        ("auto", "/tls", "tcp", "tcp"),
        ("tcp", "", "tcp", "tcp"),
        ("nixl", "", "nixl", "nixl"),
        ("nixl", "/tls", "nixl", "nixl"),
    ],
)
def test_the_path_of_pages(transport: str, tls_dir: str, hand_off: str, share: str) -> None:
    """Sharing does not measure, so it takes what is always there; NIXL does not encrypt."""
    settings = Settings(transport=transport, tls_dir=tls_dir)  # type: ignore[arg-type]
    assert page_path(settings, measures=True) == hand_off
    assert page_path(settings, measures=False) == share


class Made(InprocTransport):
    """A transport over one path, which works here or does not."""

    def __init__(self, name: str, options: ConnectionOptions, works: bool) -> None:
        super().__init__()
        self.name = name
        self.options = options
        self.works = works
        self.closed = False

    def register(self, memory: Memory) -> None:
        if not self.works:
            raise ConfigError("transport", self.name, "use tcp")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("path", "works", "tried"),
    [
        ("auto", True, ["nixl"]),
        ("auto", False, ["nixl", "tcp"]),
        ("nixl", True, ["nixl"]),
        ("nixl", False, ["nixl"]),
        ("tcp", False, ["tcp"]),
    ],
)
def test_nixl_that_does_not_work_is_done_without_unless_it_is_asked_for(
    path: str, works: bool, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Made] = []

    def make(name: str, _: Security, options: ConnectionOptions) -> Made:
        made.append(Made(name, options, works or name == "tcp"))
        return made[-1]

    monkeypatch.setattr(connections, "make_transport", make)
    memory = PageMemory(1 << 12, seed=1)
    if path == "nixl" and not works:
        with pytest.raises(ConfigError):
            open_transport(Settings(), "share", None, path, memory)
    else:
        assert open_transport(Settings(), "share", None, path, memory) is made[-1]
    assert [each.name for each in made] == tried
    assert all(each.options.service == "share" for each in made)
    assert [each.closed for each in made] == [not each.works for each in made]


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize(("reads", "serves"), [(True, False), (False, True)])
def test_a_transport_is_told_what_it_is_used_for(
    reads: bool, serves: bool, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str, _: Security, options: ConnectionOptions) -> Made:
        return Made(name, options, works or name == "tcp")

    monkeypatch.setattr(connections, "make_transport", make)
    memory = PageMemory(1 << 12, seed=1)
    made = open_transport(Settings(), "handoff", None, "auto", memory, reads=reads, serves=serves)
    assert isinstance(made, Made)
    assert (made.options.reads, made.options.serves) == (reads, serves)
