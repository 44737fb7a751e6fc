"""Tiny random models, made on this machine: real architectures, nothing downloaded.

``model_dir("llama")`` returns a folder that vLLM and transformers load like any checkpoint. Weights
are random but drawn wide enough that attention is sharp, so greedy output varies and depends on
early tokens; with the usual narrow initialisation a wrong KV block would change nothing and a
correctness test could not fail. The tokenizer is a byte-level BPE trained on ``demo/text.txt``.

Folders are cached under ``$KVCONNECT_TEST_CACHE`` (default ``~/.cache/kvconnect-tests``) by a
digest of everything they are made from, and appear atomically, so processes may share the cache.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

TEXT = Path(__file__).resolve().parents[2] / "demo" / "text.txt"
VOCAB_SIZE = 2048
# Tokens per block: the least that the CPU attention takes. On a CPU without AMX, vLLM lowers it to
# 16 for latent attention and turns prefix caching off there.
BLOCK_SIZE = 32
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
RECIPE = 1  # raise when the code below makes other bytes from the same Model

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


_HAS_AMX = torch.cpu._is_amx_tile_supported()  # as vLLM asks, before it chooses its attention


@dataclass(frozen=True)
class Model:
    """What one checkpoint is made from, and how the engine must be told to run it."""

    config_class: str
    """Name of the class in ``transformers``."""
    config: dict[str, Any]
    gain: float = 2.0
    """Each weight matrix is drawn with standard deviation gain / sqrt(its input width)."""
    embedding_gain: float = 2.0
    """The same for the embedding table: too wide, and output follows the last token alone."""
    dtype: str = "float32"


MODELS: dict[str, Model] = {
    # Grouped-query attention, one KV group.
    "llama": Model("LlamaConfig", {**_COMMON}),
    # Normalised queries and keys.
    "qwen3": Model("Qwen3Config", {**_COMMON, "head_dim": 32}),
    # Every layer sees the last 128 tokens only.
    "mistral": Model("MistralConfig", {**_COMMON, "head_dim": 32, "sliding_window": 128}),
    # Sliding and full layers: several KV groups.
    "gemma3": Model(
        "Gemma3TextConfig",
        {
            **_COMMON,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "query_pre_attn_scalar": 4,  # sharper than 1 / sqrt(head_dim), see the module text
            "sliding_window": 128,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        },
        embedding_gain=0.125,  # the model multiplies embeddings by sqrt(hidden_size) = 16
    ),
    # Latent attention: one 576-wide row per token instead of keys and values per head.
    "deepseek_v2": Model(
        "DeepseekV2Config",
        {
            **_COMMON,
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            # As the real model has it, and not the default kind: vLLM 0.32's CPU kernel for that
            # one rotates latent attention's strided queries wrongly, so output would depend on
            # what else is in the batch.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
            "first_k_dense_replace": 4,  # all four layers dense: experts play no part in KV
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 256,
            "n_group": 1,
            "topk_group": 1,
        },
        gain=1.0,  # narrower: bfloat16's rounding must not be amplified into other tokens
        # The only type that the AMX latent attention takes; the other one is less exact in it.
        dtype="bfloat16" if _HAS_AMX else "float32",
    ),
    # Short convolutions and full attention: the smallest states, exact in float32.
    "lfm2": Model(
        "Lfm2Config",
        {
            **_COMMON,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_dim": 256,
            "block_dim": 256,
            "block_ff_dim": 512,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-5,
            "use_pos_enc": True,
        },
    ),
    # Big enough that recomputing a long prompt costs more than copying it.
    "bench": Model(
        "LlamaConfig",
        {
            **_COMMON,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
        },
    ),
    # As many token ids, and as long a context, as programs of others take for granted.
    "outside": Model(
        "LlamaConfig", {**_COMMON, "vocab_size": 32768, "max_position_embeddings": 131072}
    ),
    # Much KV per token (32 KiB) for little work: a CPU core fills it about as fast as a gigabit
    # link carries it, as an accelerator does with a large model and a fast link.
    "handoff": Model(
        "LlamaConfig",
        {
            **_COMMON,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_key_value_heads": 8,
        },
    ),
}


def model_dir(name: str) -> Path:
    """Return the folder of model ``name``, making it first if the cache lacks it.

    Raises:
        KeyError: ``name`` is not in ``MODELS``.
    """
    model = MODELS[name]
    recipe = f"{RECIPE} {model!r} {CHAT_TEMPLATE}".encode() + TEXT.read_bytes()
    target = _cache() / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=_cache(), prefix=f".{name}-") as scratch:
        made = Path(scratch) / "model"
        _write_weights(model, made)
        _tokenizer().save_pretrained(made)
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster, with the same bytes
                raise
    return target


def change_weights(folder: Path) -> None:
    """Overwrite the weights of a checkpoint with others."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    rng = torch.Generator().manual_seed(5)
    weights = load_file(path)
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weight.copy_(torch.randn(weight.shape, generator=rng) * weight.std())
    save_file(weights, path, metadata={"format": "pt"})


def engine_blocks(name: str, blocks: int) -> int:
    """How many of the engine's blocks hold as much as ``blocks`` of ``BLOCK_SIZE`` tokens. On a CPU
    without AMX, vLLM's latent attention takes blocks of 16 tokens, whatever it is told."""
    small = "kv_lora_rank" in MODELS[name].config and not _HAS_AMX
    return blocks * BLOCK_SIZE // 16 if small else blocks


def engine_args(name: str) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM`` that run model ``name`` on a CPU.

    Prefix caching is on, as it is by default: a connector is asked about what the device lacks.
    """
    model = MODELS[name]
    return {
        "model": str(model_dir(name)),
        "dtype": model.dtype,
        "block_size": BLOCK_SIZE,
        "max_model_len": 4096,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "seed": 0,
    }


def prompt_tokens(count: int, start: int = 0) -> list[int]:
    """``count`` token ids of the demo text, from its ``start``-th token on (it wraps around)."""
    ids = _text_tokens()
    return [ids[(start + i) % len(ids)] for i in range(count)]


@lru_cache(maxsize=1)
def _text_tokens() -> list[int]:
    return list(_tokenizer().encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False))


def _cache() -> Path:
    path = os.environ.get("KVCONNECT_TEST_CACHE") or Path.home() / ".cache" / "kvconnect-tests"
    Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def _write_weights(model: Model, target: Path) -> None:
    """Draw the weights from a fixed seed and save configuration and weights to ``target``."""
    import torch
    import transformers

    config = getattr(transformers, model.config_class)(
        **model.config, bos_token_id=0, eos_token_id=1, pad_token_id=None
    )
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rng = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() > 1:  # norms keep the scale they start with
                gain = model.embedding_gain if "embed_tokens" in name else model.gain
                std = gain / parameter.shape[-1] ** 0.5
                parameter.normal_(0.0, std, generator=rng)
                if name == "lm_head.weight":
                    parameter[VOCAB_SIZE:] = 0  # never generated: the tokenizer has no such token
    net.to(getattr(torch, model.dtype)).save_pretrained(target)


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    """A byte-level BPE of ``VOCAB_SIZE`` tokens trained on the demo text; any text round-trips."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([str(TEXT)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, chat_template=CHAT_TEMPLATE
    )
