"""The engines behind the router: which are up, and the cards of those that prefill.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import aiohttp

from kvconnect.errors import Refused
from kvconnect.router import legs
from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.options import Options
from kvconnect.router.view import Role, UpstreamView, View

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 2.0
PROBE_FIRST_S = 0.5  # after an engine went down; doubles
PROBE_SELDOM_S = 8.0  # and stays there: an engine is never given up
CARD_RETRY_S = 5.0
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_ASK_TIMEOUT = aiohttp.ClientTimeout(total=30.0)  # a card queues behind real prefills
_CARD_AGE = 0.5  # share of its lifetime after which a card is renewed

_FAILED = (aiohttp.ClientError, asyncio.TimeoutError, Refused)


class Upstream:
    """One engine, as last seen. Down until the first probe says otherwise."""

    def __init__(self, role: Role, index: int, url: str, metrics: RouterMetrics) -> None:
        self.role = role
        self.index = index
        self.url = url
        self._metrics = metrics
        self._card = ""
        self._card_ends = 0.0
        self._is_up = asyncio.Event()
        self._is_down = asyncio.Event()
        self._suspected = asyncio.Event()
        self._is_down.set()

    @property
    def up(self) -> bool:
        """Whether requests may go there."""
        return self._is_up.is_set()

    @property
    def card(self) -> str | None:
        """Its standing offer to decode engines, None if there is none that holds."""
        return self._card if time.monotonic() < self._card_ends else None

    def view(self) -> UpstreamView:
        """Return it as policies see it."""
        return UpstreamView(self.index, self.up, self.card)

    def mark(self, *, up: bool) -> None:
        """It was found up or down."""
        if up == self.up:
            return
        logger.info("%s engine %s is %s", self.role.value, self.url, "up" if up else "down")
        self._metrics.up(self.role, self.url, up=up)
        if up:
            self._is_down.clear()
            self._is_up.set()
        else:
            self._card_ends = 0.0  # what comes back may be another incarnation
            self._is_up.clear()
            self._is_down.set()
            self.suspect()

    def suspect(self) -> None:
        """Something went wrong with it: have it probed at once."""
        self._suspected.set()

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Ask it whether it is well, and mark it."""
        try:
            async with session.get(f"{self.url}/health", timeout=PROBE_TIMEOUT) as answer:
                self.mark(up=answer.status == 200)
        except _FAILED as error:
            logger.debug("probe of %s: %r", self.url, error)
            self.mark(up=False)

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Probe it for ever."""
        back_off = PROBE_FIRST_S
        while True:
            if self.up:
                pause, back_off = PROBE_EVERY_S, PROBE_FIRST_S
            else:
                pause, back_off = back_off, min(2 * back_off, PROBE_SELDOM_S)
            await _wait(self._suspected, pause)
            self._suspected.clear()
            await self.probe(session)

    async def keep_card(self, session: aiohttp.ClientSession) -> None:
        """Hold a fresh card for ever: renewed early, and at once when the engine comes back."""
        while True:
            await self._is_up.wait()
            asked = time.monotonic()
            try:
                card = await self._fetch_card(session)
            except _FAILED as error:
                logger.warning("no card from %s, its KV is pulled: %s", self.url, error or "late")
                self._metrics.card(self.url, fetched=False)
                pause = CARD_RETRY_S
            else:
                self._metrics.card(self.url, fetched=True)
                pause = card.lifetime_s * _CARD_AGE
                if self.up:
                    self._card, self._card_ends = card.text, asked + card.lifetime_s
            await _wait(self._is_down, pause)

    async def get(self, session: aiohttp.ClientSession, path: str) -> bytes:
        """Return what it answers to a GET.

        Raises:
            Refused: not with 200.
            aiohttp.ClientError, asyncio.TimeoutError: no answer.
        """
        async with session.get(self.url + path, timeout=_ASK_TIMEOUT) as answer:
            return await _body_of(answer)

    async def _fetch_card(self, session: aiohttp.ClientSession) -> legs.Card:
        model = legs.model_of(await self.get(session, "/v1/models"))
        url = f"{self.url}/v1/completions"
        async with session.post(url, json=legs.card_body(model), timeout=_ASK_TIMEOUT) as answer:
            return legs.card_of(await _body_of(answer))


class Fleet:
    """All engines of one router."""

    def __init__(self, options: Options, metrics: RouterMetrics) -> None:
        self.prefill = _upstreams(Role.PREFILL, options.prefill, metrics)
        self.decode = _upstreams(Role.DECODE, options.decode, metrics)
        self._tasks: list[asyncio.Task[None]] = []

    def view(self) -> View:
        """Return all of them as policies see them."""
        return View(
            tuple(upstream.view() for upstream in self.prefill),
            tuple(upstream.view() for upstream in self.decode),
        )

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Probe each once, then go on in the background."""
        both = (*self.prefill, *self.decode)
        await asyncio.gather(*(upstream.probe(session) for upstream in both))
        forever = [
            *(upstream.watch(session) for upstream in both),
            *(upstream.keep_card(session) for upstream in self.prefill),
        ]
        self._tasks = [asyncio.create_task(work) for work in forever]

    async def stop(self) -> None:
        """End the background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _upstreams(role: Role, urls: Sequence[str], metrics: RouterMetrics) -> tuple[Upstream, ...]:
    return tuple(Upstream(role, index, url, metrics) for index, url in enumerate(urls))


async def _body_of(answer: aiohttp.ClientResponse) -> bytes:
    if answer.status != 200:
        raise Refused("answer", f"{answer.url.path} answered {answer.status}")
    return await answer.read()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for ``event``, at most ``timeout_s`` seconds. Unlike ``asyncio.wait_for`` of Python
    3.11 and before, it never swallows a cancellation that comes with the event."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=timeout_s)
    finally:
        waiting.cancel()
