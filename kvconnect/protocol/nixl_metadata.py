"""The form of what NIXL says of an agent, checked before NIXL reads what another side says.

NIXL and UCX believe the numbers in it: a damaged one ends the process. NIXL 1.4 and later write::

    nixlSerDes|
    Agent = name    Conns = 1    t = backend    c = address of its worker    "" = MemSection
    nixlSecElms = how many of: bknd = backend    nixlDList = nixlSDList    t = kind of memory
    n = how many of: "" = address, length, device, key of a piece of memory

An item is its tag, a length, that many bytes, and "|". Numbers are little-endian and have 8
bytes, but for the kind, which has 4. What UCX's worker address says inside is not checked.
"""

from __future__ import annotations

_LAST_KIND = 1  # CPU memory is 0, that of devices 1
_PLACE = 24  # address, length, device
_LAST_KEY_KIND = 8  # of the kinds of memory that UCX has numbers for
_UNKNOWN_DEVICE = 0xFF
_DISTANCE = 3  # bytes: a device, a latency, a bandwidth
_LAST_ADDRESS_VERSION = 1  # UCX ends the process on a later one


class _Flaw(Exception):
    pass


class _Items:
    """Reads metadata from its start."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise _Flaw("it is cut short")
        self._at += count
        return self._data[self._at - count : self._at]

    def expect(self, data: bytes) -> None:
        if self.take(len(data)) != data:
            raise _Flaw(f"{data.decode()!r} is missing")

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def item(self, tag: bytes) -> bytes:
        self.expect(tag)
        data = self.take(self.number(8))
        self.expect(b"|")
        return data

    def item_number(self, tag: bytes, size: int = 8) -> int:
        data = self.item(tag)
        if len(data) != size:
            raise _Flaw(f"{tag.decode()} has {len(data)} bytes, not {size}")
        return int.from_bytes(data, "little")


def metadata_error(metadata: bytes, agent: str, backend: str) -> str:
    """Return what is wrong with the form of metadata of an agent with one backend, "" if nothing
    is. Takes time in proportion to its size."""
    items = _Items(metadata)
    try:
        items.expect(b"nixlSerDes|")
        if items.item(b"Agent") != agent.encode():
            return "it is another's"
        if items.item_number(b"Conns") != 1 or items.item(b"t") != backend.encode():
            return "it is of other backends"
        address = items.item(b"c")
        if backend == "UCX":
            _check_address(address)
        if items.item(b"") != b"MemSection":
            return "its list of memory is missing"
        for _ in range(items.item_number(b"nixlSecElms")):
            _check_memory(items, backend)
    except _Flaw as error:
        return str(error)
    return f"{items.left} bytes follow its end" if items.left else ""


def _check_memory(items: _Items, backend: str) -> None:
    if items.item(b"bknd") != backend.encode() or items.item(b"nixlDList") != b"nixlSDList":
        raise _Flaw("its list of memory is of another kind")
    if items.item_number(b"t", 4) > _LAST_KIND:
        raise _Flaw("it has memory of an unknown kind")
    for _ in range(items.item_number(b"n")):
        piece = _Items(items.item(b""))
        piece.take(_PLACE)
        if backend == "UCX":
            _check_key(piece)


def _check_address(address: bytes) -> None:
    version = _Items(address).number(1) & 0xF
    if version > _LAST_ADDRESS_VERSION:
        raise _Flaw(f"its worker's address is of version {version}")


def _check_key(key: _Items) -> None:
    """UCX's key: a map of memory domains, a kind, for each domain a size and as many bytes, then
    perhaps a device and its distances from others, up to an unknown one."""
    domains = key.number(8)
    if key.number(1) > _LAST_KEY_KIND:
        raise _Flaw("it has a key for memory of an unknown kind")
    for _ in range(domains.bit_count()):
        key.take(key.number(1))
    if key.left and key.number(1) != _UNKNOWN_DEVICE:
        while key.left and key.number(1) != _UNKNOWN_DEVICE:
            key.take(_DISTANCE - 1)
    if key.left:
        raise _Flaw(f"{key.left} bytes follow a key")
