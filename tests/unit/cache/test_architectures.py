"""The table of architectures: complete, and the same as what a model's fields say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvconnect.cache.architectures import (
    _LISTED,
    ARCHITECTURES,
    ENGINES,
    FEATURES,
    KINDS,
    kinds_of,
    refusal,
    shared_with,
)


def test_every_name_is_listed_once_with_kinds_that_exist() -> None:
    names = Counter(name for names in _LISTED.values() for name in names)
    assert [name for name, times in names.items() if times > 1] == []
    assert {kind for kinds in ARCHITECTURES.values() for kind in kinds} <= KINDS.keys()


def test_a_kind_works_or_says_why_not_and_what_to_do() -> None:
    for name, kind in KINDS.items():
        for engine in ENGINES:
            support = kind.on(engine)
            assert support.refused.keys() <= set(FEATURES)
            assert all(support.refused.values()) and support.fix, name
            assert bool(support.shared_with) == ("sharing" not in support.refused), name


LAYERS = ["sliding_attention", "full_attention"]

CONFIGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("full",)),
    ({"sliding_window": 128}, ("window",)),
    ({"sliding_window": 128, "use_sliding_window": False}, ("full",)),
    ({"sliding_window": 128, "layer_types": LAYERS}, ("full", "window")),
    ({"sliding_window": 128, "layer_types": ["full_attention"]}, ("full",)),
    ({"layer_types": ["chunked_attention", "full_attention"]}, ("full", "chunk")),
    ({"layer_types": ["linear_attention", "full_attention"]}, ("full", "state")),
    ({"layer_types": ["mamba", "attention"]}, ("full", "state")),
    ({"layer_types": ["conv", "full_attention"]}, ("full", "state")),
    ({"kv_lora_rank": 512}, ("latent",)),
    ({"kv_lora_rank": 512, "index_topk": 2048}, ("latent", "indexer")),
    ({"compress_ratios": [1, 4], "index_topk": 512}, ("compressed", "indexer")),
    ({"is_encoder_decoder": True}, ("full", "cross")),
    ({"canvas_length": 32}, ("full", "diffusion")),
    ({"text_config": {"kv_lora_rank": 512}}, ("latent",)),
]


@pytest.mark.parametrize(("config", "kinds"), CONFIGS)
def test_an_unknown_architecture_is_judged_by_its_fields(
    config: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    assert kinds_of({**config, "architectures": ["NobodyKnowsForCausalLM"]}) == kinds


def test_the_table_goes_before_the_fields_but_for_windows() -> None:
    known = {"architectures": ["UnlimitedOCRForCausalLM"], "kv_lora_rank": 512}
    assert kinds_of(known) == ("generated window",)
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert kinds_of(mistral) == ("full",)
    assert kinds_of({**mistral, "sliding_window": 4096}) == ("window",)
    gemma = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096}
    assert kinds_of(gemma) == ("full", "window")
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    assert kinds_of({**qwen, "use_sliding_window": False}) == ("full",)
    assert kinds_of({**qwen, "use_sliding_window": True}) == ("full", "window")


def test_one_refused_kind_refuses_the_model() -> None:
    assert refusal("vllm", ("full", "window"), "offload") is None
    found = refusal("vllm", ("full", "cross"), "offload")
    assert found is not None and found[0].startswith("cross attention")
    assert refusal("sglang", ("full", "block sparse"), "hand-off") is None
    assert refusal("sglang", ("full", "block sparse"), "offload") is not None


def test_blocks_are_shared_as_widely_as_the_narrowest_kind() -> None:
    assert "SGLang" in shared_with("vllm", ("full",))
    assert shared_with("vllm", ("full", "window")) == "vLLM of any tensor parallelism"
    assert shared_with("vllm", ("window", "compressed")) == "vLLM with the same ranks"
    assert shared_with("sglang", ("full", "window")) == "SGLang with the same ranks"
    assert shared_with("vllm", ("cross",)) == ""
