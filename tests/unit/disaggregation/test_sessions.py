"""Which path the pages of a connection take when one of them does not work."""

from __future__ import annotations

import math
import time

import pytest

pytest.importorskip("torch")

from kvconnect.disaggregation import bandwidth_probe
from kvconnect.disaggregation.decode_executor import DecodeExecutor
from kvconnect.disaggregation.messages import DisaggregationInstructions, Keep, PrefillSource
from kvconnect.disaggregation.sessions import HandoffSession, HandoffSessions, PathPreference
from kvconnect.errors import Refused
from kvconnect.peers.sessions import SessionState
from kvconnect.protocol import messages
from kvconnect.protocol.hello import REFUSAL_FIELDS
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.messages import Decline, GroupHello, HandoffHello, Reject, Renew
from kvconnect.protocol.reads import PROBE_READ_ID
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.testing.inproc import InprocTransport
from kvconnect.transport.base import (
    Disconnect,
    Event,
    PagesReceived,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
)
from kvconnect.types import Endpoint, FailureCause, Origin, Rank, TransferId

GROUP = GroupHello(
    block_tokens=16,
    page_tokens=16,
    layers=["layer0"],
    kv_heads=1,
    heads=1,
    row_bytes=64,
    order="HNC",
    splittable=True,
)
HELLO = HandoffHello(
    software="test",
    engine_id="here",
    epoch=1,
    rank=Rank(0, 1, 0, 1),
    identity=Identity(weights=Weights(files="same")),
    format={"model": "m"},
    groups=[GROUP],
)
ORIGIN = Origin(Endpoint(0, 0, "127.0.0.1", 1), "there", 1)


class Recording(InprocTransport):
    """Connects to nobody and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[object] = []
        self.peers = 0

    def connect(self, host: str, port: int) -> PeerId:
        self.peers += 1
        return PeerId(self.peers)

    def submit(self, order: object) -> None:
        self.orders.append(order)

    def poll(self, timeout: float) -> list[Event]:
        return []


def make_links(transport: str = "auto") -> tuple[HandoffSessions, Recording]:
    seam = Recording()
    return HandoffSessions(
        HELLO, (), seam, OffloadingConnectorStats(), PathPreference(transport)
    ), seam


def connected(links: HandoffSessions, paths: tuple[str, ...] = ("tcp", "nixl")) -> HandoffSession:
    """Connect to the origin; both sides have agreed, nothing is measured yet."""
    assert links.get_or_connect(ORIGIN) is None
    peer = PeerId(links.transport.peers)  # type: ignore[attr-defined]
    links.on_up(PeerUp(peer, False, "127.0.0.1:1", paths, "no NIXL there"))
    link = links.get(peer)
    assert link is not None
    if link.state is SessionState.GREETING:
        link.state = SessionState.UP
    return link


def test_no_pages_move_before_the_path_is_chosen() -> None:
    links, _ = make_links()
    link = connected(links)
    assert link.meter.paths == ("tcp", "nixl")
    assert links.get_or_connect(ORIGIN) is None
    link.meter.path = "nixl"
    assert links.get_or_connect(ORIGIN) is link


def lose(links: HandoffSessions, link: HandoffSession, **measured: float) -> tuple[str, ...]:
    """Lose a connection that has measured some paths; return what the next one measures."""
    link.meter.rates.update(measured)
    links.on_down(PeerDown(link.peer, "stalled"))
    return connected(links).meter.paths


def current(links: HandoffSessions) -> HandoffSession:
    (link,) = links
    return link


def test_a_path_that_breaks_twice_while_it_is_measured_is_not_tried_again() -> None:
    """Once may have had another cause, such as the end of the peer."""
    links, _ = make_links()
    assert lose(links, connected(links), tcp=1e9) == ("tcp", "nixl")
    assert lose(links, current(links), tcp=1e9) == ("tcp",)
    current(links).meter.path = "tcp"
    assert lose(links, current(links), tcp=1e9) == ("tcp",)


def test_connections_that_are_lost_before_any_measurement_say_nothing_of_the_path() -> None:
    links, _ = make_links()
    connected(links)
    for _ in range(3):
        assert lose(links, current(links)) == ("tcp", "nixl")


def test_a_path_that_was_measured_in_between_is_tried_again() -> None:
    links, _ = make_links()
    assert lose(links, connected(links), tcp=1e9) == ("tcp", "nixl")
    link = current(links)
    for probe, path in enumerate(("tcp", "tcp", "nixl", "nixl")):
        assert not link.meter.path
        number = PROBE_READ_ID + probe
        blocks = 16 if probe % 2 == 0 else 128
        size = blocks * (64 << 10)
        event = PagesReceived(link.peer, number, 0, 0, blocks, (), size, 1.0)
        assert bandwidth_probe.on_event(links, link, event) == (probe == 3)
        assert path in link.meter.rates
    assert lose(links, link) == ("tcp", "nixl")
    assert lose(links, current(links), tcp=1e9) == ("tcp", "nixl")
    assert lose(links, current(links), tcp=1e9) == ("tcp",)


def test_a_connection_that_was_chosen_and_lost_is_measured_anew() -> None:
    links, _ = make_links()
    link = connected(links)
    link.meter.rates.update(tcp=1e9, nixl=2e9)
    link.meter.path = "nixl"
    links.on_down(PeerDown(link.peer, "lost"))
    assert connected(links).meter.paths == ("tcp", "nixl")


def test_a_measurement_that_never_ends_is_given_up() -> None:
    links, seam = make_links()
    link = connected(links)
    links.tick(time.monotonic())
    assert not any(isinstance(order, Disconnect) for order in seam.orders)
    links.tick(time.monotonic() + 61)
    assert Disconnect(link.peer, "the bandwidth probe did not finish within 60 s") in seam.orders


def test_a_path_whose_measurement_never_ends_is_not_tried_a_third_time() -> None:
    """As over a firewall that drops packets, where this side gives up before the other one."""
    links, _ = make_links()
    connected(links)
    for times in (1, 2):
        assert current(links).meter.paths == ("tcp", "nixl")
        current(links).meter.rates["tcp"] = 1e9
        links.tick(time.monotonic() + 61)
        assert lose(links, current(links)) == (("tcp", "nixl") if times == 1 else ("tcp",))


def test_a_path_that_is_asked_for_and_missing_is_refused_with_the_reason() -> None:
    links, seam = make_links("nixl")
    link = connected(links, ("tcp",))
    assert link.refusal
    notes = [
        messages.decode(order.payload) for order in seam.orders if isinstance(order, PeerMessage)
    ]
    assert Reject("transport", "no nixl path: no NIXL there") in notes


def test_a_refusal_is_logged_though_the_peer_closes_first(caplog: pytest.LogCaptureFixture) -> None:
    links, _ = make_links()
    link = connected(links)
    links.on_reject(link, Reject("layers", "layers is 4 here, 5 there"))
    links.on_down(PeerDown(link.peer, "closed by the peer"))
    assert "layers is 4 here, 5 there" in caplog.text


def test_the_errors_that_a_path_can_raise_are_metric_labels() -> None:
    for field in ("transport", "rate"):
        assert Refused(field, "x").field in REFUSAL_FIELDS


def test_leases_are_renewed_for_an_engine_that_stands_still_but_not_for_long() -> None:
    """Two paused engines would else wait for each other."""
    links, seam = make_links()
    connected(links).meter.path = "tcp"
    side = DecodeExecutor(links)
    transfer = TransferId(b"t" * 16)
    source = PrefillSource("there", 1, (ORIGIN.endpoint,), 1, 1)
    side.begin_step(
        DisaggregationInstructions(keeps=[Keep(transfer, source, every_s=10.0)]), 0.0, None
    )

    def renewed(now: float) -> bool:
        seam.orders.clear()
        side.tick(now)
        notes = [
            messages.decode(order.payload) for order in seam.orders if type(order) is PeerMessage
        ]
        assert notes in ([], [Renew([transfer])])
        return bool(notes)

    assert [renewed(now) for now in (9.0, 10.0, 19.0, 20.0)] == [False, True, False, True]
    side.step_ended_at = 12.0
    assert [renewed(now) for now in (30.0, 40.0, 42.1, 50.0)] == [True, True, False, False]
    side.step_ended_at = math.inf  # it goes on
    assert renewed(60.0)


@pytest.mark.parametrize(
    ("cause", "tries"), [(FailureCause.PEER, 5), (FailureCause.REFUSED, 1)], ids=["lost", "refused"]
)
def test_a_decline_is_sent_again_over_another_connection(cause: FailureCause, tries: int) -> None:
    """The prefill engine would wait for this worker. One that refuses it does not hear more."""
    links, seam = make_links()
    links.speaks_for_engine = True
    side = DecodeExecutor(links)
    source = PrefillSource("there", 1, (ORIGIN.endpoint,), 1, 1)
    keeps = [Keep(TransferId(b"t" * 16), source)]
    side.begin_step(DisaggregationInstructions(keeps=keeps), 0.0, None)
    for _ in range(10):
        links.on_down(PeerDown(PeerId(seam.peers), "gone"))
        side.on_lost(PeerId(seam.peers), ORIGIN, cause)
        side.tick(0.0)  # not at once
        before = seam.peers
        side.tick(math.inf)
        assert seam.peers in (before, before + 1)
    assert seam.peers == tries
    assert not (side._keeps or side._undelivered)


def test_a_decline_that_was_not_delivered_is_when_the_worker_is_there_again() -> None:
    links, seam = make_links()
    side = DecodeExecutor(links)
    source = PrefillSource("there", 1, (ORIGIN.endpoint,), 1, 1)
    keep = Keep(TransferId(b"t" * 16), source)
    links.speaks_for_engine = True
    side.begin_step(DisaggregationInstructions(keeps=[keep]), 0.0, None)
    links.on_down(PeerDown(PeerId(seam.peers), "gone"))
    side.on_lost(PeerId(seam.peers), ORIGIN, FailureCause.PEER)
    side.tick(math.inf)
    link = links._sessions[PeerId(seam.peers)]
    side.on_connected(ORIGIN, link)
    sent = [messages.decode(o.payload) for o in seam.orders if isinstance(o, PeerMessage)]
    assert sent == [Decline(keep.transfer)]
    assert not (side._keeps or side._undelivered)
