"""Prefill and decode servers for tests: both are asked at the same time, as a router does."""

from __future__ import annotations

import secrets
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.engines.models import model_dir
from tests.engines.server import Answer
from tests.sglang.server import SglangServer

LAYERWISE = {"KVCONNECT_LAYERWISE": "1"}


def prefill_server(**arguments: Any) -> SglangServer:
    """Return a prefill server, not started. Arguments are those of :class:`SglangServer`."""
    return SglangServer(**{"role": "prefill", "settings": {"transport": "auto"}, **arguments})


def decode_server(transport: str = "tcp", **arguments: Any) -> SglangServer:
    """Return a decode server that asks for its pages over ``transport``, not started."""
    return SglangServer(**{"role": "decode", "settings": {"transport": transport}, **arguments})


@contextmanager
def side_by_side(*servers: SglangServer) -> Iterator[None]:
    """Start servers at the same time; if one does not come up, stop all and raise its error."""
    for model in {server.model for server in servers}:
        model_dir(model)  # once, not by all of them
    with ExitStack() as stack:
        stack.callback(_at_once, _end, servers)
        _at_once(SglangServer.__enter__, servers)
        yield


def _at_once(work: Callable[[SglangServer], object], servers: Sequence[SglangServer]) -> None:
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(work, servers))


def _end(server: SglangServer) -> None:
    if server in SglangServer.running:
        server.__exit__(None, None, None)


def room(p: SglangServer) -> dict[str, Any]:
    """Return what both halves of a request are told: where they meet, and in which room."""
    return {
        "bootstrap_host": p.address,
        "bootstrap_port": p.bootstrap_port,
        "bootstrap_room": secrets.randbits(63),
    }


def ask(p: SglangServer, d: SglangServer, prompt: list[int], new: int, **extra: Any) -> Answer:
    """Return the decode server's answer to a prompt that the prefill server computes.

    Raises:
        urllib.error.HTTPError: the decode server's, or if that has none the prefill server's.
    """
    meeting = {**room(p), **extra}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(p.complete, prompt, new, **meeting)
        try:
            answer = d.complete(prompt, new, **meeting)
        except BaseException:
            second = first.exception()
            if isinstance(second, urllib.error.HTTPError):
                second.close()
            raise
        first.result()
        return answer


def ask_all(
    p: SglangServer, d: SglangServer, prompts: Sequence[list[int]], new: int, crowd: int
) -> list[Answer]:
    """Ask for all prompts, ``crowd`` of them at a time."""
    with ThreadPoolExecutor(crowd) as pool:
        return list(pool.map(lambda prompt: ask(p, d, prompt, new), prompts))
