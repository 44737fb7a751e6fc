"""An error in any callback of the agent's threads ends no loop, no agent and no other hand-off."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvconnect.disaggregation import agent  # noqa: E402
from kvconnect.disaggregation.agent import HandoffAgent  # noqa: E402
from kvconnect.disaggregation.decode_executor import DecodeExecutor  # noqa: E402
from kvconnect.disaggregation.messages import OfferBlocks  # noqa: E402
from kvconnect.disaggregation.prefill_executor import PrefillExecutor  # noqa: E402
from kvconnect.disaggregation.sessions import HandoffSessions  # noqa: E402
from kvconnect.transport.tcp import event_loop  # noqa: E402
from kvconnect.transport.tcp.control_connection import ControlConnection  # noqa: E402
from kvconnect.transport.tcp.listener import Listener  # noqa: E402
from kvconnect.transport.tcp.peer import Peer  # noqa: E402
from kvconnect.transport.tcp.transport import TcpTransport  # noqa: E402
from kvconnect.types import Span, TransferId  # noqa: E402
from tests.fakes.handoff_engine import (  # noqa: E402
    TRANSFER,
    Engine,
    finished,
    hand_off,
    receive,
    table,
)

WAIT_S = 30.0
OTHER = TransferId(b"another transfer")

CALLBACKS = [
    (TcpTransport, "_dial"),
    (Listener, "tick"),
    (Listener, "_receive"),
    (Listener, "_advance"),
    (Peer, "join"),
    (Peer, "tick"),
    (Peer, "send_message"),
    (Peer, "_start_sending"),
    (Peer, "_on_message"),
    (ControlConnection, "_on_ready"),
    (HandoffAgent, "_on_event"),
    (HandoffAgent, "_on_message"),
    (HandoffSessions, "tick"),
    (PrefillExecutor, "tick"),
    (PrefillExecutor, "on_sent"),
    (DecodeExecutor, "tick"),
    (DecodeExecutor, "on_received"),
]


class Break:
    """Makes the first call of a method raise, in whatever thread; later calls are as ever."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.raised = threading.Event()
        real = getattr(owner, name)

        def once(*args: Any, **kwargs: Any) -> Any:
            if not self.raised.is_set():
                self.raised.set()
                raise ZeroDivisionError("nobody has thought of this")
            return real(*args, **kwargs)

        patch.setattr(owner, name, once)


def alive(*engines: Engine) -> bool:
    agents = [agent for engine in engines for agent in engine.agents]
    loops = [agent._sessions.transport._shared.loop for agent in agents]  # type: ignore[attr-defined]
    return all(agent._loop.alive for agent in agents) and all(loop.alive for loop in loops)


def disturbed_hand_off(p: Engine, d: Engine, broken: Break) -> None:
    """Hand off a prompt while a callback raises once. It may fail, if it says so."""
    blocks = table(150, 16)
    p.step(offers=[OfferBlocks(TRANSFER, (Span(0, 0, blocks),))])
    d.step(receives=[receive(p.source(), blocks, 150, early=True)])
    assert broken.raised.wait(WAIT_S)
    finished(d)


@pytest.mark.parametrize(
    ("owner", "name"), CALLBACKS, ids=lambda part: getattr(part, "__name__", part)
)
def test_an_error_in_a_callback_ends_no_thread(
    owner: type, name: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = stack.enter_context(Engine(sends=True))
    d, later = (stack.enter_context(Engine()) for _ in range(2))
    with monkeypatch.context() as patch:
        disturbed_hand_off(p, d, Break(patch, owner, name))
    assert alive(p, d)
    hand_off(p, later, OTHER)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ZeroDivisionError, OverflowError, KeyError, OSError])
@pytest.mark.parametrize("bounded", [True, False])
def test_without_the_boundary_the_loop_ends(
    error: type[Exception], bounded: bool, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: errors that happen, with no boundary that contains them."""
    d = stack.enter_context(Engine())
    loop = d.agents[0]._sessions.transport._shared.loop  # type: ignore[attr-defined]
    if not bounded:
        monkeypatch.setattr(event_loop, "contained", lambda _: nullcontext())
    called = threading.Event()

    def raises() -> None:
        called.set()
        raise error("nobody has thought of this")

    loop.call(raises)
    assert called.wait(WAIT_S)
    if bounded:
        hand_off(stack.enter_context(Engine(sends=True)), d)
        assert alive(d)
        return
    deadline = time.monotonic() + WAIT_S
    while alive(d):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_the_boundary_the_agent_ends(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of its own thread."""
    d = stack.enter_context(Engine())
    monkeypatch.setattr(agent, "contained", lambda _: nullcontext())
    broken = Break(monkeypatch, DecodeExecutor, "tick")
    assert broken.raised.wait(WAIT_S)
    d.agents[0]._loop.join()
    assert not alive(d)


@pytest.mark.parametrize("port", [-1, 0, 70_000, 2**40])
def test_a_port_that_is_none_fails_one_receive(port: int, stack: ExitStack) -> None:
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    source = p.source()
    (endpoint,) = source.endpoints
    wrong = source.__class__(
        source.engine_id, source.epoch, (endpoint._replace(port=port),), source.tp, source.pp
    )
    d.step(receives=[receive(wrong, table(32, 16), 32)])
    (report,) = finished(d)
    assert report.failures
    assert alive(d)
    hand_off(p, d)
