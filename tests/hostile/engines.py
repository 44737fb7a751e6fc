"""What engines and sources of engines may say to a router: wrong types at every position, numbers
that are none, deep nesting, frames that are cut off. Whoever says it loses what it said, and nobody
else anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec

from kvconnect.errors import Refused
from kvconnect.router.engine_spec import EngineSpec, engine_spec
from kvconnect.router.fleet import reports
from kvconnect.router.fleet.kv_events import RankEvents, receipts_in
from kvconnect.router.fleet.sources import at_addresses, file
from kvconnect.router.fleet.sources.etcd import Entries
from kvconnect.router.fleet.sources.kubernetes import Slices
from kvconnect.router.metrics import InputKind
from kvconnect.router.policy.fleet_view import Role, Target
from kvconnect.router.policy.loads import MOST_RANKS, Loads
from kvconnect.router.policy.prefixes import CacheTier, PrefixIndex, StoredBlocks
from kvconnect.router.requests import engine_bodies
from tests.hostile import Outcome

LATE_S = 5.0  # for one case, which takes milliseconds
_PLACE = "@here@"
_DEEP = 100_000

NASTY = (
    *("null", "true", "-1", "0", "1.5", "NaN", "Infinity", "-Infinity", "1e400", "-0"),
    *("9" * 30, "9" * 5000, "1" + "0" * 400, "18446744073709551616", "-9223372036854775809"),
    *('""', '"1"', '"\\ud800"', '"\\u0000"', '"' + "x" * 100_000 + '"', "[]", "{}", "[null]"),
    *("[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP, "[1", '{"a"', "'a'", ""),
)
"""JSON texts, and what is none."""

_MODEL = {"id": "m", "root": "m", "max_model_len": 10, "permission": [{"id": "p"}]}
_LOAD = {"dp_rank": 0, "num_used_tokens": 1, "num_total_tokens": 2}
_LOAD |= {"num_waiting_uncached_tokens": 3, "gen_throughput": 0.5}
_PARAMS = {"kvconnect_card": "c", "kvconnect_card_expires_in": 10.0}
_SHARED = {"kvconnect_share": "s", "kvconnect_share_expires_in": 10.0}

_VLLM = (
    'vllm:kv_cache_usage_perc{engine="@here@"} 0.5\n'
    'vllm:cache_config_info{engine="0",num_gpu_blocks="@here@",block_size="@here@"} @here@\n'
    'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} @here@\n'
)
_SGLANG = 'sglang:num_used_tokens{dp_rank="@here@",x="y"} @here@\n'
_WORDS = (
    *("nan", "inf", "-inf", "1e400", "-1", "", "0x10", "1_0", "٣", "²", "9" * 5000, "a" * 10**6),
    *(
        '"',
        "}",
        "{",
        "\\",
        '\\"',
        "\n",
        "} 1\n#",
        "1.5",
        " ",
        "\x00",
        "\ufffd",
        "12345678901234567890",
    ),
)

Reader = Callable[[bytes], Any]
_JSON: tuple[tuple[str, object, Reader], ...] = (
    ("models", {"object": "list", "data": [_MODEL, _MODEL | {"id": "n"}]}, reports.models_of),
    ("version", {"version": "1", "more": [1]}, reports.version_of),
    ("registry", {"0": {"engine_id": "e"}, "1": {"engine_id": "f"}}, reports.engine_ids_of),
    ("loads", {"loads": [_LOAD, _LOAD | {"dp_rank": 1}]}, reports.sglang_tokens),
    (
        "standing ticket",
        {"choices": [], "kv_transfer_params": _PARAMS},
        engine_bodies.standing_ticket_of,
    ),
    (
        "share ticket",
        {"choices": [], "kv_transfer_params": _SHARED},
        engine_bodies.share_ticket_of,
    ),
)
_TEXT: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("vllm metrics", _VLLM, reports.vllm_tokens),
    ("vllm metrics", _VLLM, reports.vllm_received),
    ("sglang metrics", _SGLANG, reports.sglang_metric_tokens),
)

_STORED = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None}
_STORED |= {"token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None, "medium": "GPU"}
_STORED |= {"lora_name": None, "extra_keys": [None, None], "group_idx": 0}
_STORED |= {"kv_cache_spec_kind": "full_attention", "cache_salt": None}
_REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0}
_RECEIPT = {
    "type": "KVConnectReceipt",
    "nonce": "0" * 32,
    "receipt": {"prompt": 2, "waited_s": 0.5},
}
_EVENTS = (_STORED, list(_STORED.values())[:-1], _REMOVED, list(_REMOVED.values()), _RECEIPT)
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "", "x" * 10**5),
    *(b"", b"\xff" * 100, [], {}, [[]], [None], ["x"], [1.5], [b"\xff"], {1: 2}, {b"x": 1}),
    list(range(1000)),
)


def positions(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in nested lists and maps, and of the whole."""
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield from positions(each, (*path, key))


def put(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """Return ``value`` with ``other`` at a path."""
    if not path:
        return other
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = put(copy[path[0]], path[1:], other)
    return copy


Case = tuple[str, Callable[[], str | None]]
"""What it is, and what returns what was wrong with how it was taken, if anything."""


def _answers() -> Iterator[Case]:
    for name, good, read in _JSON:
        for path in positions(good):
            text = json.dumps(put(good, path, _PLACE))
            for nasty in NASTY:
                answer = text.replace(f'"{_PLACE}"', nasty).encode()
                yield f"{name} {path}: {nasty[:30]}", lambda a=answer, r=read: _read(r, a)
        for answer in (b"", b"\xff\xfe", b"\x00" * 10**6, b"[" * 10**6, b"{" + b'"a":1,' * 10**5):
            yield f"{name}: {answer[:10]!r}", lambda a=answer, r=read: _read(r, a)
    for name, text, read_text in _TEXT:
        for number in range(text.count(_PLACE)):
            for word in _WORDS:
                parts = text.split(_PLACE)
                said = "".join(
                    part + (word if place == number else "0")
                    for place, part in enumerate(parts[:-1])
                )
                yield (
                    f"{name} {number}: {word[:30]!r}",
                    lambda s=said + parts[-1], r=read_text: _read(r, s),
                )


def _read(read: Callable[[Any], Any], answer: Any) -> str | None:
    """Have an answer read; what is taken of it must be harmless."""
    try:
        said = read(answer)
    except Refused:
        return None
    if isinstance(said, engine_bodies.EngineTicket):
        return None if 0 < said.lifetime_s < 2**31 else f"a ticket for {said.lifetime_s} seconds"
    if read in (reports.vllm_tokens, reports.sglang_tokens, reports.sglang_metric_tokens):
        loads = Loads(10.0)
        loads.report(loads.ask(0.0), said)
        ranks = loads.at(1.0)
        good = len(ranks) <= MOST_RANKS and all(0 <= (rank.foreign or 0) < 2**53 for rank in ranks)
        return None if good else f"loads {ranks[:3]}"
    if read is reports.models_of and not all(isinstance(name, str) for name in said):
        return f"models {said}"
    return None


def _messages(chance: random.Random) -> Iterator[Case]:
    for event in _EVENTS:
        for path in positions(event):
            for value in _VALUES:
                batch = msgspec.msgpack.encode([0.0, [put(event, path, value)], 0])
                name = f"event {event[0] if isinstance(event, list) else event['type']} {path}"
                yield f"{name}: {value!r:.30}", lambda b=batch: _hear(b)
    whole = msgspec.msgpack.encode([0.0, list(_EVENTS), 0])
    for end in range(len(whole)):
        yield f"a batch cut off at {end}", lambda b=whole[:end]: _hear(b)
    for place in range(len(whole)):
        for _ in range(4):
            broken = bytearray(whole)
            broken[place] = chance.randrange(256)
            yield f"a batch with another byte at {place}", lambda b=bytes(broken): _hear(b)
    for odd in (
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x00\xdd\xff\xff\xff\xff",
        b"\x91" * _DEEP,
        b"\x92\x00",
    ):
        yield f"a batch {odd[:5]!r}", lambda b=odd: _hear(b)


def _hear(batch: bytes) -> str | None:
    """Hear a message between good ones, beside a target that must not be affected."""
    index, other = PrefixIndex(), Target(1)
    index.stored(other, StoredBlocks([7], None, [1, 2], 2, CacheTier.DEVICE))
    feed = RankEvents(Target(0), index)
    good = msgspec.msgpack.encode([0.0, [_STORED], 0])
    feed.receive(0, good)
    with contextlib.suppress(Refused):
        if any(len(told.receipt) > 1000 or len(told.nonce) > 5000 for told in receipts_in(batch)):
            return "a receipt of any size is taken"
    try:
        feed.receive(1, batch)
    except Refused:
        if Target(0) in index.match([1, 2, 3, 4]):
            return "what it has is not known, and is believed all the same"
    index.match([1, 2, 3, 4])
    if index.match([1, 2])[other].tokens != 2:
        return "another engine's blocks were lost"
    whole = _STORED | {"group_idx": None}  # the group may be known for another kind by now
    feed.receive(2, msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}, whole], 0]))
    return None if index.match([1, 2, 3, 4])[Target(0)].tokens == 4 else "it is deaf now"


_WORKERS = (
    *("", " ", ",", "http://", "http://a:99999999", "http://a:-1", "http://[", "http://a:b:c"),
    *("http://a,events=" + "9" * 5000, "http://a,events=٣", "http://a,replay=-1", "http://a,x=1"),
    *(
        "http://a:1\r\nX: y",
        "http://a:1/\x00",
        "http://ä:1",
        "http://u:p@a:1",
        "ftp://a",
        "a" * 10**6,
    ),
    *("http://a:1,engine=", "http://a:1,bootstrap=0", "http://a:1?x", "http://a:1#x", "\ud800"),
)


def _members() -> Iterator[Case]:
    for text in _WORKERS:
        yield f"file: {text[:30]!r}", lambda t=text: _in_file(t)
        yield f"etcd: {text[:30]!r}", lambda t=text: _in_etcd(t)
        yield f"DNS: {text[:30]!r}", lambda t=text: _at(t)
    for key in (
        b"",
        b"p",
        b"p/",
        b"p/prefill",
        b"p/other/a",
        b"\xff" * 100,
        b"p/prefill/" + b"x" * 10**6,
    ):
        yield f"etcd key {key[:20]!r}", lambda k=key: _in_etcd("http://x:1", k)
    good = {"metadata": {"name": "a"}, "endpoints": [_ENDPOINT, _ENDPOINT]}
    for path in positions(good):
        for value in _VALUES:
            if value != {}:
                told = _attributes(put(good, path, value))
                yield f"slice {path}: {value!r:.30}", lambda t=told: _in_slices(t)


_ENDPOINT = {"addresses": ["10.0.0.2", "10.0.0.3"], "conditions": {"ready": True}}


def _attributes(value: Any) -> Any:
    """Return maps as objects with attributes, as Kubernetes' client makes them."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return SimpleNamespace(**{key: _attributes(each) for key, each in value.items()})
    return [_attributes(each) for each in value] if isinstance(value, list) else value


def _nothing(what: InputKind, text: str) -> None:
    """Take a refusal; which ones are due is for unit tests."""


def _in_file(text: str) -> str | None:
    good = EngineSpec("http://good:1")
    before = {Role.DECODE: (good,)}
    named = file.parse(f"decode {text}\nprefill http://new:1", before, _nothing)
    kept = good in named[Role.DECODE] or len(named[Role.DECODE]) > 0
    return None if kept and named[Role.PREFILL] else f"others were lost: {named}"


def _in_etcd(text: str, key: bytes = b"p/decode/x") -> str | None:
    entries, value = Entries("p", _nothing), text.encode("utf-8", "surrogatepass")
    entries.named([(b"p/decode/x", b"http://good:1"), (b"p/prefill/y", b"http://other:1")])
    named = entries.named([(key, value), (b"p/prefill/y", b"http://other:1")])
    if EngineSpec("http://other:1") not in named[Role.PREFILL]:
        return "another engine was lost"
    kept = bool(named[Role.DECODE]) or key != b"p/decode/x"
    return None if kept else "what the key named before was lost"


def _at(address: str) -> str | None:
    model = engine_spec("dns", "http://pods:8000")
    found = at_addresses(model, ["10.0.0.1", address], InputKind.DNS, _nothing)
    return (
        None if found[:1] == (EngineSpec("http://10.0.0.1:8000"),) else "another address was lost"
    )


def _in_slices(told: object) -> str | None:
    slices = Slices(lambda text: None)
    before = {"metadata": {"name": "b"}, "endpoints": [_ENDPOINT | {"addresses": ["10.0.0.9"]}]}
    slices.listed([_attributes(before)])
    slices.changed(told)
    slices.listed([told, _attributes(before)])
    slices.deleted(told) if getattr(told, "metadata", None) != before["metadata"] else None
    return None if "10.0.0.9" in slices.ready() else "another slice was lost"


def cases(seed: int = 1) -> list[Case]:
    """Return all of them, in an order that mixes the kinds."""
    chance = random.Random(seed)
    found = [*_answers(), *_messages(chance), *_members()]
    chance.shuffle(found)
    return found


async def run(limit: int | None = None) -> Outcome:
    """Play the cases, most of them without a network; see :mod:`tests.hostile`."""
    outcome = Outcome()
    for name, play in cases()[:limit]:
        outcome.cases += 1
        began = time.monotonic()
        try:
            wrong = play()
        except Exception as error:  # noqa: BLE001  # what a task of the router would die of
            outcome.crashes += 1
            outcome.notes.append(f"{name}: {error!r:.200}")
        else:
            if wrong is not None:
                outcome.wrong += 1
                outcome.notes.append(f"{name}: {wrong}")
        if time.monotonic() - began > LATE_S:
            outcome.hangs += 1
            outcome.notes.append(f"{name}: took {time.monotonic() - began:.1f} s")
        if not outcome.cases % 100:
            await asyncio.sleep(0)
    return outcome
