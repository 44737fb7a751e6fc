"""What real engines serve beside completions, asked for by the official clients: through a router
the same as from one engine alone."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.engines.pd import decode_config, prefill_config, received_bytes, side_by_side
from tests.engines.ranks import until
from tests.engines.server import Client, Router, Server

NEW = 8
TEXT = "Say something about the sea, and about the wind. " * 12
TURN = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0}
_CLIENT: Any = {
    "api_key": "any",
    "max_retries": 0,
    "timeout": 120,
    "default_headers": {"Connection": "close"},
}
_OPENAI = openai.OpenAI(**_CLIENT)  # each new one reads the system's certificates
_ANTHROPIC = anthropic.Anthropic(**_CLIENT)


def responses(url: str, model: str = "model", stream: bool = False) -> str:
    asked: Any = {"model": model, "input": TEXT, "max_output_tokens": NEW, **GREEDY}
    client = _OPENAI.with_options(base_url=f"{url}/v1")
    answer: Any = client.responses.create(**asked, stream=stream)
    if not stream:
        return str(answer.output_text)
    return "".join(e.delta for e in answer if e.type == "response.output_text.delta")


def messages(url: str, model: str = "model", stream: bool = False) -> str:
    # Anthropic's own models take no temperature any more.
    asked: Any = {"model": model, "messages": TURN, "max_tokens": NEW, "extra_body": GREEDY}
    client = _ANTHROPIC.with_options(base_url=url)
    answer: Any = client.messages.create(**asked, stream=stream)
    if not stream:
        return "".join(part.text for part in answer.content)
    return "".join(e.delta.text for e in answer if e.type == "content_block_delta")


def chat(url: str, model: str = "model", stream: bool = False) -> str:
    asked: Any = {"model": model, "messages": TURN, "max_tokens": NEW, **GREEDY}
    client = _OPENAI.with_options(base_url=f"{url}/v1")
    answer: Any = client.chat.completions.create(**asked, stream=stream)
    if not stream:
        return str(answer.choices[0].message.content)
    return "".join(e.choices[0].delta.content or "" for e in answer)


Ask = Callable[..., str]
APIS = pytest.mark.parametrize("ask", [responses, messages, chat])


class Fleet(NamedTuple):
    prefill: Server
    decode: Server
    routers: dict[str, Router]

    @property
    def router(self) -> Router:
        return self.routers["push"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    p, d = Server("llama", prefill_config()), Server("llama", decode_config())
    with (
        offers_nothing() as bad,
        side_by_side(p, d),
        Router([p], [d]) as push,
        Router([p], [d], ("--pull",)) as pull,
        Router([bad], [d]) as broken,
    ):
        until(lambda: count(push, "standing_ticket_fetches", outcome="ok") > 0, "a standing ticket")
        yield Fleet(p, d, {"push": push, "pull": pull, "broken": broken})


def count(router: Router, name: str, **labels: str) -> float:
    return router.metric(f"kvconnect_router_{name}_total", **labels)


@APIS
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_every_api_is_handed_over(ask: Ask, mode: str, fleet: Fleet) -> None:
    router, texts = fleet.routers[mode], list[str]()
    for stream in (False, True):
        fleet.decode.post("/reset_prefix_cache")
        before, done = received_bytes(fleet.decode), count(router, "requests", mode=mode)
        texts.append(ask(router.url, stream=stream))
        until(lambda done=done: count(router, "requests", mode=mode) == done + 1, "its count")
        fleet.decode.settle()
        assert received_bytes(fleet.decode) > before, "the KV came from the prefill engine"
    assert texts[0] and texts == [ask(fleet.prefill.url)] * 2


def test_chats_are_tokenized_once(fleet: Fleet, tmp_path: Path) -> None:
    """The decode engine's template would make another prompt of a chat."""
    template = tmp_path / "other.jinja"
    template.write_text("{% for turn in messages %}Other: {{ turn['content'] }}{% endfor %}")
    d = Server("llama", decode_config(), args=("--chat-template", str(template)))
    with d, Router([fleet.prefill], [d], ("--pull",)) as router:
        assert chat(router.url) == chat(router.url, stream=True) == chat(fleet.prefill.url)
        assert chat(d.url) != chat(fleet.prefill.url)
        assert received_bytes(d) > 0
        # vLLM takes no token ids with the ticket of a message: its ticket is for another prompt.
        with pytest.raises(anthropic.APIStatusError):
            messages(router.url)


@APIS
@pytest.mark.parametrize("stream", [False, True])
def test_a_hand_off_that_fails_is_an_error_before_any_stream(
    ask: Ask, stream: bool, fleet: Fleet
) -> None:
    """vLLM tells it within a stream that has begun, but for Responses, whose stream it breaks."""
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as failed:
        ask(fleet.routers["broken"].url, stream=stream)
    assert vars(failed.value)["status_code"] == (502 if stream and ask is responses else 500)


@contextmanager
def offers_nothing() -> Iterator[Any]:
    """Serve as a prefill engine whose tickets are worth nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/health": {}, "/v1/models": {"data": [{"id": "model"}]}}
            self._say(200 if self.path in known else 404, known.get(self.path))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            params = {"do_remote_prefill": True, "transfer_id": "0" * 32, "kvconnect_ticket": "x"}
            self._say(200, {"kv_transfer_params": params})

        def _say(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield SimpleNamespace(worker=f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": "model", "prompt": "the sea"}),
        ("/detokenize", {"model": "model", "tokens": [5, 6, 7]}),
        ("/v1/messages/count_tokens", {"model": "model", "messages": TURN}),
        ("/v1/embeddings", {"model": "model", "input": "the sea"}),  # not of this model
        ("/version", None),
        ("/load", None),
    ],
)
def test_what_is_not_handed_over_is_passed_on(
    path: str, body: dict[str, Any] | None, fleet: Fleet
) -> None:
    assert answer(fleet.router, path, body) == answer(fleet.decode, path, body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize"])
def test_a_model_that_nobody_serves_is_not_found(path: str, fleet: Fleet) -> None:
    status, told = answer(fleet.router, path, {"model": "nobody's", "prompt": "a"})
    assert (status, told["error"]["type"]) == (404, "NotFoundError")
    assert "`nobody's` does not exist" in told["error"]["message"]


@APIS
def test_clients_know_that_a_model_is_not_found(ask: Ask, fleet: Fleet) -> None:
    for url in (fleet.router.url, fleet.decode.url):
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError), match="does not exist"):
            ask(url, model="nobody's")


def answer(server: Client, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    """Return status and body; of a GET, if nothing is to be sent."""
    try:
        if body is not None:
            return 200, json.loads(server.post(path, body))
        with urllib.request.urlopen(server.url + path, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
