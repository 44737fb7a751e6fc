"""Servers that read one text as two prompts: another chat template, another tokenizer."""

from __future__ import annotations

import json
import re
import shutil
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.models import model_dir, prompt_tokens
from tests.engines.server import Client, Router
from tests.sglang.pd import decode_server, prefill_server, room, side_by_side
from tests.sglang.scenario import NEW, assert_quiet
from tests.sglang.server import SglangServer

TEMPLATE = "{% for message in messages %}{{ message.content }} and more{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "What is a cache, and what is it good for?"}]}
TEXT = {"prompt": "A cache keeps what was computed once, and gives it back when it is asked for."}
IDS = {"prompt": prompt_tokens(60)}
DIFFERENCE = re.compile(
    r"the prompts differ in their token ids: prefill has (\d+) tokens .*decode has (\d+) tokens"
)


class Servers(NamedTuple):
    p: SglangServer
    template: SglangServer
    tokenizer: SglangServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = tmp_path_factory.mktemp("other")
    (made / "other.jinja").write_text(TEMPLATE)
    files = made / "tokenizer"
    shutil.copytree(model_dir("llama"), files)
    with_fewer_merges(files / "tokenizer.json")
    p = prefill_server(texts=True)
    template = decode_server(texts=True, args=("--chat-template", str(made / "other.jinja")))
    tokenizer = decode_server(texts=True, args=("--tokenizer-path", str(files)))
    with side_by_side(p, template, tokenizer):
        yield Servers(p, template, tokenizer)


def with_fewer_merges(path: Path) -> None:
    found = json.loads(path.read_text())
    merges = found["model"]["merges"]
    found["model"]["merges"] = merges[: len(merges) // 2]
    path.write_text(json.dumps(found))


def ask(client: Client, path: str, body: dict[str, Any]) -> str:
    """Return the text of an answer, or of an error."""
    sampling = {"model": "model", "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    try:
        with client.open(path, {**sampling, **body}) as reply:
            (choice,) = json.load(reply)["choices"]
            return str(choice.get("text") or choice["message"]["content"])
    except urllib.error.HTTPError as error:
        assert error.code >= 500
        return error.read().decode()


def hand_off(p: SglangServer, d: SglangServer, path: str, body: dict[str, Any]) -> list[str]:
    """Return what prefill and decode answer."""
    meeting = {**body, **room(p)}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, p, path, meeting)
        second = ask(d, path, meeting)
        return [first.result(), second]


CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    # Of each server: what it reads differently, and what it does not.
    "template": ("/v1/chat/completions", CHAT, "/v1/completions", TEXT),
    "tokenizer": ("/v1/completions", TEXT, "/v1/completions", IDS),
}


@pytest.mark.parametrize("case", CASES)
def test_another_reading_is_refused_at_once_with_both_values(servers: Servers, case: str) -> None:
    p, d = servers.p, getattr(servers, case)
    path, body, same_path, same = CASES[case]
    assert not any(DIFFERENCE.search(each) for each in hand_off(p, d, same_path, same)), "control"
    for said in hand_off(p, d, path, body):
        found = DIFFERENCE.search(said)
        assert found and found[1] != found[2], said
    for log in (p.tail(1 << 20), d.tail(1 << 20)):
        assert DIFFERENCE.search(log)
    assert not any(DIFFERENCE.search(each) for each in hand_off(p, d, same_path, same))
    assert_quiet(p, d)


def test_the_router_says_how_they_differ(servers: Servers) -> None:
    p, d = servers.p, servers.template
    with Router([p], [d]) as router:
        assert not DIFFERENCE.search(ask(router, "/v1/completions", TEXT)), "control"
        assert DIFFERENCE.search(ask(router, "/v1/chat/completions", CHAT))
    assert_quiet(p, d)
