"""Broken inputs against everything that reads what another process or a client wrote.

::

    python -m tests.fuzz.fuzz_codec --runs 1000000 --seed 1

Each run gives one decoder either random bytes or a valid input with a few changes. Only errors of
the library may come out, and a decoder may not take much memory for a small input. The same seed
gives the same inputs; what fails is shown so that it can become a test.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import json
import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable

import msgspec

from kvconnect.doctor import exchange
from kvconnect.errors import KVConnectError, Misuse, Refused
from kvconnect.protocol import (
    cache_messages,
    codec,
    frames,
    handoff_request,
    hello,
    messages,
    nixl_messages,
    reads,
    tickets,
)
from kvconnect.protocol.auth import ClientAuth, Opening, ServerAuth
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.negotiation import negotiate
from kvconnect.protocol.prompts import NO_PROMPT
from kvconnect.types import Endpoint, Rank
from tests.fuzz import readers

MOST_BYTES = 8 << 20
"""Memory that one decoder may take at its worst: a few times the longest message."""

KEY = b"fuzz"
NOW = 1_000_000.0
TRANSFER = bytes(16)

GROUP = messages.GroupHello(
    block_tokens=32,
    page_tokens=16,
    layers=["layers.0", "layers.1"],
    kv_heads=8,
    heads=8,
    row_bytes=64,
    order="HNC",
    splittable=True,
)
HELLO = messages.HandoffHello(
    software="fuzz",
    engine_id="engine",
    epoch=1,
    rank=Rank(0, 1, 0, 1),
    identity=Identity(weights=Weights(files="f", version="v")),
    format={"model": "m", "version": 1},
    groups=[GROUP],
)
MESSAGES = [
    HELLO,
    hello.Reject("model", "differs"),
    messages.ReadRequest(1, TRANSFER, True, [(0, 0, 5), (1, 2, 3)], NO_PROMPT),
    reads.Cancel(1),
    messages.ReadDone(1),
    messages.Fail(1, "gone", "expired"),
    messages.Alive([1, 2, 3]),
    messages.Renew([TRANSFER]),
    messages.Decline(TRANSFER),
    messages.Probe(read_id=reads.PROBE_READ_ID),
]
KEYS = [bytes(18), bytes(49)]
CACHE_MESSAGES: list[cache_messages.CacheMessage] = [
    cache_messages.CacheHello(
        engine=bytes(16), format=b"format", layout=b"layout", groups=[{0: 4096, 1: 4096}]
    ),
    cache_messages.HostTierAddresses(pid=1, nonce=4096, slots=8192, slot_bytes=4096, versions=64),
    cache_messages.Ask(1, KEYS),
    cache_messages.Found(1, bytes([1, 0]), [cache_messages.Place(1, 2, 3)]),
    cache_messages.Fetch(2, 0, [0, 1], KEYS),
    cache_messages.Sent(2, bytes([1, 2])),
    reads.Cancel(2),
    hello.Reject("weights", "others"),
]
DOCTOR_MESSAGES: list[exchange.DoctorMessage] = [
    exchange.DoctorHello(area_bytes=4096, device="cpu"),
    exchange.TransferRequest(1, 4096, [0, 5]),
    exchange.CpuRequest(),
    exchange.CpuSeconds(1.5),
    exchange.SocketTestRequest(2, 1 << 20),
    exchange.SocketTestPort(7000, bytes(16)),
    hello.Reject("other", "busy"),
]
OFFER = nixl_messages.NixlOffer(backend="UCX", version="1.5.1", agent="a", metadata=b"opaque")
UNIT = nixl_messages.UnitLocation(
    address=4096, nbytes=4096, device=-1, phases=1, block_bytes=8, segments=bytes(24)
)
NIXL_MESSAGES: list[nixl_messages.NixlMessage] = [
    nixl_messages.UnitLocations(number=0, first=0, units=[UNIT]),
    nixl_messages.Destinations(read_id=1, units=0, spans=[(0, 0)], ids=[bytes(8)]),
    nixl_messages.UseTcp(read_id=1),
    nixl_messages.PagesWritten(
        read_id=1, unit=0, first=0, count=1, nbytes=8, number=1, seconds=0.5, digests=bytes(8)
    ),
    nixl_messages.StopWriting(read_id=1),
    nixl_messages.WritesStopped(read_id=1),
]
TICKET = tickets.Ticket(
    transfer=TRANSFER,
    engine_id="engine",
    epoch=1,
    endpoints=(Endpoint(0, 0, "10.0.0.1", 7000),),
    tp=1,
    pp=1,
    tokens=9,
    expires=NOW,
)
TICKET_BODY = msgspec.msgpack.encode(TICKET)
SHARE_BODY = msgspec.msgpack.encode(
    msgspec.structs.replace(TICKET, transfer=b"", tokens=0, scope=tickets.Scope.SHARE)
)
HINTS: list[dict[str, object]] = [
    {"pin": 600, "tokens": 64},
    {"retain": 0.5, "receipt": True},
    {"drop": True},
    {"demote": True, "prefetch": False},
    {"prefetch": True, "unknown": [{}]},
]
CACHE_BODIES: list[dict[str, object]] = [
    {"model": "tiny", "prompt": "long", "hint": "pin", "seconds": 60, "tokens": 32},
    {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "hint": "drop"},
    {"model": "tiny", "prompt": [1, 2], "hint": "prewarm", "api_key": "key", "cache_salt": "s"},
    {"model": "tiny", "prompt": "a", "hint": "prefetch", "url": "http://a:1", "vllm_xargs": {}},
]
HEADER = frames.pack_header(frames.FrameHeader(1, 2, 3, 4, 5, 6, 16))
NUMBERS = (0, 1, 2, 8, 64, -1, 1.5, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, float("nan"))
VALUES = (*NUMBERS, "", "x" * 300, b"", TRANSFER, None, True, [], [0] * 70, {}, {"a": 1})
JSON_VALUES = (*NUMBERS, 1e308, 10**400, float("inf"), "", "\ud800", "x" * 300, None, True, [], {})

# Inputs -----------------------------------------------------------------------------------------


def broken(rng: random.Random, valid: bytes) -> bytes:
    """Random bytes, or the valid ones with a few bytes changed, cut out, put in or repeated."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(100))
    data = bytearray(valid)
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.randrange(9))
        change = rng.randrange(4)
        if change == 0:
            data[place:end] = rng.randbytes(end - place)
        elif change == 1:
            del data[place:end]
        elif change == 2:
            data[place:place] = rng.randbytes(rng.randrange(9))
        else:
            data[place:place] = data[place:end] * rng.randrange(1, 20)
    return bytes(data)


def changed(rng: random.Random, plain: object) -> object:
    """A decoded message or ticket with one value, at any depth, replaced."""
    if isinstance(plain, dict) and plain and rng.random() < 0.95:
        key = rng.choice(list(plain))
        return plain | {key: changed(rng, plain[key])}
    if isinstance(plain, list) and plain and rng.random() < 0.8:
        place = rng.randrange(len(plain))
        return [*plain[:place], changed(rng, plain[place]), *plain[place + 1 :]]
    return rng.choice(VALUES)


def mutant(rng: random.Random, valid: bytes) -> bytes:
    """Msgpack that is broken as bytes, or sound but with a value that is not."""
    if rng.random() < 0.5:
        return broken(rng, valid)
    return msgspec.msgpack.encode(changed(rng, msgspec.msgpack.decode(valid)))


def in_pieces(rng: random.Random, data: bytes) -> list[bytes]:
    size = rng.randrange(1, len(data) + 2)
    return [data[i : i + size] for i in range(0, len(data), size)]


# Decoders: each takes one broken input ----------------------------------------------------------


def fuzz_header(rng: random.Random) -> None:
    data = broken(rng, HEADER)
    if rng.random() < 0.5:  # with a checksum that fits, to get past it
        body = data[:60].ljust(60, b"\0")
        data = body + frames._CRC.pack(frames.zlib.crc32(body))
    header = frames.unpack_header(data)
    assert frames.pack_header(header) == data


def fuzz_messages_in_pieces(rng: random.Random) -> None:
    reader = codec.MessageReader()
    for piece in in_pieces(rng, broken(rng, codec.pack_message(b"text") * 3)):
        for message in reader.feed(piece):
            assert len(message) <= codec.MAX_MESSAGE


def fuzz_message(rng: random.Random) -> None:
    message = messages.decode(mutant(rng, messages.encode(rng.choice(MESSAGES))))
    assert messages.decode(messages.encode(message)) == message


def fuzz_cache_message(rng: random.Random) -> None:
    message = cache_messages.decode(mutant(rng, cache_messages.encode(rng.choice(CACHE_MESSAGES))))
    assert cache_messages.decode(cache_messages.encode(message)) == message


def fuzz_doctor_message(rng: random.Random) -> None:
    message = exchange.decode(mutant(rng, exchange.encode(rng.choice(DOCTOR_MESSAGES))))
    assert exchange.decode(exchange.encode(message)) == message


def fuzz_nixl_message(rng: random.Random) -> None:
    message = nixl_messages.decode(mutant(rng, nixl_messages.encode(rng.choice(NIXL_MESSAGES))))
    assert nixl_messages.decode(nixl_messages.encode(message)) == message


def fuzz_offer(rng: random.Random) -> None:
    offer = nixl_messages.decode_offer(mutant(rng, nixl_messages.encode(OFFER)))
    assert isinstance(nixl_messages.mismatch(OFFER, offer), str)


def fuzz_session(rng: random.Random) -> None:
    """A greeting that can be read gives an agreement or a named refusal, in both roles."""
    hello = messages.decode(mutant(rng, messages.encode(HELLO)))
    if isinstance(hello, messages.HandoffHello):
        for reader, source in ((hello, HELLO), (HELLO, hello)):
            for unit in negotiate(reader, source).units:
                assert 0 <= unit[0] < len(HELLO.groups)


def fuzz_ticket(rng: random.Random) -> None:
    if rng.random() < 0.5:
        text = broken(rng, tickets.issue(TICKET, KEY).encode()).decode("latin-1")
    else:  # with a MAC that fits, to get past it
        body = mutant(rng, TICKET_BODY)
        mac = hmac.digest(KEY, b"kvconnect ticket\0" + body, hashlib.sha256)
        text = base64.urlsafe_b64encode(body + mac).decode().rstrip("=")
    tickets.verify(text, (KEY,), NOW)


def fuzz_share_ticket(rng: random.Random) -> None:
    body = mutant(rng, SHARE_BODY)
    mac = hmac.digest(KEY, b"kvconnect ticket\0" + body, hashlib.sha256)
    text = base64.urlsafe_b64encode(body + mac).decode().rstrip("=")
    assert tickets.verify(text, (KEY,), NOW, scope=tickets.Scope.SHARE).endpoints


def fuzz_params(rng: random.Random) -> None:
    keys = ["do_remote_decode", "do_remote_prefill", "transfer_id", "kvconnect_ticket"]
    keys += ["kvconnect_card", "kvconnect_card_rank", "remote_block_ids", "tp_size"]
    values = (*VALUES, True, False, "0" * 32)
    asked = handoff_request.parse_request(
        {key: rng.choice(values) for key in keys if rng.random() < 0.6}
    )
    if asked.role == "recv":
        tickets.verify(asked.ticket, (KEY,), NOW)


def json_mutant(rng: random.Random, valid: dict[str, object]) -> bytes:
    """JSON that is broken as bytes, or sound but with a value that is not."""
    if rng.random() < 0.3:
        return broken(rng, json.dumps(valid).encode())
    some = rng.choice(list(valid))
    return json.dumps(valid | {some: rng.choice(JSON_VALUES)}).encode()


def fuzz_hints(rng: random.Random) -> None:
    try:
        options = json.loads(json_mutant(rng, rng.choice(HINTS)))
    except ValueError as error:
        raise Refused("body", "not JSON") from error
    if not readers.hinted(options):
        raise Refused("hint", "none is left")


def fuzz_cache_body(rng: random.Random) -> None:
    if not readers.cache_body(json_mutant(rng, rng.choice(CACHE_BODIES))):
        raise Refused("body", "no engine is asked")


def fuzz_server(rng: random.Random) -> None:
    """A stranger without the key never gets in, whatever is sent."""
    client = ClientAuth(b"guess", Opening("data", TRANSFER, 0, 2), bytes(32))
    server = ServerAuth(KEY, rng.randbytes(32))
    try:
        opening = client.start() if rng.random() < 0.5 else broken(rng, client.start())
        challenge = b"".join([server.feed(piece) for piece in in_pieces(rng, opening)])
        server.feed(broken(rng, client.feed(challenge)) if challenge else b"")
    finally:
        assert not server.done


def fuzz_client(rng: random.Random) -> None:
    client = ClientAuth(KEY, Opening("data", TRANSFER, 0, 2), rng.randbytes(32))
    server = ServerAuth(b"guess", bytes(32))
    try:
        challenge = server.feed(client.start())
        proof = client.feed(challenge if rng.random() < 0.5 else broken(rng, challenge))
        for piece in in_pieces(rng, broken(rng, b"KVCV" + proof[4:])):
            client.feed(piece)
    finally:
        assert not client.done


TARGETS: tuple[Callable[[random.Random], None], ...] = (
    fuzz_header,
    fuzz_messages_in_pieces,
    fuzz_message,
    fuzz_cache_message,
    fuzz_doctor_message,
    fuzz_nixl_message,
    fuzz_offer,
    fuzz_session,
    fuzz_ticket,
    fuzz_share_ticket,
    fuzz_params,
    fuzz_hints,
    fuzz_cache_body,
    fuzz_server,
    fuzz_client,
)


def fuzz(runs: int, seed: int) -> Counter[str]:
    """Run the targets in turn and count how each ended.

    Raises:
        AssertionError: an input broke a decoder; names target, seed and run. Its cause is what
            came out.
    """
    ends: Counter[str] = Counter()
    for run in range(runs):
        target = TARGETS[run % len(TARGETS)]
        try:
            target(random.Random(f"{seed}.{run}"))
            ends[f"{target.__name__} accepted"] += 1
        except Misuse as error:
            raise AssertionError(f"{target.__name__}, seed {seed}, run {run}") from error
        except KVConnectError as error:
            ends[f"{target.__name__} {type(error).__name__}"] += 1
        except Exception as error:
            raise AssertionError(f"{target.__name__}, seed {seed}, run {run}") from error
    return ends


def peak_bytes(runs: int, seed: int) -> int:
    """Return the most memory that was in use at once during so many runs."""
    tracemalloc.start()
    try:
        fuzz(runs, seed)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    ends = fuzz(arguments.runs, arguments.seed)
    peak = peak_bytes(min(arguments.runs, 20_000), arguments.seed)  # tracing is slow
    for name, count in sorted(ends.items()):
        sys.stdout.write(f"{count:9} {name}\n")
    sys.stdout.write(f"{arguments.runs} inputs, at most {peak / 1e3:.0f} kB in use\n")
    if peak > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES / 1e3:.0f} kB for small inputs")


if __name__ == "__main__":
    main()
