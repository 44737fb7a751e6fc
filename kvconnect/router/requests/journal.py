"""The journal of a stream: what another engine needs to continue it after the last token that the
client has. Pure.

A stream passes through :meth:`StreamJournal.feed`, in whole events. After the engine was lost,
:meth:`StreamJournal.resume` says what the next one has to continue, and that one's events pass
through ``feed`` as events of the same stream.

Most events pass through native code, which notes their text and tokens (``event_form.py``). Notes
are journaled when somebody asks for what they say, or another event follows; so those of a stream
that ends well are never read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from kvconnect.router.requests import event_form, stream_events, text_ends
from kvconnect.router.requests.body import Body
from kvconnect.router.requests.continuation import (
    AfterLoss,
    StreamTerms,
    continuation_body,
    tokens_left,
)
from kvconnect.router.requests.event_form import EventForm, NotedEvents, TokenEvent
from kvconnect.router.requests.sent_text import SentText
from kvconnect.router.requests.stream_events import (
    DONE,
    END,
    EventPart,
    StreamChoice,
    StreamEvent,
    StreamHead,
)
from kvconnect.router.requests.whole_events import WholeEvents

_FOREIGN = "sent an event that is none of vLLM's"
_ITEM = array("i").itemsize
_OF_TEXT = {"role", "content"}  # what a chat's event has without tools and reasoning
_TAIL = 32  # tokens that show whether their text ends within a character
_BLOCK = 1024  # tokens whose memory is taken at a time


class Delivered(NamedTuple):
    """Token ids of a prompt, and of the part of its answer that is not generated again."""

    prompt: array[int]
    generated: array[int]


class StreamJournal:
    """The journal of one stream. See :class:`Journal` for what others use of it.

    Attributes:
        prevented: why the stream cannot be continued; None: it can be.
        broken: why the engine's stream is no good; empty: it is.
        finished: the answer's last token was sent.
        done: so was the end of the stream.
    """

    by_ids = True

    def __init__(self, terms: StreamTerms, take: Callable[[int], bool]) -> None:
        """``take``: takes so many bytes of memory for the tokens; returns whether they are left."""
        self._terms, self._take = terms, take
        self.prevented: AfterLoss | None = None
        self.broken = ""
        self.finished = self.done = False
        self._events = WholeEvents()
        self._head: StreamHead | None = None  # of the first engine's events
        self._prompt, self._ids = array("i"), array("i")
        self._room = 0  # tokens whose memory is taken
        before = text_ends.MOST_COMPARED if terms.chat else 0
        self._text = SentText(held=terms.held, reach=terms.reach, before=before)
        self._usage_sent = False
        self._noted = NotedEvents(take, chat=terms.chat, shows_ids=terms.shows_ids)
        # Of the engine that continues the stream:
        self._resumed = False
        self._again = array("i")  # ids that the client has and this engine must repeat

    def feed(self, chunk: bytes) -> bytes:
        """Take what an engine has sent; return what of it the client gets."""
        passed = []
        for event in self._events.of(chunk):
            if self.broken:
                break
            passed.append(self._event(event))
        if self._events.too_long:
            self._break("sent an event over the size limit")
        return b"".join(passed)

    def next_form(self) -> EventForm | None:
        """Return what native code can pass on next; None: nothing. :meth:`relayed` follows."""
        if self._events.cut or self._resumed or self.finished or self.broken or self.prevented:
            return None
        return self._noted.form()

    def relayed(self, notes: bytes) -> None:
        """Take the notes of events that native code has passed on."""
        self._noted.add(notes)

    @property
    def sent(self) -> int:
        """Characters of the answer that the client has."""
        self._catch_up()
        return self._text.sent

    def can_leave(self, body: Body) -> bool:
        """Return whether :meth:`rest` would tell it, from the best place on, and there is anything
        to continue."""
        self._catch_up()
        usable = self._text.usable()
        known = self._head is not None and self._prompt and usable and usable[-1].sure
        if not known or self.finished or self.broken or self.prevented:
            return False
        return tokens_left(body, self._terms, len(self._prompt), len(self._ids)) > 0

    def rest(self, body: Body) -> Body | AfterLoss:
        """Return what the next engine is asked, or why none is."""
        delivered = self.resume()
        if delivered is None:
            return self.prevented or AfterLoss.IDS
        found = continuation_body(body, self._terms, delivered.prompt, delivered.generated)
        return AfterLoss.LENGTH if found is None else found

    def resume(self) -> Delivered | None:
        """Return what the next engine has to continue, whose events follow; None, and why in
        ``prevented``, if it cannot be told."""
        self._catch_up()
        if self._head is None or not self._prompt:
            self._prevent(AfterLoss.IDS)
        place = next((place for place in reversed(self._text.usable()) if place.sure), None)
        if place is None:
            self._prevent(AfterLoss.TEXT)
        if self.prevented is not None or place is None:
            return None
        # An engine that was lost before it had repeated all leaves the rest.
        repeated = self._ids[place.tokens :] + self._again
        self._again = repeated if self._terms.shows_ids else array("i")
        del self._ids[place.tokens :]
        self._text.go_on(place)
        self._events, self.broken, self._resumed = WholeEvents(), "", True
        return Delivered(self._prompt, self._ids)

    def doubtful(self) -> array[int]:
        """Return the last tokens before the best place to continue at, if it is not sure that text
        ends there, else none. :meth:`settle` may follow."""
        self._catch_up()
        over = self.prevented is not None or self.finished
        usable = [] if over else self._text.usable()
        if not usable or usable[-1].sure:
            return array("i")
        end = usable[-1].tokens
        return self._ids[max(0, end - _TAIL) : end]

    def settle(self, text: str) -> None:
        """Say what the text of the tokens of :meth:`doubtful` is. If the client's does not end as
        it does, another place may follow."""
        sure = text_ends.whole(text)
        if self._terms.chat:
            sure = sure and text_ends.alike(self._text.last(), text)
        self._text.settle(sure=sure)

    def ending(self) -> bytes | None:
        """Return the rest of a stream whose last token was sent; None: it was not, or the tokens
        that ``usage`` counts are not known."""
        if not self.finished:
            return None
        self._catch_up()
        usage = b""
        if self._terms.usage and not self._usage_sent and self._head is not None:
            if self.prevented is not None:
                return None
            usage = stream_events.usage_event(self._head, self._part(""), chat=self._terms.chat)
        return usage + DONE + END

    def _event(self, event: bytes) -> bytes:
        """Return what of an event the client gets, with its end."""
        read = stream_events.read(event)
        if read is None:
            return self._unread(event)
        if error := stream_events.error_of(read):
            if self.prevented is None and (error.code is None or error.code >= 500):
                self._break(error.message or "reported an error")
                return b""
            self._prevent(AfterLoss.FAILED)
            return event + END
        if self._resumed:
            return self._of_next(event, read)
        if self.prevented is None:
            self._note(event, read)
            if self.broken:
                return b""
        if self._terms.shows_ids:
            return event + END
        if self._terms.chat and _shows_nothing(read):  # it came because of the ids
            return b""
        return stream_events.without_ids(event) + END

    def _unread(self, event: bytes) -> bytes:
        """Return an event without content that can be read."""
        if event == DONE:
            self.done = True
        elif event.startswith(stream_events.DATA):
            self._prevent(AfterLoss.IDS)
            if self._resumed:
                self._break(_FOREIGN)
                return b""
        return event + END

    def _note(self, event: bytes, read: StreamEvent) -> None:
        """Journal an event of the first engine."""
        if self._head is None:
            self._head = StreamHead(read.id, read.created, read.model)
        if not read.choices:
            self._usage_sent = True
            return
        choice = read.choices[0]
        if choice.finish_reason == "abort":
            self._break("ended the request")
            return
        prompt = read.prompt_token_ids or choice.prompt_token_ids
        if prompt and not self._prompt:
            self._note_prompt(prompt)
        if self.prevented is not None or (self._terms.chat and _tells_role(choice)):
            return
        text = _chat_text(choice) if self._terms.chat else choice.text
        if choice.token_ids is None or text is None:
            self._prevent(AfterLoss.PARSER if self._terms.chat and text is None else AfterLoss.IDS)
            return
        said = TokenEvent(choice.token_ids, text)
        if choice.finish_reason is not None:
            self._noted.note(said)
            self.finished = True
            return
        self._catch_up()
        self._journal(said)
        if text and said.token_ids and not prompt:
            self._noted.learn(event)

    def _note_prompt(self, prompt: list[int]) -> None:
        if self._take(_ITEM * len(prompt)):
            self._prompt = array("i", prompt)
        else:
            self._prevent(AfterLoss.MEMORY)

    def _journal(self, said: TokenEvent) -> None:
        """Journal what the first engine has said."""
        self._text.new(said.text)
        self._add(said)

    def _catch_up(self) -> None:
        """Journal the events of which there are notes."""
        if self.prevented is not None:
            return
        try:
            for said in self._noted.taken():
                self._journal(said)
        except event_form.UNREADABLE:
            self._prevent(AfterLoss.IDS)

    def _of_next(self, event: bytes, read: StreamEvent) -> bytes:
        """Return an event of the engine that continues the stream, as one of the stream."""
        chat, text, ids = self._terms.chat, "", None
        finished = False
        if read.choices:
            choice = read.choices[0]
            finished = choice.finish_reason is not None
            if choice.finish_reason == "abort":
                self._break("ended the request")
                return b""
            if choice.token_ids is None or choice.text is None:
                self._prevent(AfterLoss.IDS)
                self._break("sent no token ids")
                return b""
            said = TokenEvent(choice.token_ids, choice.text)
            ids = self._new_ids(said.token_ids)
            new = None
            if ids is None:
                self._break("continued with other tokens than those that were sent")
            elif finished and self._misses(said):
                self._break("ended before all that was sent had come again")
            elif (new := self._text.new(said.text)) is None:
                self._break("continued with another text than the one that was sent")
            if new is None:
                return b""
            text = new
            del self._again[: len(said.token_ids)]
            self._add(said)
            if not (text or ids or finished):  # the client has it
                return b""
            ids = ids if self._terms.shows_ids else None
        else:
            self._usage_sent = True
        assert self._head is not None, "resume() came first"
        try:
            made = stream_events.continued(event, self._head, self._part(text, ids), chat=chat)
        except ValueError:
            self._prevent(AfterLoss.IDS)  # its text counts as sent
            self._break(_FOREIGN)
            return b""
        self.finished = self.finished or finished
        return made

    def _new_ids(self, ids: list[int]) -> list[int] | None:
        """Return those that the client does not have; None: what it has were others."""
        known = min(len(ids), len(self._again))
        return ids[known:] if ids[:known] == self._again[:known].tolist() else None

    def _misses(self, last: TokenEvent) -> bool:
        """Return whether a continuation with this end lacks anything that the client has."""
        return self._text.lacks(last.text) or len(self._again) > len(last.token_ids)

    def _add(self, said: TokenEvent) -> None:
        """Note an event's tokens, and where they end in the text."""
        ids = said.token_ids
        if len(self._ids) + len(ids) > self._room:
            self._room += max(_BLOCK, len(ids))
            if not self._take(_ITEM * max(_BLOCK, len(ids))):
                self._prevent(AfterLoss.MEMORY)
                return
        self._ids.extend(ids)
        if said.text:
            parsed = self._terms.chat and not self._resumed
            self._text.ends(len(self._ids), sure=len(ids) == 1 and not parsed)
        self._text.forget()

    def _part(self, text: str, ids: list[int] | None = None) -> EventPart:
        return EventPart(text, ids, len(self._prompt), len(self._ids))

    def _break(self, why: str) -> None:
        self.broken = self.broken or why

    def _prevent(self, why: AfterLoss) -> None:
        """Give up the journal, and its memory."""
        self.prevented = self.prevented or why
        self._prompt, self._ids = array("i"), array("i")
        self._text = SentText(held=0, reach=0)


def _tells_role(choice: StreamChoice) -> bool:
    """Whether an event of a chat has only the role of who speaks."""
    delta = choice.delta or {}
    return bool(delta.get("role") and choice.token_ids is None and not delta.get("content"))


def _chat_text(choice: StreamChoice) -> str | None:
    """Return the text of an event of a chat; None if there is anything else, or none."""
    delta = choice.delta or {}
    if any(delta[name] is not None for name in delta.keys() - _OF_TEXT):
        return None
    return delta.get("content")


def _shows_nothing(read: StreamEvent) -> bool:
    """Whether an event of a chat has only token ids, which vLLM sends only if asked for them."""
    return (
        len(read.choices) == 1
        and not read.choices[0].delta
        and (read.choices[0].finish_reason is None and not read.prompt_token_ids)
    )
