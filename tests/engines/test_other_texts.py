"""Prefill and decode make other tokens of one text, by their chat templates or their tokenizers:
the hand-off is refused with both values, and the router hands over prefill's tokens instead."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.models import model_dir
from tests.engines.pd import (
    assert_quiet,
    decode_config,
    one_clean_error,
    prefill_config,
    push_params,
    received_bytes,
    refused,
    side_by_side,
    standing_ticket,
)
from tests.engines.ranks import until
from tests.engines.server import Client, Router, Server

NEW = 8
TEXT = "Say something about the sea, and about the wind. " * 8
Body = dict[str, Any]
CHAT: Body = {"messages": [{"role": "user", "content": TEXT}]}
COMPLETION: Body = {"prompt": TEXT}


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}Other: {{ message['content'] }}{% endfor %}"
    )


def other_tokenizer(folder: Path) -> None:
    """Exchange the ids of two tokens of the text, so that prompts keep their length."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = "Ġse", "Ġw"
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(tokenizer))


class Fleet(NamedTuple):
    prefill: Server
    decode: dict[str, Server]
    routers: dict[str, Router]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    decode, p = {}, Server("llama", prefill_config())
    for name, change in {"template": other_template, "tokenizer": other_tokenizer}.items():
        folder = tmp_path_factory.mktemp(name) / model_dir("llama").name
        shutil.copytree(model_dir("llama"), folder)
        change(folder)
        decode[name] = Server("llama", decode_config(), args=("--model", str(folder)))
    with (
        side_by_side(p, *decode.values()),
        Router([p], [decode["template"]]) as template,
        Router([p], [decode["tokenizer"]]) as tokenizer,
    ):
        yield Fleet(p, decode, {"template": template, "tokenizer": tokenizer})


def tokens(server: Client, body: Body, **extra: Any) -> list[int]:
    return list(ask(server, body, NEW, **extra)["choices"][0]["token_ids"])


def ask(server: Client, body: Body, new: int, **extra: Any) -> Body:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer: Body = json.loads(server.post(path, {**server.body([], new), **body, **extra}))
    return answer


CASES = pytest.mark.parametrize(
    ("other", "body"),
    [("template", CHAT), ("tokenizer", CHAT), ("tokenizer", COMPLETION)],
    ids=["template", "tokenizer, chat", "tokenizer, completion"],
)


@CASES
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_other_tokens_of_one_text_are_refused_with_both_values(
    mode: str, other: str, body: Body, fleet: Fleet
) -> None:
    p, d = fleet.prefill, fleet.decode[other]
    transfer = secrets.token_hex(16)
    before = refused(p, "prompt"), received_bytes(d), failures(d)
    wanted = {"do_remote_decode": True, "transfer_id": transfer}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, p, body, 1, kv_transfer_params=wanted)
        if mode == "pull":
            params = first.result()["kv_transfer_params"]
        else:
            params = push_params(transfer, standing_ticket(p))
        with one_clean_error():
            ask(d, body, NEW, kv_transfer_params=params)
        usage = first.result()["usage"]
    p.settle()
    d.settle()
    assert (refused(p, "prompt"), failures(d)) == (before[0] + 1, before[2] + 1)
    assert received_bytes(d) == before[1]
    for log in (p.log.read_text(), d.log.read_text()):
        said = [line for line in log.splitlines() if "the prompts differ" in line][-1]
        assert "token ids" in said and f"prefill has {usage['prompt_tokens']} tokens" in said
        assert "decode has" in said
    assert_quiet(p, d)


def test_the_router_hands_over_the_tokens_of_prefill(fleet: Fleet) -> None:
    d, router = fleet.decode["template"], fleet.routers["template"]
    alone = tokens(fleet.prefill, CHAT)
    assert tokens(d, CHAT) != alone, "control: decode alone reads another prompt"
    until(
        lambda: router.metric("kvconnect_router_standing_ticket_fetches_total", outcome="ok") > 0,
        "a standing ticket",
    )
    before = received_bytes(d), refused(fleet.prefill, "prompt")
    assert tokens(router, CHAT) == alone
    d.settle()
    assert received_bytes(d) > before[0] and refused(fleet.prefill, "prompt") == before[1] + 1


def failures(d: Server) -> float:
    return d.metric("vllm:kvconnect_handoff_failures_total", cause="prompt")
