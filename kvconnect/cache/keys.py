"""The keys of blocks in the tiers below host memory: who may read a block, then which one it is.

    key = tenant (8 bytes) + scope (8 bytes) + group (1 byte) + block hash (1..64 bytes)

What decides who may read a block stands first, so that a store can count and remove a tenant's
blocks without knowing what else a key means. The format of a block is no part of its key: a store
belongs to one format.
"""

from __future__ import annotations

from hashlib import blake2b

from kvconnect.errors import Misuse

TENANT_BYTES = 8
SCOPE_BYTES = 8
PREFIX_BYTES = TENANT_BYTES + SCOPE_BYTES
MAX_HASH_BYTES = 64

_GROUPS = [bytes([group]) for group in range(256)]
_SHORTEST = PREFIX_BYTES + 2
_LONGEST = PREFIX_BYTES + 1 + MAX_HASH_BYTES


def tenant_of(salt: str) -> bytes:
    """Return the tenant that a request's cache salt stands for; without one all zeros.

    The salt itself cannot be read back from it, but can be guessed if it is guessable.
    """
    if not salt:
        return bytes(TENANT_BYTES)
    # A salt comes from outside, as JSON: it may have half a surrogate pair, which is no UTF-8.
    text = salt.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=TENANT_BYTES, person=b"kvconnect.tenant").digest()


def seed_of(salt: str) -> bytes:
    """Return what the names of a tenant's blocks begin with, none without a salt: whoever makes a
    salt for the tenant's 8 bytes still finds nothing."""
    if not salt:
        return b""
    text = salt.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=32, person=b"kvconnect.seed").digest()


def scope_of(adapter: bytes, generation: bytes) -> bytes:
    """Return what else keeps equal tokens apart: the adapter, and the generation of the weights.

    Without both all zeros.
    """
    if not adapter and not generation:
        return bytes(SCOPE_BYTES)
    # With its length, so that no byte can move from one to the other.
    text = len(adapter).to_bytes(8, "big") + adapter + generation
    return blake2b(text, digest_size=SCOPE_BYTES, person=b"kvconnect.scope").digest()


def block_key(prefix: bytes, group: int, block_hash: bytes) -> bytes:
    """Return the key of a block; ``prefix`` is its tenant and scope, 16 bytes.

    Raises :class:`Misuse`: a part has the wrong size.
    """
    if len(prefix) != PREFIX_BYTES:
        raise Misuse(f"a key begins with {PREFIX_BYTES} bytes of tenant and scope, not {prefix!r}")
    if not 0 <= group < 256:
        raise Misuse(f"group {group} does not fit into a byte")
    if not 0 < len(block_hash) <= MAX_HASH_BYTES:
        raise Misuse(f"a block hash of {len(block_hash)} bytes, of 1 to {MAX_HASH_BYTES}")
    return prefix + _GROUPS[group] + block_hash


def group_of(key: bytes) -> int:
    """Return the KV-cache group of a block. Raises :class:`Misuse`: this is no block's key."""
    return _checked(key)[PREFIX_BYTES]


def tenant_in(key: bytes) -> bytes:
    """Return the tenant of a block. Raises :class:`Misuse`: this is no block's key."""
    return _checked(key)[:TENANT_BYTES]


def _checked(key: bytes) -> bytes:
    if not _SHORTEST <= len(key) <= _LONGEST:
        raise Misuse(f"a block's key has {_SHORTEST} to {_LONGEST} bytes, not {len(key)}")
    return key
