"""Decoders whose layers see a window, a chunk, or another layer's cache."""

from __future__ import annotations

from benchmarks.models.architectures import ABSENT, EXPERTS, LLAMA, Architecture, like_llama

_SLIDING = ["sliding_attention"] * 2 + ["full_attention"]
_ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in set(_SLIDING)}
_GEMMA = {
    "num_hidden_layers": 6,
    "sliding_window": 128,
    "query_pre_attn_scalar": 4,  # sharper than 1 / sqrt(head_dim)
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_SCALED = {"embedding_gain": 0.125}  # the model multiplies embeddings by sqrt(hidden_size)
_GEMMA4 = {
    **_GEMMA,
    "layer_types": _SLIDING * 2,
    "rope_theta": ABSENT,
    "rope_parameters": _ROPES,
    "vocab_size_per_layer_input": 2048,
    "hidden_size_per_layer_input": 32,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
}

WINDOWS = (
    like_llama("MistralForCausalLM", "mistral", sliding_window=128, variant="sliding window"),
    like_llama("Gemma2ForCausalLM", "gemma2", **_GEMMA, **_SCALED),
    like_llama("Gemma3ForCausalLM", "gemma3_text", **_GEMMA, **_SCALED, layer_types=_SLIDING * 2),
    like_llama("Gemma3nForCausalLM", "gemma3n_text",
               **{**_GEMMA, "final_logit_softcapping": 30.0}, **_SCALED, layer_types=_SLIDING * 2,
               intermediate_size=[512] * 6, num_kv_shared_layers=3, laurel_rank=16,
               hidden_size_per_layer_input=32, vocab_size_per_layer_input=2048,
               altup_num_inputs=2, altup_active_idx=0, altup_coef_clip=120.0,
               altup_correct_scale=True, activation_sparsity_pattern=[0.0] * 6),
    like_llama("Gemma4ForCausalLM", "gemma4_text", **_GEMMA4, **_SCALED, variant="equal heads"),
    like_llama("Gemma4ForCausalLM", "gemma4_text", **{**_GEMMA4, "global_head_dim": 64}, **_SCALED,
               variant="heads of 32 and 64"),
    like_llama("Gemma4ForCausalLM", "gemma4_text", **{**_GEMMA4, "num_kv_shared_layers": 3},
               **_SCALED, variant="shared KV"),
    like_llama("Cohere2ForCausalLM", "cohere2", num_hidden_layers=6, sliding_window=128,
               layer_types=_SLIDING * 2, layer_norm_eps=1e-5, logit_scale=0.25,
               tie_word_embeddings=True),
    like_llama("Exaone4ForCausalLM", "exaone4", num_hidden_layers=6, sliding_window=128,
               layer_types=_SLIDING * 2, variant="sliding window"),
    like_llama("GraniteSWAForCausalLM", "granite_swa", num_hidden_layers=6, sliding_window=128,
               layer_types=_SLIDING * 2, embedding_multiplier=2.0, logits_scaling=2.0,
               residual_multiplier=0.5, attention_multiplier=0.18),
    like_llama("Rnj1ForCausalLM", "gemma3_text", **_GEMMA, **_SCALED,
               layer_types=["full_attention"] * 6),
    like_llama("Plamo3ForCausalLM", "plamo3", remote=True, num_hidden_layers=6,
               sliding_window=128, window_size=128, sliding_window_pattern=3,
               interleaved_sliding_window=[128, 128, None] * 2, rope_local_theta=10000,
               layer_types=_SLIDING * 2),
    like_llama("GptOssForCausalLM", "gpt_oss", **EXPERTS, num_hidden_layers=6, sliding_window=128,
               layer_types=["sliding_attention", "full_attention"] * 3),
    like_llama("Llama4ForCausalLM", "llama4_text", **{**EXPERTS, "num_experts_per_tok": 1},
               intermediate_size_mlp=512,
               attention_chunk_size=256, interleave_moe_layer_step=1,
               no_rope_layers=[1, 1, 1, 0], moe_layers=[0, 1, 2, 3],
               layer_types=["chunked_attention"] * 3 + ["full_attention"],
               use_qk_norm=True, attn_temperature_tuning=False),
    like_llama("AfmoeForCausalLM", "afmoe", **EXPERTS, num_hidden_layers=6, sliding_window=128,
               layer_types=_SLIDING * 2, num_dense_layers=2, num_shared_experts=1, n_group=1,
               topk_group=1, score_func="sigmoid", route_norm=True, route_scale=1.0,
               global_attn_every_n_layers=3, mup_enabled=False),
    like_llama("MiMoV2FlashForCausalLM", "mimo_v2_flash", **EXPERTS, num_hidden_layers=6,
               sliding_window=128, hybrid_layer_pattern=[1, 1, 0] * 2, v_head_dim=32,
               swa_num_attention_heads=8, swa_num_key_value_heads=4, swa_head_dim=32,
               swa_v_head_dim=32, swa_rope_theta=10000.0, add_swa_attention_sink_bias=True,
               add_full_attention_sink_bias=False, moe_layer_freq=[0, 1, 1, 1, 1, 1],
               n_group=1, topk_group=1, n_shared_experts=None, scoring_func="sigmoid",
               topk_method="noaux_tc", layernorm_epsilon=1e-6, attention_bias=False,
               partial_rotary_factor=1.0, attention_value_scale=None, head_dim=32,
               sliding_window_size=128, num_key_value_heads=2,
               layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2),
    Architecture("Olmo3ForCausalLM", {
        **{k: v for k, v in LLAMA.items() if k != "head_dim"}, "model_type": "olmo3",
        "num_hidden_layers": 6, "sliding_window": 128, "layer_types": _SLIDING * 2},
        note="vLLM runs it with the code of `transformers`"),
)  # fmt: skip
