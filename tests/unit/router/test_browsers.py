"""Pages in browsers (CORS): which origins may use a router."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigError
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.options import Listening
from tests.fakes.engine import ASK, Bench, FakeEngine, bench, decodes, on_loop, prefills

PAGE, OTHER = "https://chat.example.org", "https://other.example.org"
KEY = ApiKey("sk-0123456789abcdef")
AUTHORIZED = {"Authorization": f"Bearer {KEY.key}"}


async def preflight(router: Bench, origin: str) -> tuple[int, dict[str, str]]:
    """Ask as a browser does before it sends a page's request; return status and headers."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    url = router.url + "/v1/chat/completions"
    async with router.client.options(url, headers=headers) as answer:
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
@on_loop
async def test_a_page_of_an_allowed_origin_may_ask_and_read(origins: tuple[str, ...]) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    at = Listening(api_keys=(KEY,), allowed_origins=origins)
    async with bench([p], [d], listening=at) as router:
        status, headers = await preflight(router, PAGE)
        assert status == 204, "a browser sends no key beforehand"
        assert headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in headers["access-control-allow-methods"]
        allowed = "*" if origins == ("*",) else PAGE
        assert headers["access-control-allow-origin"] == allowed
        for ask, key, want in (
            (ASK, AUTHORIZED, 200),
            (ASK | {"stream": True}, AUTHORIZED, 200),
            (ASK, {}, 401),
        ):
            answer = await router.post(ask, headers={**key, "Origin": PAGE})
            assert answer.status == want
            assert answer.headers["access-control-allow-origin"] == allowed


@on_loop
async def test_control_pages_of_other_origins_may_not() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], listening=Listening(allowed_origins=(PAGE,))) as router:
        _, headers = await preflight(router, OTHER)
        assert "access-control-allow-origin" not in headers
        assert "access-control-allow-methods" not in headers
        answer = await router.post(ASK, headers={"Origin": OTHER})
        assert answer.status == 200 and "access-control-allow-origin" not in answer.headers
    async with bench([p], [d]) as router:
        status, headers = await preflight(router, PAGE)
        assert status == 405 and "access-control-allow-origin" not in headers


def test_origins_are_what_browsers_send() -> None:
    good = ("*", PAGE, "http://localhost:3000")
    assert Listening(allowed_origins=good).allowed_origins == good
    for wrong in ("chat.example.org", f"{PAGE}/", f"{PAGE},{OTHER}", "https://", ""):
        with pytest.raises(ConfigError, match="allowed-origin"):
            Listening(allowed_origins=(wrong,))
