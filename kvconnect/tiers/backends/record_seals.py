"""The head of a record on a shared server, which proves what is in the record.

Without a key it has a digest, which detects accidents. With a key it has a MAC: a client without
the key can neither forge a record nor store a valid one under another name. hashlib releases the
GIL.
"""

from __future__ import annotations

import hmac
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import xxhash

from kvconnect.tiers.backends.base import (
    BlockOutcome,
)

RecordKeys = Callable[[], tuple[bytes, tuple[bytes, ...]]]
"""Returns the key to seal with, and other valid keys. Thread-safe."""

_FRONT = struct.Struct("<8sI")  # of every head: magic, length of the payload
_DIGEST = struct.Struct("<Q")
_ID_BYTES, _MAC_BYTES = 4, 32


class _SealedFields(NamedTuple):
    """Fields that a proof covers beside the payload: start of the head, name, key."""

    front: bytes
    name: str
    key: bytes


class Seal(ABC):
    """Makes and checks heads of ``nbytes`` bytes. Thread-safe.

    ``scope`` is part of the names of records, so stores with different seals do not see each
    other's records.
    """

    scope: str
    nbytes: int
    _magic: bytes

    def head(self, name: str, key: bytes, payload: memoryview) -> bytes:
        """Return the head of a payload."""
        front = _FRONT.pack(self._magic, payload.nbytes)
        return front + self._proof(_SealedFields(front, name, key), payload)

    def open(self, name: str, key: bytes, value: memoryview, buffer: memoryview) -> BlockOutcome:
        """Copy a value's payload into a buffer; return OK, SIZE or CORRUPT."""
        if value.nbytes < self.nbytes:
            return BlockOutcome.CORRUPT
        head = bytes(value[: self.nbytes])
        magic, length = _FRONT.unpack_from(head)
        there = value.nbytes - self.nbytes
        if there != buffer.nbytes and magic == self._magic:
            # Stored with another length. A longer value may have been cut by load.
            return (
                BlockOutcome.SIZE
                if length == there or there > buffer.nbytes
                else BlockOutcome.CORRUPT
            )
        if magic != self._magic or length != there:
            return BlockOutcome.CORRUPT
        buffer[:] = value[self.nbytes :]  # copy first, since others may still write to the value
        fields = _SealedFields(head[: _FRONT.size], name, key)
        good = self._is_proven(head[_FRONT.size :], fields, buffer)
        return BlockOutcome.OK if good else BlockOutcome.CORRUPT

    @abstractmethod
    def _proof(self, fields: _SealedFields, payload: memoryview) -> bytes: ...

    @abstractmethod
    def _is_proven(self, proof: bytes, fields: _SealedFields, payload: memoryview) -> bool: ...


class Digest(Seal):
    """XXH3-64 of key and payload."""

    scope = ""
    nbytes = _FRONT.size + _DIGEST.size
    _magic = b"KVC-val\n"

    def _proof(self, fields: _SealedFields, payload: memoryview) -> bytes:
        # The key is included, so the block of another key does not match.
        return _DIGEST.pack(xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(fields.key)))

    def _is_proven(self, proof: bytes, fields: _SealedFields, payload: memoryview) -> bool:
        return proof == self._proof(fields, payload)


class Mac(Seal):
    """Key number, and keyed BLAKE2b of name (with the format), length and payload."""

    scope = "sealed/"
    nbytes = _FRONT.size + _ID_BYTES + _MAC_BYTES
    _magic = b"KVC-mac\n"

    def __init__(self, keys: RecordKeys) -> None:
        self._keys = keys

    def _proof(self, fields: _SealedFields, payload: memoryview) -> bytes:
        number, secret = _derived(self._keys()[0])
        return number + _mac(secret, fields, payload)

    def _is_proven(self, proof: bytes, fields: _SealedFields, payload: memoryview) -> bool:
        current, others = self._keys()
        number, mac = proof[:_ID_BYTES], proof[_ID_BYTES:]
        return any(
            hmac.compare_digest(mac, _mac(secret, fields, payload))
            for mine, secret in map(_derived, (current, *others))
            if mine == number
        )


@lru_cache(maxsize=16)
def _derived(key: bytes) -> tuple[bytes, bytes]:
    """Return a key's number and the secret derived from it, since the key has other uses too."""
    secret = blake2b(key, digest_size=_MAC_BYTES, person=b"kvc record seal").digest()
    return blake2b(secret, digest_size=_ID_BYTES, person=b"kvc record key").digest(), secret


def _mac(secret: bytes, fields: _SealedFields, payload: memoryview) -> bytes:
    name = fields.name.encode()
    mac = blake2b(fields.front, key=secret, digest_size=_MAC_BYTES)
    mac.update(_DIGEST.pack(len(name)) + name)
    mac.update(payload)
    return mac.digest()
