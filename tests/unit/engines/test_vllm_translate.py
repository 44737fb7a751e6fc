"""What is read from vLLM's configurations."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.quantization import resolve_quantization_config
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.metrics.stats import PrefillStats

from kvconnect.cache.groups import CacheGroup
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.events import EventLog
from kvconnect.engines.vllm.handoff_pages import total_kv_heads
from kvconnect.engines.vllm.shared_records import records_for_all
from kvconnect.engines.vllm.translate import long_ropes
from kvconnect.errors import Incompatible, Refused
from kvconnect.types import Block


def config(tp: int, total: int, **fields: int) -> Any:
    text = SimpleNamespace(to_dict=lambda: fields)
    model = SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: total)
    parallel = SimpleNamespace(tensor_parallel_size=tp)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


def spec(heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=64, dtype=torch.float32)


def test_heads_of_layers_that_differ_in_them() -> None:
    """As in MiMo-V2, whose windowed layers have 8 and whose others have 4."""
    two = {"num_key_value_heads": 4, "swa_num_key_value_heads": 8}
    assert total_kv_heads(config(2, 4, **two), spec(4)) == 8
    assert total_kv_heads(config(2, 4, **two), spec(2)) == 4
    with pytest.raises(Incompatible, match="layers differ"):
        total_kv_heads(config(8, 4, **two), spec(1))  # of either
    assert total_kv_heads(config(8, 4, num_key_value_heads=4), spec(1)) == 4
    assert total_kv_heads(config(8, 4, num_attention_heads=32), spec(1)) == 4


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        (None, []),
        ({"rope_type": "default", "rope_theta": 1.0}, []),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, [4096]),
        (
            {
                "full_attention": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 8192,
                },
                "sliding_attention": {"rope_type": "default"},
            },
            [8192],
        ),
    ],
)
def test_where_rotations_change(rope: Any, most: list[int]) -> None:
    model: Any = SimpleNamespace(hf_text_config=SimpleNamespace(rope_parameters=rope))
    assert long_ropes(model) == most


def long_rope_model(max_model_len: int, **fields: Any) -> Any:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    usual = {
        "model": "phi",
        "max_model_len": max_model_len,
        "dtype": torch.bfloat16,
        "hf_config": SimpleNamespace(to_dict=dict),
        "hf_text_config": SimpleNamespace(rope_parameters=rope),
        "model_arch_config": SimpleNamespace(quantization_config=None),
        "quantization": None,
        "quantization_config": None,
        "hf_overrides": {},
        "hf_config_path": None,
    }
    return SimpleNamespace(**{**usual, **fields})


def test_what_engines_of_other_lengths_rotate_is_another_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only where the lengths are on two sides of what the model was first made for."""
    monkeypatch.setattr(translate, "packings", lambda config: {"rows"})
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec(4))])

    def told(max_model_len: int) -> dict[str, str | int]:
        settings: Any = SimpleNamespace(
            model_config=long_rope_model(max_model_len),
            cache_config=SimpleNamespace(cache_dtype="auto"),
        )
        kept = torch.zeros(1, dtype=torch.bfloat16)
        return translate.handoff_format(settings, cache, {"0": kept})

    assert told(2048) == told(4096) != told(4097) == told(131072)


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str | int]]:
    """Return the format of an engine whose model has these fields, and whose cache this type."""
    monkeypatch.setattr(translate, "packings", lambda config: {"rows"})
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec(4))])

    def told(kept: torch.dtype = torch.bfloat16, **fields: Any) -> dict[str, str | int]:
        settings: Any = SimpleNamespace(
            model_config=long_rope_model(2048, **fields),
            cache_config=SimpleNamespace(cache_dtype="auto"),
        )
        return translate.handoff_format(settings, cache, {"0": torch.zeros(1, dtype=kept)})

    return told


def test_engines_that_compute_in_other_types_fill_an_8_bit_cache_with_other_values(
    form: Callable[..., dict[str, str | int]],
) -> None:
    kept = torch.uint8
    assert form(kept, dtype=torch.float16)["compute_dtype"] == "float16"
    assert form(kept) == form(kept) != form(kept, dtype=torch.float16)
    assert "compute_dtype" not in form(), "the cache's own type tells it"


def test_weights_that_are_quantised_as_they_are_loaded_are_another_format(
    form: Callable[..., dict[str, str | int]],
) -> None:
    given = [
        resolve_quantization_config(name, None) for name in ("fp8_per_tensor", "fp8_per_block")
    ]
    fields = [
        {},
        {"quantization": "fp8"},
        *({"quantization": "online", "quantization_config": one} for one in given),
    ]
    assert len({form(**each).get("quantization") for each in fields}) == len(fields)
    assert form(**fields[2]) == form(**fields[2])
    said = {"model_arch_config": SimpleNamespace(quantization_config={"quant_method": "awq"})}
    assert form(**said, quantization="awq") == form(**said, quantization="awq_marlin")


def test_other_engines_do_not_use_what_is_rotated_in_two_ways() -> None:
    settings: Any = SimpleNamespace(
        model_config=long_rope_model(4096),
        speculative_config=None,
        load_config=SimpleNamespace(load_format="auto"),
    )
    nothing: Any = None
    with pytest.raises(Incompatible, match="LongRoPE"):
        records_for_all(settings, nothing, {}, nothing)


def test_prompts_with_embeddings_are_not_handed_off() -> None:
    fields = {"lora_request": None, "cache_salt": None, "mm_features": []}
    asked: Any = SimpleNamespace(prompt_token_ids=[0, 0], prompt_embeds=None, **fields)
    assert translate.prompt_identity(asked).tokens == 2
    asked.prompt_embeds = "between the tokens"
    with pytest.raises(Refused, match="embeddings"):
        translate.prompt_identity(asked)


def test_a_hand_off_is_of_an_adapter_with_the_same_files() -> None:
    fields = {"cache_salt": None, "mm_features": [], "prompt_embeds": None}
    lora = LoRARequest("poet", 1, "/adapters/poet")
    request: Any = SimpleNamespace(prompt_token_ids=[1, 2], lora_request=lora, **fields)
    first = translate.prompt_identity(request, "these weights")
    assert translate.prompt_identity(request, "these weights") == first  # control
    assert translate.prompt_identity(request, "other weights") != first
    request.lora_request = LoRARequest("painter", 1, "/adapters/poet")
    assert translate.prompt_identity(request, "these weights") != first


def test_cached_tokens_are_vllms_until_a_request_has_output() -> None:
    stats = PrefillStats()
    stats.set(num_prompt_tokens=100, num_local_cached_tokens=32, num_external_cached_tokens=16)
    request: Any = SimpleNamespace(prefill_stats=stats, num_prompt_tokens=100)
    assert translate.cached_tokens(request) == 48
    for told, kept in ((64, 64), (0, 0), (1000, 100)):  # another engine may say anything
        translate.report_cached_tokens(request, told)
        assert stats.num_cached_tokens == kept
    request.prefill_stats = None  # its output was sent
    translate.report_cached_tokens(request, 5)
    assert translate.cached_tokens(request) == 0


def event_log(*specs: Any) -> EventLog:
    events = SimpleNamespace(enable_kv_cache_events=True)
    groups: Any = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    )
    sizes = tuple(CacheGroup(spec.block_size) for spec in specs)
    return EventLog(SimpleNamespace(kv_events_config=events), sizes, groups)  # type: ignore[arg-type]


def asked(**changes: Any) -> Any:
    plain = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(**{"all_token_ids": list(range(32)), **plain, **changes})


def test_events_of_blocks_that_another_request_asked_for() -> None:
    """A request may come with the id of one that was given up."""
    log = event_log(spec(4))
    hashes = [[b"a" * 32, b"b" * 32]]
    log.promoted(asked(), hashes, [(0, b"of the other one"), (0, hashes[0][1])])
    (event,) = log.take()
    assert event.token_ids == list(range(16, 32))  # type: ignore[attr-defined]


def test_events_say_all_that_a_block_s_hash_is_made_of() -> None:
    """Else an index that computes keys takes salted blocks for plain ones."""
    lora = LoRARequest("poet", 1, "/adapters/poet")
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=20, length=4))
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float32, sliding_window=128
    )
    log = event_log(spec(4), window)
    hashes = [[b"a" * 32, b"b" * 32]] * 2
    request = asked(lora_request=lora, mm_features=[image], cache_salt="tenant")
    blocks = [(0, 0), (1, 1)]
    log.planned(request, hashes, blocks)
    log.planned(asked(), [[b"c" * 32]], [(0, 0)])  # control: nothing but tokens
    log.settled([(0, b"a" * 32), (1, b"b" * 32), (0, b"c" * 32)])
    log.removed([Block(0, b"a" * 32)])
    events: list[Any] = list(log.take())
    assert [event.extra_keys for event in events[:3]] == [
        [("poet", "tenant")],
        [("poet", ("cat", 4))],
        [None],
    ]
    assert [event.kv_cache_spec_kind for event in events[:3]] == [
        "full_attention",
        "sliding_window",
        "full_attention",
    ]
    assert [event.kv_cache_spec_sliding_window for event in events[:2]] == [None, 128]
    assert {event.locality for event in events} == {"LOCAL"} and len(events) == 4
