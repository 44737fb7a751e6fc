"""What a peer process of ``doctor transport`` is told to do, and what it answers: one line each."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvconnect.doctor.peers import PathMeasurement, Sizes
from kvconnect.errors import ConfigError

PathChoice = Literal["tcp", "nixl", "all"]
Device = Literal["cpu", "cuda"]


class Task(msgspec.Struct, frozen=True):
    """A peer's task. ``host`` and ``port``: where a source listens, or a reader connects to."""

    role: Literal["source", "reader"]
    host: str
    port: int = 0
    path: PathChoice = "all"
    device: Device = "cpu"
    key_file: str = ""
    tls_dir: str = ""
    sizes: Sizes = Sizes()


class Problem(msgspec.Struct):
    """Why something is unusable, and the fix; both are empty if it is usable."""

    reason: str = ""
    fix: str = ""


def problem_of(error: ConfigError) -> Problem:
    """Return the problem of an unusable setting."""
    return Problem(f"not usable: {error.field}={error.value!r}", error.fix)


class SourceReady(msgspec.Struct):
    """A source's answer: its port, or why it does not listen."""

    port: int = 0
    problem: Problem = msgspec.field(default_factory=Problem)


class Result(msgspec.Struct):
    """A reader's answer.

    Attributes:
        local: this side's address of the connection.
        devices: of the reader's and the source's test buffer.
        connections: of the transport, and of the plain sockets.
        link_bytes_per_s: of plain sockets; 0 if they failed. ``link_failed``: why.
        measured: one entry per path.
        nixl_problem: why NIXL was not measured.
        problem: why nothing was measured. ``refused``: the field of a rejection, see ``PeerDown``.
    """

    local: str = ""
    devices: tuple[str, str] = ("", "")
    connections: int = 0
    link_bytes_per_s: float = 0.0
    link_failed: str = ""
    measured: list[PathMeasurement] = msgspec.field(default_factory=list)
    nixl_problem: Problem = msgspec.field(default_factory=Problem)
    problem: Problem = msgspec.field(default_factory=Problem)
    refused: str = ""
