"""Messages of engines that share host memory: what each kind may say, when, and to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ProtocolError
from kvconnect.peers.sessions import Session, Sessions, SessionState
from kvconnect.protocol.cache_messages import (
    MAX_ASKED,
    MAX_FETCHED,
    WHOLE,
    Ask,
    CacheHello,
    CacheMessage,
    Fetch,
    Found,
    HostTierAddresses,
    Place,
    Sent,
    decode,
    encode,
)
from kvconnect.protocol.codec import MAX_MESSAGE
from kvconnect.protocol.hello import Reject
from kvconnect.protocol.reads import PROBE_READ_ID, Cancel
from kvconnect.transport.base import Disconnect
from tests.unit.tiers import sharing_world
from tests.unit.tiers.sharing_world import BLOCKS, HALF, End, Engine, World

HIGHEST_ID = PROBE_READ_ID - 1
SHORT, LONG = bytes(18), bytes(81)  # keys
UNITS = {0: 4096, WHOLE - 1: 1 << 40}
HELLO = CacheHello(engine=bytes(16), format=b"f", layout=b"l" * 64, groups=[UNITS, {7: 1}])
MEMORY = HostTierAddresses(1, 0, (1 << 62) - 1, 1, 4096)
HIGHEST_PLACE = Place((1 << 32) - 1, (1 << 64) - 1, (1 << 64) - 1)
MESSAGES: list[CacheMessage] = [
    HELLO,
    Reject("weights", "others"),
    msgspec.structs.replace(HELLO, nonce=b"n" * 16),
    MEMORY,
    Ask(1, [SHORT, LONG]),
    Ask(HIGHEST_ID, [SHORT] * MAX_ASKED),
    Found(1, b""),
    Found(1, bytes(MAX_ASKED)),
    Found(1, bytes([1, 0, 1]), [Place(0, 0, None), HIGHEST_PLACE]),
    Found(1, b"\1" * MAX_ASKED, [HIGHEST_PLACE] * MAX_ASKED),
    Fetch(1, 63, [WHOLE], [SHORT]),
    Fetch(1, 0, list(range(1024)), [LONG[:-2] + n.to_bytes(2, "big") for n in range(MAX_FETCHED)]),
    Sent(1, bytes(MAX_FETCHED)),
    Cancel(1),
]


every_message = pytest.mark.parametrize(
    "message", MESSAGES, ids=[f"{type(it).__name__} {n}" for n, it in enumerate(MESSAGES)]
)


small = st.integers(-(1 << 63), (1 << 64) - 1)


def fields(message: CacheMessage) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.msgpack.decode(encode(message), strict=False)
    return plain


def with_field(message: CacheMessage, name: str, value: object) -> bytes:
    return msgspec.msgpack.encode({**fields(message), name: value})


def test_every_kind_is_tried() -> None:
    kinds = set(CacheMessage.__args__)
    assert {type(message) for message in MESSAGES} == kinds
    assert {type(message) for message, _, _ in OUT_OF_RANGE} == kinds


@every_message
def test_a_message_comes_back_as_it_was(message: CacheMessage) -> None:
    assert decode(encode(message)) == message
    assert len(encode(message)) <= MAX_MESSAGE


@every_message
@given(st.text(min_size=1), st.none() | st.booleans() | st.floats() | st.binary() | st.lists(small))
def test_fields_of_later_versions_are_ignored(
    message: CacheMessage, name: str, value: object
) -> None:
    known = fields(message)
    if name not in known:
        assert decode(msgspec.msgpack.encode({**known, name: value})) == message


NUMBER: list[object] = [-1, PROBE_READ_ID, 1 << 63, 1.5, "1", None, True, [], b"1"]
KEYS: list[object] = [[], [bytes(17)], [bytes(82)], ["text"], [None], b"key", None, {}, [SHORT, 1]]
OUT_OF_RANGE: list[tuple[CacheMessage, str, list[object]]] = [
    (HELLO, "protocol", [[0, 1], [1], [1, 1, 1], [1, 1 << 16], 1, None, ["1", "1"]]),
    (HELLO, "engine", [b"", bytes(15), bytes(17), "x" * 16, None]),
    (HELLO, "format", [b"", bytes(65), "f", None]),
    (HELLO, "layout", [b"", bytes(65), "l", None]),
    (HELLO, "groups", [[], [{0: 1}] * 65, [{}], [{0: 0}], [{0: 1 << 41}], [{-1: 1}], None, {}]),
    (HELLO, "groups", [[{1 << 16: 1}], [dict.fromkeys(range(1025), 1)], [{"0": 1}], [[0, 1]]]),
    (HELLO, "pages", [[0], [-1], [(1 << 16) + 1], [1] * 65, ["1"], 1, None]),
    (HELLO, "nonce", [bytes(17), "n" * 16, None, 1]),
    (Reject("other", ""), "field", ["", "x" * 65, "line\nbreak", None, 1]),
    (Reject("other", ""), "message", [None, 1, b""]),
    (MEMORY, "pid", [0, -1, 1 << 31, "1", None, True]),
    (MEMORY, "nonce", [-1, 1 << 62, 1 << 63, "1", None, b""]),
    (MEMORY, "slots", [-1, 1 << 62, 1 << 63, "1", None, b""]),
    (MEMORY, "versions", [-1, 1 << 62, 1 << 63, "1", None, b""]),
    (MEMORY, "slot_bytes", [0, -1, 1 << 30, "1", None, 1.5]),
    (Ask(1, [SHORT]), "ask", NUMBER),
    (Ask(1, [SHORT]), "keys", [*KEYS, [SHORT] * (MAX_ASKED + 1)]),
    (Found(1, b"\1"), "ask", NUMBER),
    (Found(1, b"\1"), "found", [bytes(MAX_ASKED + 1), "1", [1], None]),
    (Found(1, b"\1"), "places", [[[1 << 32, 0, 0]], [[-1, 0, 0]], [[0, -1, 0]], [[0, 0, -1]]]),
    (Found(1, b"\1"), "places", [[[0, 0]], [[]], [0], [[0, 0, "1"]], [[0, None, 0]], None, {}]),
    (Found(1, b""), "places", [[[0, 0, 0]] * (MAX_ASKED + 1)]),
    (Fetch(1, 0, [0], [SHORT]), "read_id", NUMBER),
    (Fetch(1, 0, [0], [SHORT]), "group", [-1, 64, 1.5, "0", None, True]),
    (Fetch(1, 0, [0], [SHORT]), "units", [[], [0, 0], [-1], [1 << 16], list(range(1025)), None]),
    (Fetch(1, 0, [0], [SHORT]), "keys", [*KEYS, [SHORT] * 2, [SHORT] * (MAX_FETCHED + 1)]),
    (Sent(1, b"\1"), "read_id", NUMBER),
    (Sent(1, b"\1"), "outcomes", [bytes(MAX_FETCHED + 1), "1", [1], None]),
    (Cancel(1), "read_id", NUMBER),
]


@pytest.mark.parametrize(
    ("message", "name", "values"),
    OUT_OF_RANGE,
    ids=[f"{type(it).__name__}.{name} {n}" for n, (it, name, _) in enumerate(OUT_OF_RANGE)],
)
def test_a_field_out_of_range_is_refused(
    message: CacheMessage, name: str, values: list[object]
) -> None:
    assert decode(with_field(message, name, fields(message)[name])) == message  # control
    for value in values:
        with pytest.raises(ProtocolError):
            decode(with_field(message, name, value))


@every_message
def test_a_field_that_is_missing_is_refused(message: CacheMessage) -> None:
    for name in {field.encode_name for field in msgspec.structs.fields(message) if field.required}:
        rest = {key: value for key, value in fields(message).items() if key != name}
        with pytest.raises(ProtocolError):
            decode(msgspec.msgpack.encode(rest))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "evict", "fetch": 1}),
        msgspec.msgpack.encode(["cancel", 1]),
        encode(Cancel(1)) + b"\0",
        b"\x91" * 100_000,  # nested more deeply than a stack
        bytes(MAX_MESSAGE + 1),
    ],
    ids=["nothing", "no msgpack", "another kind", "a list", "a byte more", "deep", "long"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


# At the wrong time, or on the wrong side ----------------------------------------------------------

Say = Callable[[Engine], list[CacheMessage]]


def key_of(engine: Engine) -> bytes:
    """A block that an engine serves."""
    return next(iter(engine.agent.served._places))


def hello_of(engine: Engine) -> CacheHello:
    return engine.agent._hello


FROM_A_READER: dict[str, Say] = {
    "an answer": lambda _: [Found(1, b"\1")],
    "an outcome": lambda _: [Sent(1, b"\1")],
    "another hello": lambda it: [hello_of(it)],
    "a group that is not there": lambda it: [Fetch(1, 1, [WHOLE], [key_of(it)])],
    "a unit that is not kept": lambda it: [Fetch(1, 0, [0, 7], [key_of(it)])],
    "a fetch twice": lambda it: [Fetch(1, 0, [WHOLE], [key_of(it)])] * 2,
}
FROM_A_SOURCE: dict[str, Say] = {
    "a question": lambda it: [Ask(1, [key_of(it)])],
    "a fetch": lambda it: [Fetch(1, 0, [WHOLE], [key_of(it)])],
    "a cancel": lambda _: [Cancel(1)],
    "another hello": lambda it: [hello_of(it)],
}
TOO_EARLY: dict[str, Say] = {
    "a refusal": lambda _: [Reject("weights", "others")],
    "a question": lambda it: [Ask(1, [key_of(it)])],
    "a fetch": lambda it: [Fetch(1, 0, [WHOLE], [key_of(it)])],
    "an answer": lambda _: [Found(1, b"\1")],
    "an outcome": lambda _: [Sent(1, b"\1")],
    "a cancel": lambda _: [Cancel(1)],
    "a hello of no version": lambda it: [msgspec.structs.replace(hello_of(it), protocol=(2, 1))],
    "a hello of a later version": lambda it: [
        msgspec.structs.replace(hello_of(it), protocol=(9, 9))
    ],
}
OTHER_BLOCKS: dict[str, Say] = {
    "a hello with other groups": lambda it: [
        msgspec.structs.replace(hello_of(it), engine=bytes(16), groups=[{0: HALF}] * 2)
    ],
    "a hello with other sizes": lambda it: [
        msgspec.structs.replace(hello_of(it), engine=bytes(16), groups=[{0: 1, 1: 1}])
    ],
}
"""From a source; what a reader keeps is checked when it asks for it."""
HARMLESS: dict[str, Say] = {
    "a question": lambda it: [Ask(1, [key_of(it), SHORT])],
    "a cancel of what has ended": lambda _: [Cancel(1)],
    "a fetch of what is not there": lambda _: [Fetch(1, 0, [WHOLE], [SHORT])],
}
"""From a reader, after it has said hello."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Three engines that are connected; the first one has blocks."""
    sharing_world.replaced(monkeypatch)
    world = World([sharing_world.WHOLE] * 3, "full", "network", Counter())
    world.play()
    world.engines[0].compute("", "a")
    world.play(*world.engines)
    return world


def end_at(engine: Engine, other: Engine, reads: bool) -> End:
    """An engine's side of a connection to another one, which it ``reads`` from or serves."""
    for end in engine.network.ends.values():
        there = end.other
        if there is not None and there.network is other.network and end.inbound is not reads:
            return end
    raise AssertionError("there is no such connection")


def hears(world: World, end: End, messages: list[CacheMessage]) -> str:
    """Have the other side of a connection say something; return why it was ended, if it was."""
    assert end.other is not None
    end.other.said.extend(encode(message) for message in messages)
    world.play()
    found, world.errors = world.errors, []
    assert len(found) <= 1
    return str(found[0]) if found else ""


def assert_only_this_ended(world: World, end: End) -> None:
    """All other connections are up, the others read from one another, and soon all do."""
    first, hostile, third = world.engines
    ends = [each for engine in world.engines for each in engine.network.ends.values()]
    assert end not in ends
    assert len(ends) == 2 * 6 - 2
    third.ask("r", "", "a", BLOCKS)
    world.play(third)
    assert world.seen["read: ok"] == BLOCKS
    world.share()
    assert len(hostile.agent.reader.sources) == len(first.agent.reader.sources) == 2
    world.end()


def refusals(table: dict[str, Say]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("say", table.values(), ids=table)


@refusals(FROM_A_READER)
def test_what_a_reader_must_not_say_ends_its_connection_alone(world: World, say: Say) -> None:
    first, hostile, _ = world.engines
    end = end_at(first, hostile, reads=False)
    assert "ProtocolError" in hears(world, end, say(first))
    assert_only_this_ended(world, end)


@refusals(FROM_A_SOURCE)
def test_what_a_source_must_not_say_ends_its_connection_alone(world: World, say: Say) -> None:
    first, hostile, _ = world.engines
    end = end_at(first, hostile, reads=True)
    assert "ProtocolError" in hears(world, end, say(first))
    assert_only_this_ended(world, end)


EARLY = [(False, name) for name in TOO_EARLY]
EARLY += [(True, name) for name in {**TOO_EARLY, **OTHER_BLOCKS}]


@pytest.mark.parametrize(("reads", "name"), EARLY)
def test_what_is_said_before_an_agreement_ends_its_connection_alone(
    world: World, reads: bool, name: str
) -> None:
    first, hostile, _ = world.engines
    end = end_at(first, hostile, reads)
    session = first.agent._sessions.get(end.peer)
    assert session is not None
    session.state, session.same_blocks = SessionState.GREETING, False  # as before the other's hello
    assert hears(world, end, {**TOO_EARLY, **OTHER_BLOCKS}[name](first))
    assert_only_this_ended(world, end)


NO_AGREEMENT: dict[str, Say] = {
    "refused here": TOO_EARLY["a hello of a later version"],
    "refused there": lambda _: [Reject("protocol", "4 to 4 here, 9 to 9 there")],
}


@refusals(NO_AGREEMENT)
def test_why_two_workers_do_not_share_is_logged_once(
    world: World, say: Say, caplog: pytest.LogCaptureFixture
) -> None:
    first, other, _ = world.engines
    for _ in range(2):
        end = end_at(first, other, reads=True)
        session = first.agent._sessions.get(end.peer)
        assert session is not None
        session.state, session.same_blocks = SessionState.GREETING, False
        assert "9 to 9 there" in hears(world, end, say(first))
        world.share()
    (line,) = [each for each in caplog.messages if each.startswith("nothing is shared with")]
    assert "9 to 9 there" in line
    world.end()


@refusals(HARMLESS)
def test_what_a_reader_may_say_ends_nothing(world: World, say: Say) -> None:
    """The control."""
    first, other, _ = world.engines
    end = end_at(first, other, reads=False)
    assert hears(world, end, say(first)) == ""
    assert end in first.network.ends.values()
    world.share()
    world.end()


@pytest.mark.parametrize("found", [b"", bytes(BLOCKS + 1)])
def test_an_answer_of_another_length_ends_its_connection(world: World, found: bytes) -> None:
    _, reader, _ = world.engines
    number, end = asks(world, reader)
    assert "ProtocolError" in hears(world, end, [Found(number, found)])
    world.share()
    world.end()


def test_an_answer_to_a_question_to_others_ends_its_connection(world: World) -> None:
    _, reader, other = world.engines
    number, end = asks(world, reader)
    ends = [each for each in reader.network.ends.values() if not each.inbound]
    (wrong,) = [each for each in ends if each is not end and each.other is not None]
    assert "ProtocolError" in hears(world, wrong, [Found(number, bytes(BLOCKS))])
    world.share()
    assert other.alive
    world.end()


def asks(world: World, reader: Engine) -> tuple[int, End]:
    """Have an engine ask; return the number of a question, and to whom it is on its way."""
    world.slow = True
    reader.ask("r", "", "a", BLOCKS)
    world.go_until(lambda: reader.agent.reader.questions._open)
    world.slow = False
    number, question = next(iter(reader.agent.reader.questions._open.items()))
    return number, reader.network.ends[question.source.peer]


def test_an_error_that_ends_more_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an agent that closes all connections because of one."""

    def end_all(self: Sessions[Session], _peer: object, error: Exception) -> None:
        for each in self:
            self.transport.submit(Disconnect(each.peer, str(error)))

    monkeypatch.setattr(Sessions, "end", end_all)
    first, hostile, _ = world.engines
    with pytest.raises(AssertionError):
        hears(world, end_at(first, hostile, reads=True), [Cancel(1)])
    world.end()
