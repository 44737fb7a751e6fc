"""Journaled streams in the relay in C: clients get their events, and notes have every token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.connections.relay import Returned
from kvconnect.router.requests.event_form import EventForm, TokenEvent
from tests.unit.native.relay_line import LAST, Line, chunk, line, whole_chunks

HEAD, MIDDLE, TAIL = b'data: {"text":', b',"end":null,"token_ids":', b"}\n\n"
FORM = EventForm(HEAD, MIDDLE, TAIL, 1 << 12, False)
SHOWING = FORM._replace(shows_ids=True)


class Said(NamedTuple):
    """An event's text and token ids."""

    text: str
    ids: list[int]

    def event(self, *, ids: bool = True) -> bytes:
        text = json.dumps(self.text, ensure_ascii=len(self.text) % 2 == 0).encode()
        shown = json.dumps(self.ids, separators=(",", ":")).encode() if ids else b"null"
        return HEAD + text + MIDDLE + shown + TAIL


def contents(chunks: bytes) -> bytes:
    """Return what whole chunks contain."""
    found, at = b"", 0
    while at < len(chunks):
        end = chunks.index(b"\r\n", at)
        size = int(chunks[at:end], 16)
        assert b"%x" % size == chunks[at:end], "as short as it can be"
        found += chunks[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return found


def said_in(content: bytes) -> list[Said]:
    """Read events as Python does."""
    found = [json.loads(event.removeprefix(b"data: ") + b"}") for event in content.split(TAIL)[:-1]]
    return [Said(each["text"], each["token_ids"]) for each in found]


def shown(events: Sequence[Said], form: EventForm) -> bytes:
    """Return the events that a client gets."""
    return b"".join(event.event(ids=form.shows_ids) for event in events)


def noted(notes: bytes) -> list[Said]:
    found = msgspec.json.decode(b"[%b]" % notes[:-1], type=list[TokenEvent])
    return [Said(each.text, each.token_ids) for each in found]


class Client(NamedTuple):
    """What a client got, and the events of which there are notes."""

    content: bytes
    notes: list[Said]


def passed(
    line: Line, pieces: Sequence[bytes], form: EventForm, *, forgets: bool = False
) -> Client:
    """Send pieces as an engine. What comes back, an owner passes on when it is whole chunks, and
    leaves the stream to the relay again. ``forgets``: it does not look at notes."""
    got, notes, owned, key = b"", list[Said](), b"", None
    for piece in filter(None, pieces):
        if owned:
            owned += piece
        else:
            key = line.add(form=form) if key is None else key
            line.engine.sendall(piece)
            whole = whole_chunks(piece) == len(piece)
            at_most = len(rechunked(piece, form)) if whole else 1 << 30
            found, record = line.settle(at_most)
            got += found
            if record is None:
                continue
            assert (record.reason, record.unsent) == ("bytes", b"")
            key, owned = None, record.rest
            notes += [] if forgets else noted(record.notes)
        if whole_chunks(owned) == len(owned):
            notes += said_in(contents(owned))
            got, owned = got + rechunked(owned, form), b""
    if key is not None:
        record = line.relay.remove(key)
        assert record is not None
        notes += noted(Returned(*record).notes)
    return Client(contents(got), notes)


def rechunked(chunks: bytes, form: EventForm) -> bytes:
    """Return what the client gets of whole chunks."""
    found, at = b"", 0
    while at < len(chunks):
        size = len(chunk(b"x" * int(chunks[at : chunks.index(b"\r\n", at)], 16)))
        found += chunk(shown(said_in(contents(chunks[at : at + size])), form))
        at += size
    return found


said = st.builds(
    Said,
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.lists(st.integers(0, 999_999_999), min_size=1, max_size=4),
)
streams = st.lists(st.lists(said, min_size=1, max_size=3), min_size=1, max_size=6)


def pieces_of(stream: bytes, cuts: Sequence[int]) -> list[bytes]:
    at = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    return [stream[begin:end] for begin, end in itertools.pairwise(at)]


@given(streams, st.lists(st.integers(0, 900), max_size=6), st.sampled_from([FORM, SHOWING]))
def test_events_in_any_pieces_reach_client_and_notes(
    events: list[list[Said]], cuts: list[int], form: EventForm
) -> None:
    stream = b"".join(chunk(shown(each, SHOWING)) for each in events)
    every = list(itertools.chain(*events))
    with line() as ends:
        got = passed(ends, pieces_of(stream, cuts), form)
    assert got == (shown(every, form), every)


def test_control_an_owner_that_forgets_notes_is_seen() -> None:
    every = [Said("a", [1]), Said("b", [2])]
    stream = b"".join(chunk(each.event()) for each in every)
    pieces = [stream[:-3], stream[-3:]]
    with line() as ends:
        assert passed(ends, pieces, FORM).notes == every
        assert passed(ends, pieces, FORM, forgets=True).notes != every


A = Said("a", [1]).event()
ODD = {
    "no ids": HEAD + b'"a"' + MIDDLE + b"null" + TAIL,
    "an empty list": HEAD + b'"a"' + MIDDLE + b"[]" + TAIL,
    "a list that ends with a comma": HEAD + b'"a"' + MIDDLE + b"[1,]" + TAIL,
    "a space": HEAD + b'"a"' + MIDDLE + b"[1, 2]" + TAIL,
    "a negative id": HEAD + b'"a"' + MIDDLE + b"[-1]" + TAIL,
    "an id over 32 bits": HEAD + b'"a"' + MIDDLE + b"[1000000000]" + TAIL,
    "a list without an end": HEAD + b'"a"' + MIDDLE + b"[1",
    "no text": HEAD + b"null" + MIDDLE + b"[1]" + TAIL,
    "a string without an end": HEAD + b'"a',
    "a string that ends with a backslash": HEAD + b'"a\\',
    "a line end in a string": HEAD + b'"a\n"' + MIDDLE + b"[1]" + TAIL,
    "a line end after a backslash": HEAD + b'"a\\\n"' + MIDDLE + b"[1]" + TAIL,
    "another middle": HEAD + b'"a"' + MIDDLE.replace(b"null", b'"st"') + b"[1]" + TAIL,
    "another tail": A.replace(TAIL, b',"x":1}\n\n'),
    "another head": b"event: a\n" + A,
    "the end": b"data: [DONE]\n\n",
    "a part": A[:-1],
    "more": A + b":",
    "one that is not whole after one that is": A + A[:9],
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_chunk_with_anything_else_comes_back_as_it_was(odd: bytes) -> None:
    with line() as ends:
        ends.add(form=FORM)
        ends.engine.sendall(chunk(A) + chunk(odd))
        record = ends.back()
        assert (record.reason, record.rest, record.chunks) == ("bytes", chunk(odd), 1)
        assert contents(ends.reads(record.nbytes + 6)) == Said("a", [1]).event(ids=False)
        assert noted(record.notes) == [Said("a", [1])], "and there is no note of it"


def test_a_string_may_look_like_the_rest() -> None:
    """Quotation marks within it are escaped."""
    odd = Said('"' + (MIDDLE + b"[7]" + TAIL).decode() + "\\", [1])
    with line() as ends:
        assert passed(ends, [chunk(odd.event())], FORM) == (odd.event(ids=False), [odd])


def test_with_no_room_for_notes_the_stream_comes_back() -> None:
    room = len(b'[[1],"a"],')
    with line() as ends:
        ends.add(form=FORM._replace(room=2 * room))
        ends.engine.sendall(3 * chunk(A))
        record = ends.back()
        assert (record.reason, record.rest) == ("bytes", chunk(A))
        assert len(record.notes) == 2 * room and record.chunks == 2
        ends.add(form=FORM._replace(room=room - 1))
        ends.engine.sendall(chunk(A))
        assert ends.back()[-1] == b""
        ends.add(form=FORM._replace(room=room))
        ends.engine.sendall(chunk(A + A))
        record = ends.back()
        assert (record.rest, record.notes) == (chunk(A + A), b""), "both or none"


def test_what_a_client_does_not_take_is_its_view() -> None:
    """The events that count as passed were changed already; those after them were not."""
    with line() as ends:
        ends.client.close()
        ends.add(form=FORM)
        ends.engine.sendall(chunk(A) + LAST)
        record = ends.back()
        assert record.reason == "full" and record.rest == LAST
        assert contents(record.unsent) == Said("a", [1]).event(ids=False)
        assert noted(record.notes) == [Said("a", [1])]


def test_notes_come_with_an_engine_that_ends() -> None:
    with line() as ends:
        ends.add(form=SHOWING)
        ends.engine.sendall(chunk(A) + chunk(A))
        ends.engine.close()
        record = ends.back()
        assert record.reason == "ended" and noted(record.notes) == 2 * [Said("a", [1])]


def test_what_is_no_form_is_refused() -> None:
    with line() as ends:
        source, target = ends.from_engine.fileno(), ends.to_client.fileno()
        for form in ((b"", b"", b"", -1, False), (b"", b""), ("a", b"", b"", 1, False), b"x"):
            with pytest.raises((TypeError, ValueError)):
                ends.relay.add(source, target, False, form)  # type: ignore[arg-type]
