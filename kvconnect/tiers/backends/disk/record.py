"""The disk format. Bytes read from the disk are used only after their digest matches.

A segment is a file of whole pages::

    | head | record | record | ... |        record: | head | payload, padded to whole pages |

Each head fills a page and has a digest of its fields. Each record's head has the segment's random
identity, so no payload and no page of an older file can be mistaken for a record. Beside a full
segment lies its *index*: the keys with their pages, lengths and times as columns, and a digest. The
index can be rebuilt from the segment.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

PAGE = 4096
VERSION = 1
LAST_SECOND = 2**32 - 1
ID_BYTES = 16
_SEGMENT = struct.Struct(f"<8sII{ID_BYTES}sI65p")
_RECORD = struct.Struct(f"<8s{ID_BYTES}sIIQB65p256p")
_INDEX = struct.Struct(f"<8sI{ID_BYTES}sIIIH")
_DIGEST = struct.Struct("<Q")
_SEGMENT_MAGIC, _RECORD_MAGIC, _INDEX_MAGIC = b"KVC-seg\n", b"KVC-rec\n", b"KVC-idx\n"


class SegmentHead(NamedTuple):
    """The first page of a segment. ``created`` in seconds since 1970."""

    identity: bytes
    created: int
    fingerprint: bytes


class RecordHead(NamedTuple):
    """Head of a record. ``length`` of the payload in bytes, ``seconds`` since 1970, ``digest`` is
    XXH3-64 of the payload. Of a deleted record (not ``live``) only the length is valid."""

    key: bytes
    fingerprint: bytes
    length: int
    seconds: int
    digest: int
    live: bool = True


class Columns(NamedTuple):
    """Records of one segment in page order. ``pages`` counts from the segment's start."""

    keys: list[bytes]
    pages: array[int]
    lengths: array[int]
    seconds: array[int]

    @classmethod
    def empty(cls) -> Columns:
        """Return columns without a row."""
        return cls([], array("I"), array("I"), array("I"))

    def add(self, page: int, head: RecordHead) -> None:
        """Append a row."""
        self.keys.append(head.key)
        self.pages.append(page)
        self.lengths.append(head.length)
        self.seconds.append(head.seconds)

    def pick(self, rows: Sequence[int]) -> Columns:
        """Return some of the rows."""
        keys, *columns = self
        return Columns(
            [keys[row] for row in rows],
            *(array("I", [column[row] for row in rows]) for column in columns),
        )


def pages_of(length: int) -> int:
    """Return the pages of a record with ``length`` bytes of payload."""
    return 1 + -(-length // PAGE)


def index_bytes(keys: Iterable[bytes]) -> int:
    """Return the maximum bytes of the index of a segment with these keys."""
    return _INDEX.size + _DIGEST.size + sum(13 + len(key) for key in keys)


def pack_segment(head: SegmentHead) -> bytes:
    """Return the first page of a segment."""
    packed = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, PAGE, *head)
    return _sealed(packed).ljust(PAGE, b"\0")


def unpack_segment(page: bytes | memoryview) -> SegmentHead | None:
    """Return a segment's head, None if it is damaged or has another version."""
    if not _intact(page, _SEGMENT.size):
        return None
    magic, version, page_bytes, *head = _SEGMENT.unpack_from(page)
    if (magic, version, page_bytes) != (_SEGMENT_MAGIC, VERSION, PAGE):
        return None
    return SegmentHead(*head)


def pack_record(head: RecordHead, identity: bytes, into: memoryview) -> None:
    """Write a record's head to the beginning of a page whose rest is zero."""
    packed = _RECORD.pack(
        _RECORD_MAGIC,
        identity,
        head.length,
        head.seconds,
        head.digest,
        head.live,
        head.fingerprint,
        head.key,
    )
    into[: _RECORD.size + _DIGEST.size] = _sealed(packed)


def unpack_record(page: bytes | memoryview, identity: bytes) -> RecordHead | None:
    """Return the head of a record in the segment with this identity, None for other bytes."""
    if bytes(page[:8]) != _RECORD_MAGIC or not _intact(page, _RECORD.size):
        return None
    _, found, length, seconds, digest, live, fingerprint, key = _RECORD.unpack_from(page)
    if found != identity or not key or not length:
        return None
    return RecordHead(key, fingerprint, length, seconds, digest, bool(live))


def pack_index(identity: bytes, columns: Columns, used: int) -> bytes:
    """Return a segment's index. ``used`` is the segment's number of pages."""
    keys = columns.keys
    width = len(keys[0]) if keys and len({len(key) for key in keys}) == 1 else 0
    blob = b"".join(keys)
    head = _INDEX.pack(_INDEX_MAGIC, VERSION, identity, used, len(keys), len(blob), width)
    lengths = b"" if width else bytes(len(key) for key in keys)
    rows = (column.tobytes() for column in columns[1:])
    return _sealed(b"".join((head, *rows, lengths, blob)))


def unpack_index(data: bytes, identity: bytes) -> tuple[Columns, int] | None:
    """Return a segment's columns and its pages, None if the index is damaged or of another
    segment."""
    if len(data) < _INDEX.size + _DIGEST.size or not _intact(data, len(data) - _DIGEST.size):
        return None
    magic, version, found, used, count, blob_bytes, width = _INDEX.unpack_from(data)
    if (magic, version, found) != (_INDEX_MAGIC, VERSION, identity):
        return None
    sizes = [4 * count] * 3 + [0 if width else count, blob_bytes]
    if len(data) != _INDEX.size + sum(sizes) + _DIGEST.size:
        return None
    parts, at = [], _INDEX.size
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    pages, lengths, seconds = (array("I", part) for part in parts[:3])
    keys = _split(parts[4], width, count, parts[3])
    if keys is None or not _lie_within(pages, lengths, used):
        return None
    return Columns(keys, pages, lengths, seconds), used


def _split(blob: bytes, width: int, count: int, lengths: bytes) -> list[bytes] | None:
    """Return ``count`` keys of one width or of these lengths; None if their lengths do not add
    up."""
    if (width * count if width else sum(lengths)) != len(blob) or 0 in lengths:
        return None
    if width:
        return [key for (key,) in struct.iter_unpack(f"{width}s", blob)]
    keys, at = [], 0
    for length in lengths:
        keys.append(blob[at : at + length])
        at += length
    return keys


def _lie_within(pages: array[int], lengths: array[int], used: int) -> bool:
    """Return whether all records lie between the head and the end of the ``used`` pages."""
    if not pages:
        return True
    ends = max(page + -(-length // PAGE) for page, length in zip(pages, lengths, strict=True))
    return min(pages) > 0 and min(lengths) > 0 and ends < used


def _sealed(packed: bytes) -> bytes:
    return packed + _DIGEST.pack(xxhash.xxh3_64_intdigest(packed))


def _intact(data: bytes | memoryview, nbytes: int) -> bool:
    """Return whether the digest after the first ``nbytes`` bytes matches them."""
    (digest,) = _DIGEST.unpack_from(data, nbytes)
    return bool(xxhash.xxh3_64_intdigest(data[:nbytes]) == digest)
