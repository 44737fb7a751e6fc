"""Keys of blocks in secondary tiers: different things never share one, parts are found again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.keys import (
    MAX_HASH_BYTES,
    PREFIX_BYTES,
    block_key,
    group_of,
    scope_of,
    tenant_in,
    tenant_of,
)
from kvconnect.errors import Misuse
from kvconnect.tiers.backends.base import MAX_KEY_BYTES

PARTS = st.tuples(
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 255),
    st.binary(min_size=1, max_size=MAX_HASH_BYTES),
)


def test_names_do_not_change() -> None:
    """They are on disks: a change makes every stored block unreachable."""
    assert tenant_of("") == scope_of(b"", b"") == bytes(8)
    assert tenant_of("alice").hex() == "86323c6d39e7d9c7"
    assert scope_of(b"lora", b"7").hex() == scope_of(b"lora", b"7", b"").hex() == "e5f34a7d7263499b"
    key = block_key(b"T" * 8 + b"S" * 8, 3, b"hash")
    assert key == b"TTTTTTTTSSSSSSSS\x03hash"


@given(PARTS, PARTS)
def test_keys_are_equal_only_if_all_parts_are(
    one: tuple[bytes, bytes, int, bytes], other: tuple[bytes, bytes, int, bytes]
) -> None:
    def key(tenant: bytes, scope: bytes, group: int, block_hash: bytes) -> bytes:
        return block_key(tenant + scope, group, block_hash)

    assert (key(*one) == key(*other)) == (one == other)
    assert (tenant_in(key(*one)), group_of(key(*one))) == (one[0], one[2])
    assert len(key(*one)) <= MAX_KEY_BYTES


@given(st.text(), st.text())
def test_salts_are_tenants_of_their_own(one: str, other: str) -> None:
    assert (tenant_of(one) == tenant_of(other)) == (one == other)
    assert len(tenant_of(one)) == 8


def test_a_salt_may_be_any_string_that_json_can_bring() -> None:
    assert tenant_of("\ud800") != tenant_of("\udfff")


@given(st.binary(max_size=4), st.binary(max_size=4), st.binary(max_size=4), st.binary(max_size=4))
def test_no_byte_moves_between_adapter_and_generation(
    adapter: bytes, generation: bytes, adapter2: bytes, generation2: bytes
) -> None:
    same = (adapter, generation) == (adapter2, generation2)
    assert (scope_of(adapter, generation) == scope_of(adapter2, generation2)) == same


def test_an_adapter_is_no_generation() -> None:
    assert scope_of(b"ab", b"c") != scope_of(b"a", b"bc")
    assert scope_of(b"a", b"") != scope_of(b"", b"a")


def test_media_are_neither_an_adapter_nor_a_generation() -> None:
    parts = [(b"", b""), (b"a", b""), (b"", b"a"), (b"a", b"a")]
    found = {scope_of(*part, media) for part in parts for media in (b"", b"a", b"b")}
    assert len(found) == 3 * len(parts)


def test_a_salt_and_an_adapter_of_one_name_differ() -> None:
    assert tenant_of("a") != scope_of(b"a", b"") != scope_of(b"", b"a")


@pytest.mark.parametrize(
    ("prefix", "group", "block_hash", "text"),
    [
        (bytes(15), 0, b"h", "16 bytes of tenant and scope"),
        (bytes(17), 0, b"h", "16 bytes of tenant and scope"),
        (bytes(16), -1, b"h", "group -1 does not fit"),
        (bytes(16), 256, b"h", "group 256 does not fit"),
        (bytes(16), 0, b"", "a block hash of 0 bytes"),
        (bytes(16), 0, bytes(65), "a block hash of 65 bytes"),
    ],
)
def test_parts_of_a_wrong_size(prefix: bytes, group: int, block_hash: bytes, text: str) -> None:
    assert block_key(bytes(PREFIX_BYTES), 255, bytes(64))
    with pytest.raises(Misuse, match=text):
        block_key(prefix, group, block_hash)


@pytest.mark.parametrize("key", [b"", bytes(17), bytes(82)])
def test_what_is_no_key_has_no_parts(key: bytes) -> None:
    for part in (group_of, tenant_in):
        with pytest.raises(Misuse, match="has 18 to 81 bytes"):
            part(key)
    assert group_of(bytes(18)) == group_of(bytes(81)) == 0
