"""The table of architectures against vLLM: the names are its own, and so are the refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.models.registry import (
    _OOT_SUPPORTED_MODELS,
    _PREVIOUSLY_SUPPORTED_MODELS,
    ModelRegistry,
)
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
)

from kvconnect.cache.architectures import ARCHITECTURES, refusal
from kvconnect.engines.vllm.cache_specs import cache_group
from kvconnect.engines.vllm.checks import check_model
from kvconnect.errors import Incompatible
from tests.engines.vllm_configs import engine_config
from tests.unit.engines import vllm_caches

ELSEWHERE = {"BaichuanForCausalLM"}
"""Served by SGLang, not by this vLLM."""


def test_every_name_is_one_of_vllm() -> None:
    gone = {*_PREVIOUSLY_SUPPORTED_MODELS, *_OOT_SUPPORTED_MODELS} | ELSEWHERE
    assert ARCHITECTURES.keys() - set(ModelRegistry.get_supported_archs()) - gone == set()
    assert "NobodyKnowsForCausalLM" not in ModelRegistry.get_supported_archs()  # control


PLAIN: dict[str, Any] = {
    "block_size": 64,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
}
V32 = vllm_caches.deepseek_v32()
V4 = vllm_caches.MODELS["deepseek_v4"]

SPECS: list[tuple[str, KVCacheSpec]] = [
    ("full", vllm_caches.full()),
    ("window", vllm_caches.window()),
    ("window", V4["model.layers.0.swa"]),
    ("chunk", vllm_caches.CHUNKS),
    ("latent", vllm_caches.latent(64)),
    ("indexer", V32["model.layers.0.indexer.k_cache"]),
    ("compressed", V4["model.layers.1.attn"]),
    ("block sparse", V32["model.layers.0.indexer.k_cache"]),
    ("state", MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,))),
    ("ring", vllm_caches.compressor_ring()),
    ("generated window", RSWASpec(rswa_window=64, **PLAIN)),
    ("prefix", vllm_caches.full(non_causal=True)),
    ("cross", CrossAttentionSpec(**PLAIN)),
]


@pytest.mark.parametrize(("kind", "spec"), SPECS)
def test_the_table_refuses_what_the_spec_refuses(kind: str, spec: KVCacheSpec) -> None:
    try:
        cache_group(KVCacheGroupSpec(["layer"], spec))
        served = True
    except Incompatible:
        served = False
    assert served == (refusal("vllm", [kind], "offload") is None)


def check(architecture: str) -> None:
    check_model(engine_config(architectures=[architecture]).model_config)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("DeepseekV41ForCausalLM", "a ring of keys"),
        ("UnlimitedOCRForCausalLM", "where the prompt ended"),
        ("HrmTextForCausalLM", "non-causal"),
    ],
)
def test_a_model_is_refused_by_its_configuration(architecture: str, why: str) -> None:
    with pytest.raises(Incompatible, match=why) as refused:
        check(architecture)
    assert refused.value.fix


def test_other_models_are_not_refused() -> None:
    check("DeepseekV4ForCausalLM")
    check("DeepseekV3ForCausalLM")
    check("BertModel")  # its connector is idle


def test_models_with_states_are_not_refused() -> None:
    check("Qwen3NextForCausalLM")
    check("MambaForCausalLM")
