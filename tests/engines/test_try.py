"""``kvconnect try`` against real vLLM engines: what it says where KVConnect works or not."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from kvconnect import cli
from tests.engines.models import BLOCK_SIZE
from tests.engines.pd import pair
from tests.engines.ranks import until
from tests.engines.scenario import ONE_STEP_AT_A_TIME
from tests.engines.server import Router, Server, kv_transfer

TOKENS = 640
FLAGS = ("--tokens", str(TOKENS), "--rounds", "2", "--json")
BLOCKS = 96
HOST = "256MiB"
NO_FASTER = "prompts were loaded, and loading took as long as computing"
FAULTY = "tests.engines.faulty"


@pytest.fixture
def tried(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run the command; return its exit code and what it found."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code = cli.main(["try", *words, *FLAGS])
        return code, json.loads(capsys.readouterr().out)

    yield run


@pytest.mark.parametrize("dev_mode", ["1", "0"])
def test_an_engine_that_offloads_gains(tried: Any, dev_mode: str) -> None:
    env = {"VLLM_SERVER_DEV_MODE": dev_mode}
    with Server("llama", kv_transfer(host_bytes=HOST), blocks=BLOCKS, env=env) as server:
        _, found = tried(server.url)
    # How much time a small model gains on a busy machine is left open.
    assert found["problem"] in ("", NO_FASTER)
    assert found["tokens_equal"]
    whole = found["prompt_tokens"] // BLOCK_SIZE * BLOCK_SIZE
    assert found["hit_tokens"]["host"] >= whole - BLOCK_SIZE
    assert found["device_tokens"] == 0
    how = "POST /reset_prefix_cache" if dev_mode == "1" else "other prompts"
    assert how in found["evicted_by"]


def test_an_engine_that_gains_nothing_says_why(tried: Any) -> None:
    """The control: without a connector, and with a host tier that is smaller than the device."""
    with Server("llama", blocks=BLOCKS) as server:
        code, found = tried(server.url)
    assert (code, found["tokens_equal"]) == (1, True)
    assert "runs without KVConnect" in found["problem"]
    env = {"VLLM_SERVER_DEV_MODE": "0"}
    with Server("llama", kv_transfer(host_bytes="1MiB"), blocks=BLOCKS, env=env) as server:
        code, found = tried(server.url)
    assert code == 1
    assert "host memory had evicted the prompts too" in found["problem"]


def test_wrong_blocks_are_seen_by_their_tokens(tried: Any) -> None:
    """Layers that nobody waits for."""
    connector = kv_transfer("NobodyWaits", FAULTY, host_bytes=HOST, sync_load_bytes=HOST)
    with Server("llama", connector, blocks=BLOCKS, args=ONE_STEP_AT_A_TIME) as server:
        code, found = tried(server.url)
    assert (code, found["tokens_equal"]) == (1, False)
    assert "the tokens differ" in found["problem"]


def has_models(url: str) -> bool:
    """Whether a router has asked its engines yet."""
    try:
        urllib.request.urlopen(f"{url}/v1/models", timeout=30.0).close()
    except urllib.error.HTTPError:
        return False
    return True


def test_a_pair_hands_off_directly_and_through_a_router(tried: Any) -> None:
    with pair() as (p, d):
        code, found = tried("--prefill", p.url, "--decode", d.url)
        assert (code, found["problem"], found["received"]) == (0, "", {"done": 2})
        with Router(prefill=[p], decode=[d]) as router:
            until(lambda: has_models(router.url), "a model")
            code, found = tried("--router", router.url)
        assert (code, found["problem"]) == (0, "")
        assert sum(found["modes"].values()) == 9  # with the prompt that is counted
        assert not found["modes"].get("plain")
        # Control: the other way round, nobody hands off.
        assert cli.main(["try", "--prefill", d.url, "--decode", p.url, *FLAGS]) == 1
