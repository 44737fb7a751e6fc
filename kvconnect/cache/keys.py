"""Keys of blocks in secondary tiers.

    key = tenant (8 bytes) + scope (8 bytes) + group (1 byte) + block hash (1..64 bytes)

The tenant is a prefix, so a store can count and remove a tenant's blocks without parsing the rest.
The block's format is not in the key, because a store holds blocks of one format only.
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
    """Return the tenant id of a request's cache salt; all zeros for an empty salt.

    The part before the first dot names the tenant, so that one tenant may have several salts. The
    id does not reveal that part, but a weak one can be guessed from it.
    """
    if not salt:
        return bytes(TENANT_BYTES)
    salt = salt.partition(".")[0] or salt
    # The salt comes from a client's JSON and may hold a lone surrogate, which is not valid UTF-8.
    text = salt.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=TENANT_BYTES, person=b"kvconnect.tenant").digest()


def seed_of(salt: str) -> bytes:
    """Return the parent of the first block name under a salt; empty for an empty salt.

    The block names depend on 32 bytes of hash: a forged salt that collides in the 8 bytes of the
    tenant still finds no blocks.
    """
    if not salt:
        return b""
    text = salt.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=32, person=b"kvconnect.seed").digest()


def scope_of(adapter: bytes, generation: bytes, media: bytes = b"") -> bytes:
    """Return the scope that separates blocks of equal tokens by adapter, weights generation and
    what an engine makes of ``media``, at most 64 bytes.

    All zeros without any of them.
    """
    if not adapter and not generation and not media:
        return bytes(SCOPE_BYTES)
    # The length keeps different pairs with the same concatenation apart.
    text = len(adapter).to_bytes(8, "big") + adapter + generation
    return blake2b(text, digest_size=SCOPE_BYTES, person=b"kvconnect.scope", key=media).digest()


def block_key(prefix: bytes, group: int, block_hash: bytes) -> bytes:
    """Return the key of a block; ``prefix`` is its tenant and scope, 16 bytes.

    Raises:
        Misuse: a part has the wrong size.
    """
    if len(prefix) != PREFIX_BYTES:
        raise Misuse(f"a key begins with {PREFIX_BYTES} bytes of tenant and scope, not {prefix!r}")
    if not 0 <= group < 256:
        raise Misuse(f"group {group} does not fit into a byte")
    if not 0 < len(block_hash) <= MAX_HASH_BYTES:
        raise Misuse(f"a block hash of {len(block_hash)} bytes, of 1 to {MAX_HASH_BYTES}")
    return prefix + _GROUPS[group] + block_hash


def group_of(key: bytes) -> int:
    """Return the KV-cache group in a key. Raises :class:`Misuse` if its length is wrong."""
    return _checked(key)[PREFIX_BYTES]


def tenant_in(key: bytes) -> bytes:
    """Return the tenant id in a key. Raises :class:`Misuse` if its length is wrong."""
    return _checked(key)[:TENANT_BYTES]


def _checked(key: bytes) -> bytes:
    if not _SHORTEST <= len(key) <= _LONGEST:
        raise Misuse(f"a block's key has {_SHORTEST} to {_LONGEST} bytes, not {len(key)}")
    return key
