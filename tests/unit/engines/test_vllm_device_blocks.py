"""Blocks of vLLM's pool: which states they still hold."""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvconnect.engines.vllm.device_blocks import DeviceBlocks

HASHES = [[], [b"first", b"second"]]


def test_a_state_that_left_its_block_is_not_there() -> None:
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    names = ((b"second", 1), (b"first", 1), (b"second", 0), None)
    blocks = pool.get_new_blocks(len(names))
    for block, name in zip(blocks, names, strict=True):
        if name is not None:
            key = make_block_hash_with_group_id(BlockHash(name[0]), name[1])
            block.set_block_hash(key, num_tokens=32)
    kept = [(1, 1, block.block_id) for block in blocks]
    found = DeviceBlocks(pool)
    assert found.present(kept, HASHES) == kept[:1], "the others hold something else, or nothing"
    assert found.present([(1, 2, blocks[0].block_id)], HASHES) == [], "of tokens not known yet"


def test_what_is_forgotten_is_found_by_nobody() -> None:
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    [block] = pool.get_new_blocks(1)
    block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"first"), 1), num_tokens=16)
    kept = [(1, 0, block.block_id)]
    assert DeviceBlocks(pool).present(kept, HASHES) == kept
    DeviceBlocks(pool).forget({block.block_id})
    assert DeviceBlocks(pool).present(kept, HASHES) == []
