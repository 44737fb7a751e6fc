"""Blocks are matched by vLLM's hashes: those cover all that a prompt's KV depends on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvconnect.cache.groups import CacheGroup
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.adapters import Adapters
from kvconnect.engines.vllm.block_names import BlockNames

TOKENS = 4  # of a block
GROUPS = (CacheGroup(TOKENS),)
PROMPT = list(range(12))
SECOND = 1  # the block that differs first, if not block 0


def image(identifier: str, offset: int = 4, length: int = 4) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(None, "image", identifier, place)


def embeddings(changed: int | None = None) -> torch.Tensor:
    made = torch.arange(12.0 * 8).reshape(12, 8)
    if changed is not None:
        made[changed, 3] += 1e-3
    return made


def blocks(**fields: Any) -> tuple[list[bytes], list[bytes]]:
    """Return the names of a prompt's blocks in host memory and in secondary tiers."""
    init_none_hash(sha256)
    given: dict[str, Any] = {"prompt_token_ids": PROMPT, **fields}
    request = Request(
        request_id="r",
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(TOKENS, sha256),
        **given,
    )
    (hashes,) = translate.group_hashes(request, GROUPS, TOKENS)
    wanted = BlockNames(GROUPS, Adapters()).wanted(request, [hashes], 0, 12)
    return list(hashes), [wanted.key(0, name) for name in hashes]


@pytest.mark.parametrize(
    ("one", "other", "first"),
    [
        ({"mm_features": [image("cat")]}, {"mm_features": [image("dog")]}, SECOND),
        ({"mm_features": [image("cat")]}, {}, SECOND),
        ({"mm_features": [image("cat")]}, {"mm_features": [image("cat", 5)]}, SECOND),
        ({"prompt_embeds": embeddings()}, {"prompt_embeds": embeddings(5)}, SECOND),
        ({"prompt_embeds": embeddings()}, {"prompt_embeds": embeddings(0)}, 0),
        ({"prompt_embeds": embeddings()}, {}, 0),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {}, 0),
        ({"lora_request": LoRARequest("a", 1, "/a")}, {}, 0),
        (
            {"lora_request": LoRARequest("a", 1, "/a")},
            {"lora_request": LoRARequest("a", 1, "/b")},
            0,
        ),
    ],
    ids=[
        *("images", "an image", "places", "embeddings", "first embedding", "tokens or embeddings"),
        *("salts", "a salt", "an adapter", "paths of adapters"),
    ],
)
def test_prompts_of_equal_tokens_share_no_block_from_where_they_differ(
    one: dict[str, Any], other: dict[str, Any], first: int
) -> None:
    """Control: before that they share all, and equal prompts share every block."""
    for mine, theirs in zip(blocks(**one), blocks(**other), strict=True):
        assert not set(mine[first:]) & set(theirs)
    assert blocks(**one)[0][:first] == blocks(**other)[0][:first]
    assert blocks(**one)[0] == blocks(**one)[0]


def test_a_prompt_of_embeddings_alone_has_hashes_too() -> None:
    """vLLM has no token ids for it."""
    alone = {"prompt_token_ids": None}
    first, keys = blocks(prompt_embeds=embeddings(), **alone)
    assert len(first) == len(set(first)) == 3
    assert keys == blocks(prompt_embeds=embeddings(), **alone)[1], "equal ones are found again"
    other, _ = blocks(prompt_embeds=embeddings(5), **alone)
    assert [a == b for a, b in zip(first, other, strict=True)] == [True, False, False]
