"""HTTP requests that follow no redirect: it would lead to an address that nobody has checked."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import requests


class DirectSession(requests.Session):
    """A session that takes a redirect for an error, which SGLang logs as a failed request."""

    def resolve_redirects(self, *args: Any, **_: Any) -> Generator[requests.Response, None, None]:
        """Raise :class:`requests.TooManyRedirects` if the answer ``args[0]`` is a redirect."""
        target = self.get_redirect_target(args[0])
        if target:
            raise requests.TooManyRedirects(f"{args[0].url} redirects to {target}: not followed")
        yield from ()


def _ask(method: str, url: str, **options: Any) -> requests.Response:
    with DirectSession() as session:
        return session.request(method, url, **options)


def get(url: str, **options: Any) -> requests.Response:
    """Ask as ``requests.get`` does."""
    return _ask("GET", url, **options)


def put(url: str, **options: Any) -> requests.Response:
    """Ask as ``requests.put`` does."""
    return _ask("PUT", url, **options)


def post(url: str, **options: Any) -> requests.Response:
    """Ask as ``requests.post`` does."""
    return _ask("POST", url, **options)


def install(module: Any) -> None:
    """Have a module of SGLang ask in this way. It uses these parts of ``requests``."""
    module.requests = SimpleNamespace(
        Session=DirectSession, adapters=requests.adapters, get=get, put=put, post=post
    )
