"""Decoders with latent attention (MLA): one wide row per token instead of keys and values."""

from __future__ import annotations

from typing import Any

from benchmarks.models.architectures import ABSENT, EXPERTS, like_llama

# As the real models have it. vLLM's CPU kernel for the default kind rotates latent attention's
# strided queries wrongly, so that output depends on what else is in the batch.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": ABSENT,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "rope_theta": ABSENT,
    "rope_parameters": _YARN,
    "rope_scaling": _YARN,
}
_DEEPSEEK = {
    **EXPERTS,
    **MLA,
    "first_k_dense_replace": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "gain": 1.0,
}
_V3 = {**_DEEPSEEK, "q_lora_rank": 64, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

LATENT = (
    like_llama("DeepseekV2ForCausalLM", "deepseek_v2", **_DEEPSEEK, topk_method="greedy",
               scoring_func="softmax"),
    like_llama("DeepseekV3ForCausalLM", "deepseek_v3", **_V3),
    like_llama("Glm4MoeLiteForCausalLM", "glm4_moe_lite", **_V3),
    like_llama("AXK1ForCausalLM", "axk1", **_V3),
    like_llama("PanguUltraMoEForCausalLM", "pangu_ultra_moe", remote=True, **_V3,
               sandwich_norm=True, num_dense_layers=2, attention_q_lora_dim=64,
               attention_kv_lora_dim=512, attention_qk_rope_dim=64, attention_qk_dim=64,
               attention_v_dim=64),
    like_llama("LongcatFlashForCausalLM", "longcat_flash", **{**_V3, "moe_topk": 2,
               "ffn_hidden_size": 512, "expert_ffn_hidden_size": 128, "num_layers": 2,
               "zero_expert_num": 1, "zero_expert_type": "identity", "router_bias": False,
               "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA"}),
    like_llama("DeepseekV32ForCausalLM", "deepseek_v32", **_V3, index_n_heads=4,
               index_head_dim=128, index_topk=64),
    like_llama("GlmMoeDsaForCausalLM", "glm_moe_dsa", **_V3, index_n_heads=4, index_head_dim=128,
               index_topk=64),
)  # fmt: skip
