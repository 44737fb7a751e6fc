"""What stands in front of a record on a shared server, and tells it from others' bytes.

Without a key that is a digest, which finds accidents. With one it is a MAC: who can write to the
server and does not have the key cannot make a record that is used, nor pass one off under another
name. hashlib lets go of the GIL for it.
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

from kvconnect.store.base import Outcome

Keys = Callable[[], tuple[bytes, tuple[bytes, ...]]]
"""Returns the key to seal with, and others that are good, too. Threads: any."""

_FRONT = struct.Struct("<8sI")  # of every head: magic and length of the payload
_DIGEST = struct.Struct("<Q")
_ID_BYTES, _MAC_BYTES = 4, 32


class _What(NamedTuple):
    """What a proof is about, beside the payload: the head before it, and names of the record."""

    front: bytes
    name: str
    key: bytes


class Seal(ABC):
    """Makes and checks heads of ``nbytes``. Records of one kind of seal have a ``scope``, which is
    part of their names: they are not found by who has another. Threads: any."""

    scope: str
    nbytes: int
    _magic: bytes

    def head(self, name: str, key: bytes, payload: memoryview) -> bytes:
        """Return what goes before a payload."""
        front = _FRONT.pack(self._magic, payload.nbytes)
        return front + self._proof(_What(front, name, key), payload)

    def open(self, name: str, key: bytes, value: memoryview, buffer: memoryview) -> Outcome:
        """Put a value's payload into a buffer; OK, SIZE or CORRUPT."""
        if value.nbytes < self.nbytes:
            return Outcome.CORRUPT
        head = bytes(value[: self.nbytes])
        magic, length = _FRONT.unpack_from(head)
        there = value.nbytes - self.nbytes
        if there != buffer.nbytes and magic == self._magic:
            # Put with another length. A longer value may have been cut on its way.
            return Outcome.SIZE if length == there or there > buffer.nbytes else Outcome.CORRUPT
        if magic != self._magic or length != there:
            return Outcome.CORRUPT
        buffer[:] = value[self.nbytes :]  # first: others may be able to write to the value
        what = _What(head[: _FRONT.size], name, key)
        good = self._is_proven(head[_FRONT.size :], what, buffer)
        return Outcome.OK if good else Outcome.CORRUPT

    @abstractmethod
    def _proof(self, what: _What, payload: memoryview) -> bytes: ...

    @abstractmethod
    def _is_proven(self, proof: bytes, what: _What, payload: memoryview) -> bool: ...


class Digest(Seal):
    """XXH3-64 of key and payload."""

    scope = ""
    nbytes = _FRONT.size + _DIGEST.size
    _magic = b"KVC-val\n"

    def _proof(self, what: _What, payload: memoryview) -> bytes:
        # Another key's block is not taken for it.
        return _DIGEST.pack(xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(what.key)))

    def _is_proven(self, proof: bytes, what: _What, payload: memoryview) -> bool:
        return proof == self._proof(what, payload)


class Mac(Seal):
    """Keyed BLAKE2b of name (which says the format), length and payload; before it, which key."""

    scope = "sealed/"
    nbytes = _FRONT.size + _ID_BYTES + _MAC_BYTES
    _magic = b"KVC-mac\n"

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def _proof(self, what: _What, payload: memoryview) -> bytes:
        number, secret = _derived(self._keys()[0])
        return number + _mac(secret, what, payload)

    def _is_proven(self, proof: bytes, what: _What, payload: memoryview) -> bool:
        current, others = self._keys()
        number, mac = proof[:_ID_BYTES], proof[_ID_BYTES:]
        return any(
            hmac.compare_digest(mac, _mac(secret, what, payload))
            for mine, secret in map(_derived, (current, *others))
            if mine == number
        )


@lru_cache(maxsize=16)
def _derived(key: bytes) -> tuple[bytes, bytes]:
    """Return a key's number and what records are sealed with: the key itself has other uses."""
    secret = blake2b(key, digest_size=_MAC_BYTES, person=b"kvc record seal").digest()
    return blake2b(secret, digest_size=_ID_BYTES, person=b"kvc record key").digest(), secret


def _mac(secret: bytes, what: _What, payload: memoryview) -> bytes:
    name = what.name.encode()
    mac = blake2b(what.front, key=secret, digest_size=_MAC_BYTES)
    mac.update(_DIGEST.pack(len(name)) + name)
    mac.update(payload)
    return mac.digest()
