"""Damaged metadata of a NIXL agent is refused before NIXL reads it, which may end the process."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys

import pytest

from kvconnect.protocol.nixl_metadata import metadata_error

AGENT = "kvconnect-1-0123456789abcdef"
ADDRESS = b"\x00" + bytes(150)
KEY = (1).to_bytes(8, "little") + b"\x00" + b"\x00" + b"\xff"  # one memory domain of 0 bytes
PLACE = bytes(24)

needs_nixl = pytest.mark.skipif(
    not importlib.util.find_spec("nixl_cu12"), reason="nixl-cu12 is not installed"
)


def item(tag: str, data: bytes) -> bytes:
    return tag.encode() + len(data).to_bytes(8, "little") + data + b"|"


def number(tag: str, value: int, size: int = 8) -> bytes:
    return item(tag, value.to_bytes(size, "little"))


def memory(*keys: bytes, kind: int = 0, backend: str = "UCX") -> bytes:
    parts = [item("bknd", backend.encode()), item("nixlDList", b"nixlSDList")]
    parts += [number("t", kind, 4), number("n", len(keys))]
    return b"".join(parts + [item("", PLACE + key) for key in keys])


def metadata(
    *sections: bytes, address: bytes = ADDRESS, backend: str = "UCX", agent: str = AGENT
) -> bytes:
    parts = [b"nixlSerDes|", item("Agent", agent.encode()), number("Conns", 1)]
    parts += [item("t", backend.encode()), item("c", address), item("", b"MemSection")]
    return b"".join([*parts, number("nixlSecElms", len(sections)), *sections])


GOOD = metadata(memory(KEY), memory(KEY, KEY, kind=1))
DOMAINS = (0b101).to_bytes(8, "little") + b"\x01" + b"\x02ab" + b"\x03abc"


@pytest.mark.parametrize(
    "data",
    [
        GOOD,
        metadata(),
        metadata(memory(DOMAINS)),  # as UCX 1.19 writes it
        metadata(memory(DOMAINS + b"\xff")),
        metadata(memory(DOMAINS + b"\x02" + b"\x01ab" * 3)),
        metadata(memory(DOMAINS + b"\x02" + b"\x01ab" * 3 + b"\xff")),
        metadata(memory(KEY), address=b"\x11" + bytes(99)),
    ],
)
def test_what_is_whole_is_taken(data: bytes) -> None:
    assert metadata_error(data, AGENT, "UCX") == ""


def test_what_another_backend_says_of_itself_is_its_own() -> None:
    own = memory(b"any", kind=1, backend="LIBFABRIC")
    assert (
        metadata_error(metadata(own, address=b"\xff", backend="LIBFABRIC"), AGENT, "LIBFABRIC")
        == ""
    )


def test_what_is_cut_or_goes_on_is_refused() -> None:
    assert all(metadata_error(GOOD[:end], AGENT, "UCX") for end in range(len(GOOD)))
    assert metadata_error(GOOD + b"|", AGENT, "UCX") == "1 bytes follow its end"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (metadata(agent="kvconnect-2"), "it is another's"),
        (metadata(backend="GDS"), "it is of other backends"),
        (GOOD.replace(number("Conns", 1), number("Conns", 2)), "it is of other backends"),
        (GOOD.replace(number("Conns", 1), number("Conns", 1, 4)), "Conns has 4 bytes, not 8"),
        (metadata(address=b"\x08" + bytes(99)), "its worker's address is of version 8"),
        (metadata(address=b""), "it is cut short"),
        (metadata(memory(KEY, kind=2)), "it has memory of an unknown kind"),
        (metadata(memory(KEY, backend="GDS")), "its list of memory is of another kind"),
        (metadata(memory(KEY[:9])), "it is cut short"),
        (metadata(memory(b"\xff" * 8 + KEY[8:])), "it is cut short"),
        (
            metadata(memory(KEY[:8] + b"\x09" + KEY[9:])),
            "it has a key for memory of an unknown kind",
        ),
        (metadata(memory(KEY + b"ab")), "2 bytes follow a key"),
        (metadata(memory(DOMAINS + b"\x02\x01")), "it is cut short"),
    ],
)
def test_what_is_damaged_is_refused(data: bytes, why: str) -> None:
    assert metadata_error(data, AGENT, "UCX") == why


def test_any_bytes_have_an_answer() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        data = bytearray(GOOD)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        metadata_error(bytes(data), AGENT, "UCX")
        assert metadata_error(rng.randbytes(rng.randrange(300)), AGENT, "UCX")


# NIXL itself, in processes that it may end ------------------------------------------------------

CHILD = """
import os, random, sys
import msgspec
from kvconnect.errors import TransferFailed
from kvconnect.testing.page_memory import PageMemory
from kvconnect.transport.nixl import agent as agents

if sys.argv[1] == "unchecked":
    agents.metadata_error = lambda *_: "not looked at"  # so its form counts as unknown
ours, theirs = PageMemory(1 << 16), PageMemory(1 << 16)
here = agents.NixlAgent("UCX", ours.regions(), local=True)
there = agents.NixlAgent("UCX", theirs.regions(), local=True)

def says(offer):
    try:
        here.remove_peer(here.add_peer(offer))
        return "met"
    except TransferFailed as error:
        return str(error)

def offered(data, agent=there.offer.agent):
    return msgspec.structs.replace(there.offer, metadata=bytes(data), agent=agent)

data = bytearray(there.offer.metadata)
address = data.index(b"|c") + 10
last = address + int.from_bytes(data[address - 8 : address], "little")
kind = data.index(b"nixlSDList|t") + 20
"""

KIND = "data[kind : kind + 4] = b'\\xff\\xff\\xff\\x7f'\n"
VERSION = "data[address] |= 8\n"
SAYS = "print(says(offered(data)), flush=True)\nos._exit(0)\n"

MANY = """
rng = random.Random(5)
places = [place for place in range(len(data)) if not address < place < last]
answers = []
for number in range(400):
    # A name of its own each: NIXL keeps what it has read of one.
    name = f"{number:0{len(there.offer.agent)}d}"
    bad = data.replace(there.offer.agent.encode(), name.encode())
    for _ in range(rng.randrange(1, 6)):
        bad[rng.choice(places)] = rng.randrange(256)
    answers.append(says(offered(bad, name)))
refused = sum(each.startswith("NIXL cannot read the other side's metadata") for each in answers)
print(refused, answers.count("met"), says(there.offer), flush=True)
os._exit(0)
"""


def child(code: str, how: str = "checked") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", CHILD + code, how]
    return subprocess.run(command, capture_output=True, timeout=120, check=False)


@needs_nixl
def test_nixl_writes_the_form_that_is_checked() -> None:
    ended = child("print(here._form_is_known, says(there.offer), flush=True)\nos._exit(0)\n")
    assert b"True met" in ended.stdout, ended.stderr


@needs_nixl
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (KIND, b"it has memory of an unknown kind"),
        (VERSION, b"its worker's address is of version 8"),
    ],
)
def test_damage_that_ends_a_process_is_refused(damage: str, why: bytes) -> None:
    ended = child(damage + SAYS)
    assert (ended.returncode, why in ended.stdout) == (0, True), ended.stderr
    assert child(damage + SAYS, "unchecked").returncode < 0  # the control: by a signal


@needs_nixl
def test_no_damage_outside_of_the_workers_address_ends_a_process() -> None:
    ended = child(MANY)
    assert ended.returncode == 0, ended.stderr
    refused, met, last = ended.stdout.split()[-3:]
    assert int(refused) + int(met) == 400
    assert int(refused) > 300
    assert last == b"met"
