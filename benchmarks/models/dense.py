"""Dense decoders."""

from __future__ import annotations

from benchmarks.models.architectures import ABSENT, LLAMA, Architecture, like_llama

_SCALED = {"embedding_gain": 0.125}  # the model multiplies embeddings by sqrt(hidden_size)

DENSE = (
    like_llama("LlamaForCausalLM", "llama"),
    like_llama("Qwen2ForCausalLM", "qwen2"),
    like_llama("Qwen3ForCausalLM", "qwen3"),
    like_llama("MistralForCausalLM", "mistral", sliding_window=None, variant="full attention"),
    like_llama("Ministral3ForCausalLM", "ministral3"),
    like_llama("GemmaForCausalLM", "gemma", hidden_act="gelu_pytorch_tanh", **_SCALED),
    like_llama("StableLmForCausalLM", "stablelm", partial_rotary_factor=0.25, layer_norm_eps=1e-5),
    like_llama("Phi3ForCausalLM", "phi3", rope_scaling=None, sliding_window=None),
    like_llama("GraniteForCausalLM", "granite", embedding_multiplier=2.0, logits_scaling=2.0,
               residual_multiplier=0.5, attention_multiplier=0.18),
    like_llama("CohereForCausalLM", "cohere", layer_norm_eps=1e-5, logit_scale=0.25,
               use_qk_norm=True, tie_word_embeddings=True),
    like_llama("NemotronForCausalLM", "nemotron", hidden_act="relu2", norm_eps=1e-5,
               partial_rotary_factor=0.5),
    like_llama("Glm4ForCausalLM", "glm4", partial_rotary_factor=0.5, attention_bias=True),
    like_llama("ApertusForCausalLM", "apertus", hidden_act="xielu", qk_norm=True),
    like_llama("Ernie4_5ForCausalLM", "ernie4_5", use_bias=False),
    like_llama("HyperCLOVAXForCausalLM", "hyperclovax", embedding_multiplier=2.0,
               logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.18),
    like_llama("MiniCPM3ForCausalLM", "minicpm3", hidden_size=256, q_lora_rank=64,
               kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
               num_key_value_heads=8, head_dim=ABSENT, scale_emb=1, dim_model_base=256,
               scale_depth=2.0),
    like_llama("InternLM2ForCausalLM", "internlm2", remote=True, bias=False),
    like_llama("TeleChat2ForCausalLM", "telechat2", remote=True, n_layer=4, n_head=8,
               num_key_value_heads=8, ffn_hidden_size=512, embed_layernorm=False,
               layer_norm_epsilon=1e-5, hidden_dropout=0.0),
    like_llama("TeleFLMForCausalLM", "teleflm", remote=True, num_key_value_heads=8,
               use_mup=False, input_mult=1.0, output_mult=1.0),
    like_llama("ExaoneForCausalLM", "exaone", remote=True, num_layers=4,
               layer_norm_epsilon=1e-5, activation_function="silu"),
    like_llama("Exaone4ForCausalLM", "exaone4", sliding_window=None,
               layer_types=["full_attention"] * 4, variant="full attention"),
    like_llama("OrionForCausalLM", "orion", remote=True, num_key_value_heads=8),
    like_llama("SolarForCausalLM", "solar", remote=True, bskcn_1=[1], bskcn_2=[2], bskcn_3=[1],
               bskcn_4=[2], bskcn_tv=[0.9, 0.8], attention_bias=False, mlp_bias=False),
    like_llama("MiniCPMForCausalLM", "minicpm", remote=True, scale_emb=2, dim_model_base=128,
               scale_depth=1.4, num_experts=0, hidden_act_param=0.0),
    like_llama("MiMoForCausalLM", "mimo", remote=True, num_nextn_predict_layers=0,
               attention_bias=True),
    like_llama("PanguEmbeddedForCausalLM", "pangu_embedded", remote=True, bias=True,
               attention_bias=True),
    like_llama("Step1ForCausalLM", "step1", remote=True, num_attention_groups=2),
    like_llama("ChatGLMModel", "chatglm", num_layers=4, padded_vocab_size=2048,
               ffn_hidden_size=512, kv_channels=32, seq_length=8192, multi_query_attention=True,
               multi_query_group_num=2, layernorm_epsilon=1e-5, rmsnorm=True,
               add_qkv_bias=True, add_bias_linear=False, post_layer_norm=True,
               apply_residual_connection_post_layernorm=False, fp32_residual_connection=False,
               original_rope=True),
    Architecture("GPT2LMHeadModel", {
        "model_type": "gpt2", "vocab_size": 2048, "n_embd": 256, "n_layer": 4, "n_head": 8,
        "n_positions": 2048, "activation_function": "gelu_new"}),
    Architecture("GPTJForCausalLM", {
        "model_type": "gptj", "vocab_size": 2048, "n_embd": 256, "n_layer": 4, "n_head": 8,
        "n_positions": 2048, "rotary_dim": 16, "tie_word_embeddings": False,
        "activation_function": "gelu_new"}),
    Architecture("OPTForCausalLM", {
        "model_type": "opt", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 8, "ffn_dim": 512, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 256, "do_layer_norm_before": True}),
    Architecture("BloomForCausalLM", {
        "model_type": "bloom", "vocab_size": 2048, "hidden_size": 256, "n_layer": 4, "n_head": 8}),
    Architecture("FalconForCausalLM", {
        "model_type": "falcon", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True,
        "alibi": False, "bias": False, "max_position_embeddings": 8192}),
)  # fmt: skip

_GENERIC = {k: v for k, v in LLAMA.items() if k != "head_dim"}


def _transformers(name: str, config: dict[str, object]) -> Architecture:
    """An architecture that vLLM runs with the code of ``transformers``."""
    return Architecture(name, config, note="vLLM runs it with the code of `transformers`")


THROUGH_TRANSFORMERS = (
    *(_transformers(name, {**_GENERIC, "model_type": model_type})
    for name, model_type in (
        ("Olmo2ForCausalLM", "olmo2"),
        ("OlmoForCausalLM", "olmo"),
        ("Starcoder2ForCausalLM", "starcoder2"),
        ("SmolLM3ForCausalLM", "smollm3"),
        ("SeedOssForCausalLM", "seed_oss"),
        ("ArceeForCausalLM", "arcee"),
        ("PhiForCausalLM", "phi"),
        ("GlmForCausalLM", "glm"),
        ("HeliumForCausalLM", "helium"),
    )),
    _transformers("GPTNeoXForCausalLM", {
        "model_type": "gpt_neox", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 8, "intermediate_size": 512, "max_position_embeddings": 8192}),
)  # fmt: skip
