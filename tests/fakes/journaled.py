"""A client's stream through a journal, from one engine after another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.router.requests.apis import APIS
from kvconnect.router.requests.body import prompt_of
from kvconnect.router.requests.continuation import (
    AfterLoss,
    StreamTerms,
    continuation_body,
    terms_of,
)
from kvconnect.router.requests.journal import Delivered, StreamJournal
from tests.fakes.token_model import TOKENS, TokenModel, text_of_ids


def parsed(asked: dict[str, Any]) -> dict[str, Raw]:
    return {name: Raw(json.dumps(value).encode()) for name, value in asked.items()}


def terms(asked: dict[str, Any]) -> StreamTerms | AfterLoss:
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    api = next(api for api in APIS if api.path == path)
    body = parsed(asked)
    return terms_of(api, body, prompt_of(body), 4096)


class Continued:
    """A client's stream through a journal, from one engine after another."""

    def __init__(
        self,
        asked: dict[str, Any],
        memory: int = 1 << 30,
        *,
        tokens: Sequence[bytes] = TOKENS,
        answers: bool = True,
    ) -> None:
        """``answers``: another engine says what the text of tokens is."""
        found = terms(asked)
        assert isinstance(found, StreamTerms), found
        self.asked, self.terms, self.memory = asked, found, memory
        self.journal = StreamJournal(found, self._take)
        self.got = b""
        self.tokens, self.answers = tokens, answers

    def _take(self, size: int) -> bool:
        self.memory -= size
        return self.memory >= 0

    def feed(self, chunks: Sequence[bytes]) -> None:
        for chunk in chunks:
            self.got += self.journal.feed(chunk)

    def resumed(self) -> dict[str, Any]:
        """Return what the next engine is asked."""
        while self.answers and self.terms.chat and (tail := self.journal.doubtful()):
            self.journal.settle(text_of_ids(tail, self.tokens))
        delivered = self.journal.resume()
        assert delivered is not None, self.journal.prevented
        return self.body(delivered)

    def body(self, delivered: Delivered) -> dict[str, Any]:
        made = continuation_body(parsed(self.asked), self.terms, *delivered)
        assert made is not None
        return dict(json.loads(msgspec.json.encode(made))) | {"return_token_ids": True}

    def go_on(self, model: TokenModel) -> None:
        """Have another engine continue it to its end."""
        ending = self.journal.ending()
        if ending is not None:
            self.got += b"" if self.journal.done else ending
        else:
            self.feed(list(model.events(self.resumed())))
            assert not self.journal.broken


def streamed(asked: dict[str, Any], model: TokenModel) -> list[bytes]:
    """Return the events of an engine that is asked for ids too."""
    return list(model.events(asked | {"return_token_ids": True}))
