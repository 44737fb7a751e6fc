"""KVConnect as one of several connectors, and in an engine that lives in the caller's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvconnect.protocol.handoff_request import TICKET_KEY
from tests.engines.models import BLOCK_SIZE, engine_args
from tests.engines.pd import raw
from tests.engines.scenario import (
    BLOCKS,
    COUNT,
    FULL,
    HOST,
    NEW,
    ask,
    assert_nothing_leaks,
    block_bytes,
    cached_by_source,
    expected,
    hit_tokens,
    prompts,
    tokens,
)
from tests.engines.server import Server
from tests.servers import free_port

OURS: dict[str, Any] = {
    "kv_connector": "KVConnect",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_bytes": HOST, "digest": "full"},
}


def multi(*children: dict[str, Any]) -> str:
    """``recompute`` is for the top: vLLM's scheduler looks nowhere else."""
    return json.dumps(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": list(children)},
        }
    )


def sibling(name: str, folder: Path) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "ExampleConnector": {"shared_storage_path": str(folder)},
        "NixlConnector": {},
    }[name]
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["ExampleConnector", "NixlConnector"])  # those that run on CPUs
def test_beside_another_connector(name: str, first: bool, tmp_path: Path) -> None:
    """Whoever is asked first answers; nobody's tokens are wrong, and every account is its own."""
    other = sibling(name, tmp_path)
    children = (OURS, other) if first else (other, OURS)
    env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    whole = ("--max-num-batched-tokens", "1024")  # ExampleConnector keeps prompts of one step only
    with Server("llama", multi(*children), env=env, args=whole) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        server.settle()
        answers = ask(server)
        assert tokens(answers) == expected("llama").fresh
        ours = first or name == "NixlConnector"  # which brings only what another engine has
        assert hit_tokens(server) == (COUNT * FULL if ours else 0)
        if ours:
            assert [answer.cached for answer in answers] == [FULL] * COUNT
            assert cached_by_source(server) == {"host": COUNT * FULL}
        assert server.metric("vllm:kvconnect_host_blocks_capacity") > 0
        loaded = COUNT * FULL // BLOCK_SIZE * block_bytes("llama") if ours else 0
        assert server.metric("vllm:kv_offload_load_bytes_total") == loaded
        assert_nothing_leaks(server)
        if name == "NixlConnector":  # both are asked; it keeps blocks for longer than this test
            wanted = {"do_remote_decode": True, "do_remote_prefill": False}
            answer = raw(server, prompts()[0], 1, kv_transfer_params=wanted)
            assert answer["kv_transfer_params"].keys() >= {TICKET_KEY, "remote_block_ids"}
            assert ask(server)[0].tokens == expected("llama").fresh[0]


def test_an_engine_in_the_caller_s_process_can_be_reset() -> None:
    """Nothing steps it when all answers are there. Each reset must say the truth at once."""
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, "-m", "tests.engines.test_multi_connector"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["resets"] == [True] * 4
    assert [tuple(answer) for answer in found["first"]] == expected("llama").fresh
    assert found["again"] == found["first"] == found["last"]
    assert found["cached"] == [FULL] * COUNT  # the host tier has all, that of the last step too
    assert found["forgotten"] == [0] * COUNT


def in_process() -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        **engine_args("llama"),
        num_gpu_blocks_override=4 * BLOCKS,
        max_num_batched_tokens=4096,
        kv_transfer_config=OURS,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]

    def answers() -> tuple[list[Any], list[int]]:
        outputs = [llm.generate(one, params, use_tqdm=False)[0] for one in asked]
        found = [list(output.outputs[0].token_ids) for output in outputs]
        return found, [output.num_cached_tokens or 0 for output in outputs]

    first, _ = answers()
    resets = [llm.reset_prefix_cache(), llm.reset_prefix_cache()]
    again, cached = answers()
    resets += [llm.reset_prefix_cache(reset_connector=True), llm.reset_prefix_cache()]
    last, forgotten = answers()
    return {
        "resets": resets,
        "first": first,
        "again": again,
        "last": last,
        "cached": cached,
        "forgotten": forgotten,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(in_process()) + "\n")
