"""Models with states instead of, or beside, a cache per token."""

from __future__ import annotations

from benchmarks.models.architectures import ABSENT, EXPERTS, Architecture, like_llama

_GDN = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "partial_rotary_factor": 0.25,
    "dtype": "bfloat16",  # the engine's kernels take no other type
    "head_dim": 64,
    "num_attention_heads": 4,
}
# vLLM's Mamba2 layers raise an IndexError on CPUs when prefix caching is on.
_UNCACHED = {"args": {"enable_prefix_caching": False}}
_MAMBA2 = {
    **_UNCACHED,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

HYBRIDS = (
    like_llama("Qwen3NextForCausalLM", "qwen3_next", **EXPERTS, **_GDN, decoder_sparse_step=1,
               mlp_only_layers=[], shared_expert_intermediate_size=128),
    like_llama("Qwen3_5ForCausalLM", "qwen3_5_text", **_GDN, torchvision=True),
    like_llama("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **EXPERTS, **_GDN, torchvision=True,
               shared_expert_intermediate_size=128),
    like_llama("Lfm2ForCausalLM", "lfm2", layer_types=["conv", "conv", "full_attention"] * 2,
               num_hidden_layers=6, conv_L_cache=3, conv_bias=False, block_auto_adjust_ff_dim=False,
               block_dim=256, block_ff_dim=512, block_multiple_of=256,
               block_ffn_dim_multiplier=1.0, norm_eps=1e-6, conv_dim=256, conv_dim_out=256,
               full_attn_idxs=[2, 5], block_use_swiglu=True),
    like_llama("Lfm2MoeForCausalLM", "lfm2_moe", **EXPERTS,
               layer_types=["conv", "conv", "full_attention"] * 2, num_hidden_layers=6,
               conv_L_cache=3, conv_bias=False, norm_eps=1e-6, num_dense_layers=2,
               use_expert_bias=True, routed_scaling_factor=1.0),
    like_llama("GraniteMoeHybridForCausalLM", "granitemoehybrid", **_MAMBA2, num_hidden_layers=6,
               layer_types=["mamba", "mamba", "attention"] * 2, num_local_experts=0,
               num_experts_per_tok=0, shared_intermediate_size=512, embedding_multiplier=2.0,
               logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.18,
               position_embedding_type="rope"),
    like_llama("FalconH1ForCausalLM", "falcon_h1", **_MAMBA2, mamba_d_ssm=512,
               attention_in_multiplier=1.0, attention_out_multiplier=1.0,
               key_multiplier=1.0, embedding_multiplier=1.0, lm_head_multiplier=1.0,
               mlp_multipliers=[1.0, 1.0], ssm_multipliers=[1.0] * 5, ssm_in_multiplier=1.0,
               ssm_out_multiplier=1.0, mamba_rms_norm=True, mamba_norm_before_gate=False,
               projectors_bias=False),
    like_llama("NemotronHForCausalLM", "nemotron_h", **_UNCACHED, num_hidden_layers=6,
               hybrid_override_pattern="M-*M-*",
               layers_block_type=["mamba", "mlp", "attention"] * 2, mamba_num_heads=8,
               mamba_head_dim=64, ssm_state_size=32, n_groups=1, conv_kernel=4, expand=2,
               chunk_size=256,
               mlp_hidden_act="relu2", mamba_hidden_act="silu", use_conv_bias=True,
               attention_head_dim=32, layer_norm_epsilon=1e-5, use_mamba_kernels=True,
               mamba_proj_bias=False, use_bias=False, mlp_bias=False, attention_bias=False),
    like_llama("JambaForCausalLM", "jamba", **{**EXPERTS, "num_experts": 2}, attn_layer_period=4,
               attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1,
               mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=16,
               mamba_conv_bias=True, mamba_proj_bias=False, use_mamba_kernels=True),
    Architecture("MambaForCausalLM", {
        "model_type": "mamba", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4,
        "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 16}),
    Architecture("Mamba2ForCausalLM", {
        "model_type": "mamba2", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4,
        "state_size": 32, "conv_kernel": 4, "expand": 2, "num_heads": 8, "head_dim": 64,
        "n_groups": 1, "chunk_size": 256}, **_UNCACHED),
    like_llama("OlmoHybridForCausalLM", "olmo_hybrid", **_GDN),
    like_llama("KimiLinearForCausalLM", "kimi_linear", **EXPERTS, **_UNCACHED, kv_lora_rank=512,
               q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64,
               mla_use_nope=True, num_shared_experts=1, first_k_dense_replace=1, moe_layer_freq=1,
               moe_router_activation_func="sigmoid", moe_renormalize=True,
               num_expert_group=1, topk_group=1, routed_scaling_factor=1.0,
               linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4],
                                   "num_heads": 8, "head_dim": 32, "short_conv_kernel_size": 4}),
    like_llama("Zamba2ForCausalLM", "zamba2", **_UNCACHED, num_hidden_layers=6, mamba_d_state=32,
               mamba_d_conv=4, mamba_expand=2, mamba_ngroups=1, n_mamba_heads=8,
               num_mem_blocks=1, num_key_value_heads=8, attention_head_dim=64, head_dim=ABSENT,
               layers_block_type=["mamba", "mamba", "hybrid"] * 2, hybrid_layer_ids=[2, 5],
               hidden_act="gelu"),
)  # fmt: skip
