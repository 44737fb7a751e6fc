"""``tests/pasted.py``: what it takes for a failure. Pages are run in ``tests/engines`` and
``tests/sglang``; here are the blocks that need no engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import Block, commands_of
from tests.pasted import NOT_RUN, PAGES, PastedFailed, Reader, counts, port_of, prints, steps

TRIED = "cold 1,940.2 ms 3 new prompts, median\nverdict ok: tokens equal"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path, model="/model")
    yield reader
    reader.stop()


def block(text: str) -> Block:
    return Block("page.md:1", "sh", text)


def test_a_block_that_works(reader: Reader) -> None:
    reader.paste(block("kvconnect --version | grep kvconnect\npip install x\n"), "")
    reader.paste(block("printf 'took 12.5 ms\\n'"), "took 3 ms")
    reader.paste(block("test -d /nvme/kv && printf '%s' MODEL"), "/model")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kvconnect dcotor", ""),
        ("false | cat", ""),
        ("false\ntrue", ""),
        ("printf 'took long\\n'", "took 3 ms"),
        ("curl -s http://127.0.0.1:9/metrics | grep kvconnect", ""),
        ("vllm serve MODEL\nkvconnect try http://127.0.0.1:8000", ""),  # never gets there
        ("kvconnect router --prefil x --port 29999", ""),  # ends at once
    ],
)
def test_a_block_that_does_not(reader: Reader, text: str, expected: str) -> None:
    with pytest.raises(PastedFailed, match=r"page\.md:1"):
        reader.paste(block(text), expected)


def test_what_is_printed_is_compared_but_for_numbers() -> None:
    assert prints("x\ncold   7.1 ms   12 new prompts, median\nverdict   ok: tokens equal\n", TRIED)
    assert not prints("cold 7.1 ms  3 new prompts, median\nverdict no: tokens equal", TRIED)
    assert not prints("verdict ok: tokens equal", TRIED)


def test_ports_are_those_of_servers() -> None:
    ports = {
        "vllm serve M": 8000,
        "A=1 vllm serve M --port 8001 &": 8001,
        "kvconnect router --prefill http://127.0.0.1:8001": 8000,
        "python -m sglang.launch_server --model-path M": 30000,
        "python -m sglang_router.launch_router --port 8003": 8003,
        "kvconnect try http://127.0.0.1:8000": 0,
        "python -m benchmarks.copy": 0,
    }
    assert {text: port_of(next(commands_of(text, ""))) for text in ports} == ports


def test_steps_have_what_they_print() -> None:
    page = "```sh\na\n```\n\n```text\nb\n```\n\n```sh\nc\n```\n```json\n{}\n```\n"
    assert [(found.text, text) for found, text in steps(page, "p")] == [("a\n", "b\n"), ("c\n", "")]


def test_every_command_is_run_or_has_a_reason() -> None:
    found = counts()
    assert 30 < found["commands_run"] < found["commands_in_docs"]
    used = {start for start in NOT_RUN for page in PAGES if start in page.read_text()}
    assert used == set(NOT_RUN)  # no reason for what is not there
