"""What vLLM's blocks are called in secondary tiers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.keys import block_key, seed_of
from kvconnect.cache.record_format import page_names
from kvconnect.engines.vllm.adapters import Adapters
from kvconnect.engines.vllm.block_names import BlockNames, named_by_tokens, shared_pages
from kvconnect.errors import ConfigError
from kvconnect.settings import Settings
from kvconnect.settings.sharing import PeerSettings

SIZE = 4
FULL = (CacheGroup(SIZE),)
ZEROS = bytes(16)


def request(tokens: list[int], **fields: Any) -> Any:
    known = {"request_id": "r", "cache_salt": None, "lora_request": None, "mm_features": []}
    prompt = {"prompt_token_ids": tokens, "prompt_embeds": None, "all_token_ids": tokens}
    return SimpleNamespace(**{**known, **prompt, **fields})


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    """vLLM's own names of full blocks."""
    return [
        f"{salt}{tokens[: end + SIZE]}".encode()[-64:] for end in range(0, len(tokens) - 3, SIZE)
    ]


def keys(names: BlockNames, asked: Any, salt: str = "") -> list[bytes]:
    hashes = hashes_of(asked.all_token_ids, salt)
    wanted = names.wanted(asked, [hashes], 0, len(hashes) * SIZE)
    return [wanted.key(0, block_hash) for block_hash in hashes]


def test_blocks_go_by_their_tokens_as_the_request_grows() -> None:
    names, tokens = BlockNames(FULL, Adapters()), list(range(100, 119))
    found = []
    for length in (9, 10, 12, 19):
        found = keys(names, request(tokens[:length]))
    assert found == [block_key(ZEROS, 0, name) for name in page_names(tokens, SIZE)]
    assert len(found) == 4
    names.forget("r")
    assert keys(names, request(tokens)) == found
    assert keys(names, request([1, *tokens[1:]])) != found, "it has other tokens now"
    assert keys(names, request(tokens)) == found


def test_pages_of_blocks_are_the_blocks_of_other_engines() -> None:
    """As the request grows, and when its tokens change; images have no pages."""
    tokens = list(range(10, 26))
    for salt in ("", "a"):
        names = BlockNames(FULL, Adapters(), 2)
        for start, length in (([], 5), ([], 6), ([], 8), ([1], 12), ([1], 14), ([1, 2], 16)):
            now = [*start, *tokens[len(start) : length]]
            asked = request(now, cache_salt=salt)
            hashes = hashes_of(now, salt)
            wanted = names.wanted(asked, [hashes], 0, length)
            found = dict(wanted.page_keys((0, it) for it in hashes))
            assert list(found) == [wanted.key(0, it) for it in hashes]
            ends = [b"%d" % end for end in range(2, length + 1, 2)]
            small = BlockNames((CacheGroup(2),), Adapters()).wanted(asked, [ends], 0, length)
            theirs = [small.key(0, end) for end in ends]
            pages = zip(theirs[::2], theirs[1::2], strict=False)
            assert list(found.values()) == list(pages)
        names.forget("r")
        assert not names._page_names
        images = names.wanted(request(tokens, mm_features=["an image"]), [[b"h"]], 0, 4)
        assert not dict(images.page_keys([(0, b"h")]))
    one = BlockNames(FULL, Adapters())  # control: blocks that are one page
    hashes = hashes_of(tokens)
    assert not one.wanted(request(tokens), [hashes], 0, 4).page_names and not one._page_names


def test_page_sizes_that_cannot_be_used() -> None:
    def pages(tokens: int, *groups: CacheGroup) -> int:
        asked = PeerSettings(ask=("10.0.0.1:1",), page_tokens=tokens)
        return shared_pages(Settings(cache_peers=asked), groups)

    assert [pages(tokens, *FULL) for tokens in (0, 1, 2, 4)] == [1, 4, 2, 1]
    several = (CacheGroup(SIZE), CacheGroup(SIZE, window=8))
    assert pages(0, *several) == 1
    for tokens, groups in ((3, FULL), (8, FULL), (2, several), (4, several)):
        with pytest.raises(ConfigError, match=f"page_tokens={tokens} "):
            pages(tokens, *groups)
    assert shared_pages(Settings(), FULL) == 1


def test_images_and_several_kinds_of_attention_go_by_vllms_hashes() -> None:
    names, tokens = BlockNames(FULL, Adapters()), list(range(8))
    plain = [block_key(ZEROS, 0, block_hash) for block_hash in hashes_of(tokens)]
    assert keys(names, request(tokens, mm_features=["an image"])) == plain
    assert keys(names, request(tokens, prompt_token_ids=None)) == plain
    assert keys(names, request(tokens, prompt_embeds="between the tokens")) == plain
    several = (CacheGroup(SIZE), CacheGroup(SIZE, window=8))
    assert not named_by_tokens(several) and not named_by_tokens(several[1:])
    names = BlockNames(several, Adapters())
    wanted = names.wanted(request(tokens), [hashes_of(tokens)] * 2, 0, 8)
    assert wanted.key(1, b"x") == block_key(ZEROS, 1, b"x")


def test_salts_adapters_and_generations_share_nothing() -> None:
    tokens = list(range(8))
    names = BlockNames(FULL, Adapters())
    lora = LoRARequest("l", 1, "/nowhere")
    asked = [
        request(tokens),
        request(tokens, request_id="a", cache_salt="a"),
        request(tokens, request_id="b", cache_salt="b"),
        request(tokens, request_id="c", lora_request=lora),
    ]
    found = [keys(names, each, each.cache_salt or "") for each in asked]
    names.reset(b"new weights")
    found += [keys(names, each, each.cache_salt or "") for each in asked]
    assert len({key for row in found for key in row}) == len(found) * 2
    # The tenant's 8 bytes are not all that keeps salts apart.
    assert len({row[0][17:] for row in found[:3]}) == 3
    assert seed_of("") == b"" and len(seed_of("a")) == 32
    assert seed_of("\ud800")


def test_an_adapter_is_its_files(tmp_path: Path) -> None:
    """Whatever it is called."""
    tokens = list(range(8))
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(100))
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 1}')
    names = BlockNames(FULL, Adapters())

    def found(names: BlockNames, number: int) -> list[bytes]:
        lora = LoRARequest(f"l{number}", number, str(tmp_path))
        return keys(names, request(tokens, request_id=str(number), lora_request=lora))

    first = found(names, 1)
    assert found(BlockNames(FULL, Adapters()), 2) == first
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 2}')
    second = found(names, 2)
    assert second != first
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes([1] * 100))
    third = found(names, 3)
    assert third not in (first, second) and found(BlockNames(FULL, Adapters()), 3) == third
    (tmp_path / "adapter_model.safetensors").unlink()
    unknown = [found(BlockNames(FULL, Adapters()), 4) for _ in range(2)]
    assert unknown[0] != unknown[1], "for each engine alone"
