"""The journals of streams: what both kinds have, and which one a stream has. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.apis import COMPLETIONS, Api
from kvconnect.router.requests.body import Body, Prompt
from kvconnect.router.requests.continuation import AfterLoss, StreamTerms, terms_of
from kvconnect.router.requests.event_form import EventForm
from kvconnect.router.requests.journal import StreamJournal
from kvconnect.router.requests.replay import replay_of
from kvconnect.router.requests.replay_journal import ReplayJournal

_OF_VLLM = frozenset(EngineKind) - {EngineKind.SGLANG}


class Journal(Protocol):
    """What is known of a stream, from one engine after another.

    Attributes:
        by_ids: its engines are asked for token ids.
        prevented: why the stream cannot be continued; None: it can be.
        broken: why the engine's stream is no good; empty: it is.
        done: the end of the stream was sent.
    """

    prevented: AfterLoss | None
    broken: str
    done: bool

    @property
    def by_ids(self) -> bool: ...
    @property
    def sent(self) -> int:
        """How much of the stream the client has; grows with it."""

    def next_form(self) -> EventForm | None:
        """See :meth:`StreamJournal.next_form`."""

    def relayed(self, notes: bytes) -> None:
        """See :meth:`StreamJournal.relayed`."""

    def feed(self, chunk: bytes) -> bytes:
        """Take what an engine has sent; return what of it the client gets."""

    def rest(self, body: Body) -> Body | AfterLoss:
        """Return what the next engine is asked, whose events follow, or why none is. ``body``: the
        client's."""

    def can_leave(self, body: Body) -> bool:
        """Return whether the stream shall go on elsewhere if its engine is drained."""

    def doubtful(self) -> array[int]:
        """See :meth:`StreamJournal.doubtful`."""

    def settle(self, text: str) -> None:
        """See :meth:`StreamJournal.settle`."""

    def ending(self) -> bytes | None:
        """Return the rest of a stream whose last token was sent; None: it was not, or the rest is
        not known."""


class Journaled(NamedTuple):
    """A journal, and the API by which another engine is asked for the rest of the stream."""

    journal: Journal
    api: Api


def journal_of(
    kind: EngineKind,
    api: Api,
    body: Body,
    prompt: Prompt,
    take: Callable[[int], bool],
    *,
    context: int | None = None,
) -> Journaled | AfterLoss:
    """Return the journal of a stream of an engine of a kind, or why it has none. ``take``: takes so
    many bytes of memory for it; returns whether they are left. ``context``: see
    :class:`StreamTerms`."""
    ids = terms_of(api, body, prompt, context) if kind in _OF_VLLM else AfterLoss.API
    if isinstance(ids, StreamTerms):
        return Journaled(StreamJournal(ids, take), COMPLETIONS._replace(kinds=_OF_VLLM))
    if ids in (AfterLoss.LOGPROBS, AfterLoss.PROMPTS):  # nor can that be compared
        return ids
    events = replay_of(kind, api, body, prompt)
    if isinstance(events, AfterLoss):
        return events if ids is AfterLoss.API else ids
    alike = _OF_VLLM if kind in _OF_VLLM else frozenset({kind})
    return Journaled(ReplayJournal(events), api._replace(kinds=api.kinds & alike))
