"""LoRA adapters for tests: written with random weights, loaded into a running server."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.engines.models import MODELS
from tests.engines.server import Server

LORA = ("--enable-lora", "--max-lora-rank", "8")
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


def write(folder: Path, seed: int) -> str:
    """Write an adapter with these random weights to a folder, in place."""
    config = MODELS["llama"].config
    width, head = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in (("q", "num_attention_heads"), ("v", "num_key_value_heads")):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, width, generator=rng) / width**0.5
            out = config[heads] * head
            weights[f"{place}.lora_B.weight"] = torch.randn(out, 8, generator=rng)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return str(folder)


def load(server: Server, name: str, path: str, **extra: bool) -> None:
    server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **extra})
