"""Models whose prompts are pooled: where all tokens must be computed, all are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import VOCAB_SIZE, model_dir, prompt_tokens
from tests.engines.scenario import HOST, assert_nothing_leaks
from tests.engines.server import Server, kv_transfer

OFFLOAD = kv_transfer(host_bytes=HOST)
PROMPT = 100  # tokens: three blocks and some


def embedding(server: Server, prompt: list[int]) -> list[float]:
    with server.open("/v1/embeddings", {"model": "model", "input": prompt}) as answer:
        found: list[float] = json.load(answer)["data"][0]["embedding"]
        return found


def pooled(by: str) -> Server:
    pooler = json.dumps({"seq_pooling_type": by})
    args = ("--runner", "pooling", "--convert", "embed", "--pooler-config", pooler)
    return Server("llama", OFFLOAD, max_len=256, args=args)


@pytest.mark.parametrize("by", ["MEAN", "LAST"])
def test_a_decoder_whose_tokens_are_pooled(by: str) -> None:
    """What repeats a prefix of a block or more once ended the engine. Control: where the last
    token alone is pooled, blocks are stored and nothing changes, either."""
    prompt = prompt_tokens(PROMPT)
    with pooled(by) as server:
        first = embedding(server, prompt)
        server.settle()
        assert embedding(server, prompt) == pytest.approx(first, abs=1e-5)
        other = embedding(server, prompt[:64] + prompt_tokens(30, start=500))
        assert other != pytest.approx(first, abs=1e-3)
        server.settle()
        stored = server.metric("vllm:kvconnect_host_blocks_used")
        assert bool(stored) == (by == "LAST")
        assert_nothing_leaks(server)


def test_a_model_without_kv_cache(tmp_path: Path) -> None:
    """It starts, with a connector that has nothing to do and says so."""
    folder = bert(tmp_path / "bert")
    args = ("--model", folder, "--runner", "pooling")  # the last --model counts
    with Server("llama", OFFLOAD, max_len=256, args=args) as server:
        prompt = prompt_tokens(PROMPT)
        assert embedding(server, prompt) == embedding(server, prompt)
        assert server.metric("vllm:kvconnect_host_blocks_capacity") == 0
        assert "stores and loads nothing: the model has no KV cache" in server.log.read_text()


def bert(folder: Path) -> str:
    """Make a tiny encoder, with random weights and the tokenizer of the other models."""
    import transformers

    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=VOCAB_SIZE, intermediate_size=128, **shape)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir("llama"))
    tokenizer.save_pretrained(folder)
    return str(folder)
