"""What engines make of media and adapters: with other settings, prompts have other names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import LoRAConfig, MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvconnect.cache.groups import CacheGroup
from kvconnect.engines.vllm.adapters import Adapters
from kvconnect.engines.vllm.block_names import BlockNames
from kvconnect.engines.vllm.prompt_settings import DEFAULTS, prompt_settings

TOKENS = 4  # of a block
HASHES = [bytes([number]) * 32 for number in range(3)]


def image() -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", "cat", PlaceholderRange(offset=0, length=8))


def asked(req_id: str = "r", **fields: Any) -> Request:
    return Request(req_id, list(range(12)), SamplingParams(max_tokens=1), None, **fields)


def engine(folder: Path, lora: LoRAConfig | None = None, **media: Any) -> Adapters:
    """Return what an engine knows of its prompts; ``media``: its settings of media."""
    own = MultiModalConfig(**media)
    model = SimpleNamespace(model=str(folder), revision=None, multimodal_config=own)
    config: Any = SimpleNamespace(model_config=model, lora_config=lora)
    return Adapters(prompt_settings(config))


def named(names: BlockNames, request: Request) -> list[bytes]:
    wanted = names.wanted(request, [HASHES], 0, len(HASHES) * TOKENS)
    return [wanted.key(0, block_hash) for block_hash in HASHES]


def keys(seen: Adapters, request: Request) -> list[bytes]:
    return named(BlockNames((CacheGroup(TOKENS),), seen), request)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"mm_processor_kwargs": {"max_pixels": 1003520}}),
        (
            {"mm_processor_kwargs": {"max_pixels": 501760}},
            {"mm_processor_kwargs": {"max_pixels": 1003520}},
        ),
        ({}, {"video_pruning_rate": 0.5}),
        (
            {"video_pruning_rate": 0.5},
            {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        ),
        ({}, {"mm_encoder_attn_dtype": "fp8"}),
    ],
)
def test_media_of_other_resolutions_are_other_blocks(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """vLLM's hash of an image and its placeholder tokens are the same in both engines."""
    first, second = engine(tmp_path, **one), engine(tmp_path, **other)
    picture, text = asked(mm_features=[image()]), asked()
    assert not set(keys(first, picture)) & set(keys(second, picture))
    assert first.prompt_identity(picture) != second.prompt_identity(picture)
    # Control: engines of one kind agree, and all agree on text.
    again = engine(tmp_path, **one)
    assert keys(first, picture) == keys(again, picture)
    assert first.prompt_identity(picture) == again.prompt_identity(picture)
    assert keys(first, text) == keys(second, text) == keys(Adapters(), text)
    assert first.prompt_identity(text) == second.prompt_identity(text)


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_a_processor_s_file_counts(tmp_path: Path, name: str) -> None:
    picture = asked(mm_features=[image()])
    none = keys(engine(tmp_path), picture)
    (tmp_path / "README.md").write_text("of no processor")
    assert keys(engine(tmp_path), picture) == none
    (tmp_path / name).write_text('{"max_pixels": 501760}')
    first = keys(engine(tmp_path), picture)
    (tmp_path / name).write_text('{"max_pixels": 1003520}')
    second = keys(engine(tmp_path), picture)
    assert len({none[0], first[0], second[0]}) == 3
    copy = tmp_path / "copy"  # control: the folder's name does not count
    copy.mkdir()
    (copy / name).write_text('{"max_pixels": 1003520}')
    assert keys(engine(copy), picture) == second


def test_where_a_processor_runs_does_not_count(tmp_path: Path) -> None:
    given = engine(tmp_path, mm_processor_kwargs={"device": "cpu"})
    assert given.settings == engine(tmp_path).settings != DEFAULTS


def test_a_session_that_gets_an_image_later_is_one_with_media(tmp_path: Path) -> None:
    seen, request = engine(tmp_path), asked()
    names = BlockNames((CacheGroup(TOKENS),), seen)
    before = named(names, request)
    request.mm_features.append(image())
    assert named(names, request) == keys(seen, asked(mm_features=[image()])) != before


def test_an_adapter_on_other_modules_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(100))
    (tmp_path / "adapter_config.json").write_text("{}")
    poet = LoRARequest("poet", 1, str(tmp_path))
    limits: list[list[str] | None] = [None, [], ["o_proj"], ["o_proj", "qkv_proj"]]
    engines = [engine(tmp_path, LoRAConfig(target_modules=limit)) for limit in limits]
    request = asked(lora_request=poet)
    assert len({each.scope(poet) for each in engines}) == len(limits)
    assert len({each.prompt_identity(request) for each in engines}) == len(limits)
    # Control: without a limit as ever, in any order, and no prompt of the model itself.
    assert engines[0].scope(poet) == Adapters().scope(poet)
    assert engines[0].prompt_identity(request) == Adapters().prompt_identity(request)
    turned = engine(tmp_path, LoRAConfig(target_modules=["qkv_proj", "o_proj"]))
    assert turned.scope(poet) == engines[3].scope(poet)
    assert len({each.prompt_identity(asked()) for each in engines}) == 1


def test_a_model_without_media_and_adapters_has_no_such_settings() -> None:
    model = SimpleNamespace(model="/nowhere", revision=None, multimodal_config=None)
    config: Any = SimpleNamespace(model_config=model, lora_config=None)
    assert prompt_settings(config) == DEFAULTS
