"""Poisoned records on a real Valkey server, written by who has its password and not the key.

A victim with a key keeps blocks there. An attacker changes, swaps, forges, replays and
blows up the values. The victim must never get bytes that no engine with the key has put, must
say so in its counts, and must be able to keep the block again.
"""

from __future__ import annotations

import random
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvconnect.settings.stores import ValkeySettings
from kvconnect.tiers.backends import BlockOutcome as Stored
from kvconnect.tiers.backends.remote import RemoteStore
from kvconnect.tiers.backends.valkey import make_valkey_store
from tests.hostile import Outcome
from tests.servers import PASSWORD, Valkey

NBYTES = 5000
OLD, NEW, FOREIGN = b"o" * 32, b"n" * 32, b"f" * 32
_BIG = 64 << 20


class Wild(NamedTuple):
    """What an attacker has: the server, the victim's record there, another of the victim's, and how
    to write the same block as one with another key, format or none does."""

    direct: Any
    name: bytes
    other: bytes
    forge: Callable[..., bytes]


def _set(wild: Wild, value: bytes) -> None:
    wild.direct.set(wild.name, value)


def _flip(rng: random.Random, wild: Wild) -> None:
    value = bytearray(wild.direct.get(wild.name))
    value[rng.choice((rng.randrange(48), rng.randrange(len(value))))] ^= 1 << rng.randrange(8)
    _set(wild, bytes(value))


def _cut(rng: random.Random, wild: Wild) -> None:
    value = wild.direct.get(wild.name)
    _set(wild, value[: rng.choice((1, 12, 47, 48, rng.randrange(1, len(value))))])


def _extend(rng: random.Random, wild: Wild) -> None:
    wild.direct.append(wild.name, rng.randbytes(rng.choice((1, 48, NBYTES))))


def _length(rng: random.Random, wild: Wild) -> None:
    value = wild.direct.get(wild.name)
    number = rng.choice((0, 1, NBYTES - 1, NBYTES + 1, 2**31, 2**32 - 1))
    _set(wild, value[:8] + number.to_bytes(4, "little") + value[12:])


def _noise(rng: random.Random, wild: Wild) -> None:
    _set(wild, rng.randbytes(NBYTES + 48))


def _unsealed(rng: random.Random, wild: Wild) -> None:
    _set(wild, wild.forge(rng.randbytes(NBYTES), None))


def _foreign(rng: random.Random, wild: Wild) -> None:
    _set(wild, wild.forge(rng.randbytes(NBYTES), FOREIGN))


def _relabelled(rng: random.Random, wild: Wild) -> None:
    """A foreign MAC under the number of the victim's key."""
    own, forged = wild.direct.get(wild.name), wild.forge(rng.randbytes(NBYTES), FOREIGN)
    _set(wild, own[:16] + forged[16:])


def _swapped(rng: random.Random, wild: Wild) -> None:
    _set(wild, wild.direct.get(wild.other))


def _other_format(rng: random.Random, wild: Wild) -> None:
    """What an engine with the key put, under another format."""
    _set(wild, wild.forge(rng.randbytes(NBYTES), NEW, b"another model"))


def _other_prefix(rng: random.Random, wild: Wild) -> None:
    _set(wild, wild.forge(rng.randbytes(NBYTES), NEW, b"model", "q"))


def _other_kind(rng: random.Random, wild: Wild) -> None:
    """A value that is no string."""
    wild.direct.delete(wild.name)
    if rng.random() < 0.5:
        wild.direct.rpush(wild.name, rng.randbytes(NBYTES))
    else:
        wild.direct.hset(wild.name, "a", rng.randbytes(NBYTES))


def _huge(rng: random.Random, wild: Wild) -> None:
    """Of which nothing more than a block may come into memory."""
    wild.direct.setrange(wild.name, _BIG, b"x")


CASES = (
    *(_flip,) * 4,
    *(_cut, _extend, _length, _noise, _unsealed, _foreign, _relabelled, _swapped),
    *(_other_format, _other_prefix, _other_kind, _huge),
)
ROUNDS = 12


def run(limit: int | None = None) -> Outcome:
    """Play ``limit`` cases, each kind in turn, with a key of today and with one of yesterday."""
    import valkey

    outcome = Outcome()
    cases = [case for _ in range(ROUNDS) for case in CASES][:limit]
    with tempfile.TemporaryDirectory() as top, _server(Path(top)) as server:
        direct = valkey.Valkey("127.0.0.1", server.port, password=PASSWORD)
        for number, case in enumerate(cases):
            rng = random.Random(number)
            direct.flushall()
            try:
                _play(rng, case, server, direct, outcome)
            except Exception as error:  # noqa: BLE001 - it is reported
                outcome.crashes += 1
                outcome.notes.append(f"{case.__name__}: {type(error).__name__}: {error}")
            outcome.cases += 1
        direct.close()
    return outcome


def _play(
    rng: random.Random,
    case: Callable[[random.Random, Wild], None],
    server: Valkey,
    direct: Any,
    outcome: Outcome,
) -> None:
    writer = OLD if rng.random() < 0.5 else NEW
    put(make(server, writer), [b"k", b"other"], rng)
    victim = make(server, NEW, OLD)
    name, other = (victim._names([key])[0].encode() for key in (b"k", b"other"))

    def forge(
        payload: bytes, key: bytes | None, form: bytes = b"model", prefix: str = "p"
    ) -> bytes:
        """Have somebody put the block in their own place, and return the value."""
        theirs = make(server, key, form=form, prefix=prefix)
        before = direct.dump(name)
        theirs.put([b"k"], [memoryview(bytearray(payload))])
        value: bytes = direct.get(theirs._names([b"k"])[0])
        direct.restore(name, 0, before, replace=True)
        theirs.close()
        return value

    case(rng, Wild(direct, name, other, forge))
    complaints = list(_what_is_wrong(victim, rng))
    outcome.wrong += len(complaints)
    outcome.notes += [f"{case.__name__}: {text}" for text in complaints]
    victim.close()


def _what_is_wrong(victim: RemoteStore, rng: random.Random) -> Iterator[str]:
    """Yield in what the victim fails, whose block ``k`` is poisoned."""
    looked_up = victim.exists([b"k"])
    tracemalloc.start()
    found = get(victim)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if peak > _BIG // 4:
        yield f"{peak >> 20} MiB of memory for a value"
    if found is Stored.OK:
        yield "bytes of another were used"
    stats = victim.take_stats()
    if stats is None or "store_failed_blocks" not in stats.data["counters"]:
        yield f"{found} was not counted"
    if looked_up == [NBYTES] and get(victim) is not Stored.ABSENT:
        yield "a lookup finds what cannot be used, and it stays"
    if not victim.usage().available:
        yield "the store is left alone because of one value"
    mine = put(victim, [b"k"], rng)
    if get(victim, mine[0]) is not Stored.OK:
        yield "the block cannot be kept again"


def make(
    server: Valkey, key: bytes | None, *also: bytes, form: bytes = b"model", prefix: str = "p"
) -> RemoteStore:
    keys = (lambda: (key, also)) if key else None
    settings = msgspec.convert(server.settings(prefix=prefix), ValkeySettings)
    return make_valkey_store(settings, form, keys)


def put(store: RemoteStore, keys: Sequence[bytes], rng: random.Random) -> list[bytes]:
    payloads = [rng.randbytes(NBYTES) for _ in keys]
    outcomes = store.put(keys, [memoryview(bytearray(payload)) for payload in payloads])
    if set(outcomes) != {Stored.OK}:
        raise RuntimeError(f"not put: {outcomes}")
    return payloads


def get(store: RemoteStore, wanted: bytes = b"") -> Stored:
    """Get the block; OK only for the wanted bytes, if they matter."""
    buffer = bytearray(NBYTES)
    [outcome] = store.get([b"k"], [memoryview(buffer)])
    return Stored.CORRUPT if outcome is Stored.OK and wanted and wanted != buffer else outcome


@contextmanager
def _server(folder: Path) -> Iterator[Valkey]:
    server = Valkey(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
