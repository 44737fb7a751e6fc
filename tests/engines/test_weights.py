"""New weights under a running server: what is stored of the former ones is never served again."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.engines.models import change_weights, model_dir, prompt_tokens
from tests.engines.scenario import FULL, HOST, NEW, PROMPT, assert_nothing_leaks
from tests.engines.server import Answer, Server, events, kv_transfer

OFFLOAD = kv_transfer(host_bytes=HOST)


def ask(server: Server, start: int = 0) -> Answer:
    """Ask with nothing in the device's own cache."""
    server.settle()
    server.post("/reset_prefix_cache")
    return server.complete(prompt_tokens(PROMPT, start), NEW)


def test_sleep_pauses_and_new_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir("llama"), folder)
    with Server("llama", OFFLOAD, args=("--model", str(folder))) as server:
        first = ask(server).tokens
        assert ask(server) == Answer(first, FULL)

        for level in (1, 2):
            server.post(f"/sleep?level={level}")
            server.post("/wake_up?tags=weights")
            server.post("/wake_up?tags=kv_cache")
            assert ask(server) == Answer(first, 0), "vLLM asks to forget all"
            assert ask(server) == Answer(first, FULL)

        # Requests that were paused in the middle go on, and their KV is made anew.
        long = prompt_tokens(PROMPT, 3000), 500
        alone = server.complete(*long).tokens
        with server.open("/v1/completions", server.body(*long, stream=True)) as reply:
            chunks = events(reply)
            got = list(next(chunks)["choices"][0]["token_ids"])
            server.post("/pause?mode=keep")
            server.post("/resume")
            got += [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert tuple(got) == alone
        assert server.metric("vllm:num_preemptions_total") == 1, "it was still running"

        ask(server)
        change_weights(folder)
        server.post("/collective_rpc", {"method": "reload_weights"})
        stale = ask(server)
        assert stale.cached == FULL, "control: nobody told the connector"
        server.post("/reset_prefix_cache?reset_external=true")
        second = ask(server)
        assert second.cached == 0 and second.tokens not in (first, stale.tokens)
        assert ask(server) == Answer(second.tokens, FULL)
        assert_nothing_leaks(server)
