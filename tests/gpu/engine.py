"""An engine in this process, whose KV bytes are compared after eviction and reload:
``python -m tests.gpu.engine``. Prints what was found as one line of JSON.

Weights are dummies. Tokens would say little: a batch of another shape gives other logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from kvconnect.engines.vllm.connector import KVConnect

BLOCK_SIZE = 32
FULL_BLOCKS = 12
BLOCKS = 64
PROMPT = [(7 * number) % 1000 + 3 for number in range(FULL_BLOCKS * BLOCK_SIZE + 5)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def settings(folder: Path) -> dict[str, Any]:
    """Write the model into ``folder``; return an engine's arguments."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": BLOCKS,
        "kv_transfer_config": {
            "kv_connector": "KVConnect",
            # Run from a checkout, KVConnect is no plugin that vLLM finds by itself.
            "kv_connector_module_path": "kvconnect.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_bytes": "256MiB", "digest": "full"},
        },
    }


class Engine:
    """An engine with the connector; ``blocks``: of the newest request, ``caches``: per layer."""

    def __init__(self, folder: Path) -> None:
        self.blocks: list[int] = []
        self.caches: dict[str, torch.Tensor] = {}
        self._note()
        self._llm = LLM(**settings(folder))

    def _note(self) -> None:
        """Note which blocks a request has, and where the layers are."""
        allocate, register = KVConnect.update_state_after_alloc, KVConnect.register_kv_caches

        def update_state_after_alloc(
            this: KVConnect, request: Any, blocks: Any, *more: Any, **named: Any
        ) -> None:
            self.blocks = list(blocks.get_block_ids()[0])
            allocate(this, request, blocks, *more, **named)

        def register_kv_caches(this: KVConnect, caches: dict[str, torch.Tensor]) -> None:
            self.caches = caches
            register(this, caches)

        KVConnect.update_state_after_alloc = update_state_after_alloc  # type: ignore[method-assign]
        KVConnect.register_kv_caches = register_kv_caches  # type: ignore[method-assign]

    def ask(self) -> int:
        """Serve the prompt; return how many of its tokens were not computed."""
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        asked: Any = {"prompt_token_ids": PROMPT}
        (output,) = self._llm.generate(asked, params, use_tqdm=False)
        return output.num_cached_tokens or 0

    def content(self) -> list[torch.Tensor]:
        """Return the bytes of the newest request's full blocks, per layer."""
        found = []
        for cache in self.caches.values():
            dim = cache.shape.index(BLOCKS)
            ids = torch.tensor(self.blocks[:FULL_BLOCKS], device=cache.device)
            found.append(cache.index_select(dim, ids).contiguous().view(torch.uint8).cpu())
        return found

    def evict(self) -> bool:
        """Empty the device's prefix cache and overwrite all blocks."""
        done = self._llm.reset_prefix_cache()
        for cache in self.caches.values():
            cache.fill_(1.0)
        return done


def main() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        cached = [engine.ask()]
        computed = engine.content()
        evicted = engine.evict()
        overwritten = engine.content()
        cached.append(engine.ask())
        loaded = engine.content()
    same = [torch.equal(one, other) for one, other in zip(computed, loaded, strict=True)]
    gone = [not torch.equal(one, other) for one, other in zip(computed, overwritten, strict=True)]
    return {"cached": cached, "evicted": evicted, "same": same, "gone": gone}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")
