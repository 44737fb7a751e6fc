"""The form of events that native code passes on, and the notes that it makes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvconnect.router.requests.event_form import (
    NOTED_BYTES,
    UNREADABLE,
    EventForm,
    NotedEvents,
    TokenEvent,
    form_of,
)
from tests.fakes.token_model import TokenModel

ASK = {"prompt": "a", "max_tokens": 9, "return_token_ids": True}
CHAT = {"messages": [], "return_token_ids": True}
CHOICE = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "token_ids": [5]}


def event(choice: dict[str, Any] = CHOICE, **more: Any) -> bytes:
    made = {"id": "cmpl-1", "created": 1, "model": "m", "choices": [choice], **more}
    return b"data: " + json.dumps(made, separators=(",", ":")).encode()


def filled(form: EventForm, text: bytes, ids: bytes) -> bytes:
    return form.head + text + form.middle + ids + form.tail


def found(text: bytes, *, chat: bool = False) -> EventForm | None:
    return form_of(text, chat=chat, shows_ids=False)


@pytest.mark.parametrize("asked", [ASK, CHAT], ids=["completion", "chat"])
def test_an_event_in_mid_stream_shows_the_form_of_others(asked: dict[str, Any]) -> None:
    chat = "messages" in asked
    events = [each.removesuffix(b"\n\n") for each in TokenModel().events(asked)]
    middle = [each for each in events[2:-1] if b'"finish_reason":null' in each]
    forms = {found(each, chat=chat) for each in middle}
    assert len(middle) > 4 and len(forms) == 1
    form = forms.pop()
    assert form is not None
    for each in middle:
        choice = json.loads(each[6:])["choices"][0]
        text = choice["delta"]["content"] if chat else choice["text"]
        said = json.dumps(text, ensure_ascii=False).encode()
        assert (
            filled(form, said, b"%s" % json.dumps(choice["token_ids"]).encode()) == each + b"\n\n"
        )


def test_text_that_looks_like_a_name_is_text() -> None:
    odd = event(CHOICE | {"text": '"text":"b","token_ids":[7]'})
    form = found(odd)
    assert (
        form is not None and filled(form, b'"x"', b"[5]") == event(CHOICE | {"text": "x"}) + b"\n\n"
    )


@pytest.mark.parametrize(
    "odd",
    [
        event({**CHOICE, "more": {"text": "b"}}),  # which of the two?
        event({**CHOICE, "more": {"token_ids": [1]}}),
        event({"token_ids": [5], "index": 0, "text": "a"}),  # the other way round
        event({"index": 0, "token_ids": [5]}, text="a"),  # another text
        event({"text": "a"}, token_ids=[5]),
        event(CHOICE | {"token_ids": []}),
        event(CHOICE | {"token_ids": None}),
        event(CHOICE | {"text": None}),
        event().replace(b'"text":', b'"text": '),  # others may have no space
        event().replace(b"[5]", b"[5 ]"),
        event()[:-1],
        b"data: [DONE]",
        b": a comment",
    ],
)
def test_what_has_no_form_is_left_to_python(odd: bytes) -> None:
    assert found(event()) is not None, "the control"
    assert found(odd) is None


def test_the_first_example_is_the_form_and_takes_memory_once() -> None:
    taken: list[int] = []
    noted = NotedEvents(lambda size: not taken.append(size), chat=False, shows_ids=True)
    assert noted.form() is None and not taken
    noted.learn(event())
    noted.learn(event(id="cmpl-2"))
    assert noted.form() == noted.form() == form_of(event(), chat=False, shows_ids=True)
    assert taken == [2 * NOTED_BYTES]


def test_without_memory_there_is_no_form() -> None:
    asked: list[int] = []
    noted = NotedEvents(lambda size: bool(asked.append(size)), chat=False, shows_ids=True)
    noted.learn(event())
    assert noted.form() is None and noted.form() is None
    assert len(asked) == 1, "and it is not asked for again and again"


def test_notes_are_read_once_and_in_order() -> None:
    noted = NotedEvents(lambda _: True, chat=False, shows_ids=False)
    noted.add(b'[[1],"a"],[[2,3],"\\u00e9"],')
    noted.add(b"")
    noted.note(TokenEvent([4], "\n"))
    want = [TokenEvent([1], "a"), TokenEvent([2, 3], "é"), TokenEvent([4], "\n")]
    assert noted.taken() == want
    assert noted.taken() == []


@pytest.mark.parametrize(
    "odd", [b'[[1],"\\q"],', b'[[1],"\xff"],', b'[[01],"a"],', b'[[4e9],"a"],']
)
def test_notes_of_what_is_no_json_are_an_error(odd: bytes) -> None:
    noted = NotedEvents(lambda _: True, chat=False, shows_ids=False)
    noted.add(odd)
    with pytest.raises(UNREADABLE):
        noted.taken()
