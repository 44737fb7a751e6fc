"""A shared tier on Mooncake Store: a real master, and a process that lends memory."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvconnect.errors import ConfigError, TransferFailed
from kvconnect.settings.stores import MooncakeSettings
from kvconnect.testing.store import check_store
from kvconnect.tiers.backends import BlockOutcome, make_store
from kvconnect.tiers.backends.mooncake import MooncakeServer
from kvconnect.tiers.backends.remote import RemoteStore
from tests.mooncake import Mooncake, wait_until
from tests.servers import free_port
from tests.stores import get, put, spoil

OK, ABSENT = BlockOutcome.OK, BlockOutcome.ABSENT


@pytest.fixture
def mooncake() -> Iterator[Mooncake]:
    package = pytest.importorskip("mooncake.store", exc_type=ImportError)
    server = Mooncake(Path(package.__file__).parent)
    try:
        server.start()
        yield server
    finally:
        server.kill()


# Conformance and faults -------------------------------------------------------------------------


def test_mooncake(mooncake: Mooncake, tmp_path: Path) -> None:
    check_store(
        lambda folder: make_store("mooncake", mooncake.settings(prefix=folder.name), b"f"),
        tmp_path,
        persistent=True,
        spoil=spoil,
    )


_PUT_ELSEWHERE = """
import json, sys
from kvconnect.tiers.backends import make_store
store = make_store("mooncake", json.loads(sys.argv[1]), b"f")
print([o.value for o in store.put([b"a", b"b"], [memoryview(b"x" * 70_000), memoryview(b"y")])])
store.close()
"""


def test_mooncake_between_processes(mooncake: Mooncake) -> None:
    arguments = [sys.executable, "-c", _PUT_ELSEWHERE, json.dumps(mooncake.settings())]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, timeout=120, check=True, text=True)
    assert done.stdout.strip() == "['ok', 'ok']"
    store = make_store("mooncake", mooncake.settings(), b"f")
    other = make_store("mooncake", mooncake.settings(), b"g")
    buffers = [bytearray(70_000), bytearray(1)]
    assert store.get([b"a", b"b"], [memoryview(b) for b in buffers]) == [OK, OK]
    assert buffers == [b"x" * 70_000, b"y"]
    assert store.exists([b"a", b"no", b"b"]) == [70_000, 0, 1]
    assert store.remove([b"a"]) == [OK]  # although it was just read
    assert store.exists([b"a", b"b"]) == [0, 1]
    assert other.exists([b"b"]) == [0]
    store.close()
    other.close()


def test_a_full_mooncake_drops_old_blocks(mooncake: Mooncake) -> None:
    store = make_store("mooncake", mooncake.settings(), b"f")
    outcomes = [put(store, [b"%d" % n], 4_000_000)[0] for n in range(40)]
    assert outcomes[0] is OK
    assert set(outcomes) <= {OK, BlockOutcome.FULL}
    assert store.usage().available  # it is full, not broken
    found = store.exists([b"%d" % n for n in range(40)])
    assert 4_000_000 in found
    assert 0 in found
    store.close()


def test_a_block_larger_than_the_buffer_breaks_nothing(mooncake: Mooncake) -> None:
    store = make_store("mooncake", mooncake.settings(buffer="16MiB"), b"f")
    assert put(store, [b"a"], 17 << 20) == [BlockOutcome.FAILED]
    assert put(store, [b"b"]) == [OK]
    assert get(store, [b"a", b"b"]) == [ABSENT, OK]
    store.close()


def test_a_master_that_hangs_costs_a_time_out(
    mooncake: Mooncake, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    store = make_store("mooncake", mooncake.settings(timeout_s=1), b"f")
    assert isinstance(store, RemoteStore)
    store._clock = lambda: now[0]
    assert put(store, [b"a"]) == [OK]
    mooncake.pause()
    assert get(store, [b"a"]) == [BlockOutcome.FAILED]
    assert "no answer in 1 s" in caplog.text  # the library itself would say so after 30
    assert get(store, [b"a"]) == [BlockOutcome.UNAVAILABLE]
    mooncake.pause(stop=False)
    now[0] = 1.0
    assert put(store, [b"b"]) == [OK]
    store.close()


def test_a_mooncake_that_is_killed_and_comes_back(mooncake: Mooncake) -> None:
    now = [0.0]
    store = make_store("mooncake", mooncake.settings(timeout_s=10), b"f")
    assert isinstance(store, RemoteStore)
    store._clock = lambda: now[0]
    assert put(store, [b"a"]) == [OK]
    mooncake.kill_lender()
    assert get(store, [b"a"]) in ([BlockOutcome.FAILED], [ABSENT])
    mooncake.kill()
    now[0] += 100
    assert get(store, [b"a"]) == [BlockOutcome.FAILED]
    mooncake.start()
    now[0] += 100
    assert get(store, [b"a"]) == [ABSENT]  # its memory went with the process
    assert put(store, [b"a"]) == [OK]
    assert get(store, [b"a"]) == [OK]
    store.close()


def test_a_mooncake_that_is_not_there() -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    settings = {"address": f"127.0.0.1:{free_port()}", "timeout_s": 1}
    store = make_store("mooncake", settings, b"f")
    assert put(store, [b"a"]) == [BlockOutcome.FAILED]
    store.close()


# Without its library ----------------------------------------------------------------------------


class Library:
    """Keeps values in a dict; each answer waits for ``free``."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.free = threading.Event()
        self.free.set()
        self.inside: list[str] = []
        self.most_inside = 0
        self.added: list[str] = []
        self.code = 0  # of every call
        self.codes: dict[str, int] = {}  # of one value
        self.unreadable = 0  # so many reads find nothing

    def setup(self, settings: dict[str, str]) -> int:
        return self.code

    def put_batch(self, names: list[str], values: list[memoryview]) -> int:
        assert not set(names) & set(self.values)
        self.added += names
        return self.upsert_batch(names, values)

    def put(self, name: str, value: memoryview) -> int:
        return self.codes.get(name, self.code)

    def upsert_batch(self, names: list[str], values: list[memoryview]) -> int:
        self.inside += names
        self.most_inside = max(self.most_inside, len(self.inside))
        self.free.wait(30)
        self.values.update(zip(names, map(bytes, values), strict=True))
        for name in names:
            self.inside.remove(name)
        return next(filter(None, map(self.codes.get, names)), self.code)

    def upsert(self, name: str, value: memoryview) -> int:
        return self.codes.get(name, self.code)

    def batch_is_exist(self, names: list[str]) -> list[int]:
        assert names
        assert len(set(names)) == len(names)
        return [self.code or int(name in self.values) for name in names]

    def batch_get_buffer(self, names: list[str]) -> list[memoryview | None]:
        self.unreadable -= 1
        signed = [memoryview(self.values[name]).cast("b") for name in names]
        return [None if self.unreadable >= 0 else value for value in signed]

    def get_size(self, name: str) -> int:
        return self.codes.get(name, len(self.values[name]))

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        assert force
        return [self._removed(name) for name in names]

    def close(self) -> int:
        return 0

    def _removed(self, name: str) -> int:
        there = self.values.pop(name, None) is not None
        return self.codes.get(name, self.code) or (0 if there else -704)


@pytest.fixture
def library() -> Library:
    return Library()


@contextlib.contextmanager
def serving(library: Library, timeout_s: float) -> Iterator[MooncakeServer]:
    with socket.create_server(("127.0.0.1", 0)) as master:
        options = MooncakeSettings(
            address=f"127.0.0.1:{master.getsockname()[1]}", timeout_s=timeout_s
        )
        server = MooncakeServer(options, lambda: library)
        yield server
        library.free.set()
        server.close()


@pytest.fixture
def server(library: Library) -> Iterator[MooncakeServer]:
    with serving(library, 30) as server:
        yield server


def test_what_comes_and_goes(server: MooncakeServer) -> None:
    names = ["a", "b"]
    assert server.store(names, [memoryview(b"1"), memoryview(b"22")]) == [OK, OK]
    assert server.load(["b", "no", "b", "a"], 100) == [b"22", None, b"22", b"1"]
    assert server.sizes(["b", "no", "a"]) == [2, 0, 1]
    assert server.delete(["b", "no"]) == [True, False]
    assert server.load(names, 100) == [b"1", None]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    ("code", "outcome"),
    [(-200, BlockOutcome.FULL), (-704, BlockOutcome.FAILED), (-800, BlockOutcome.FAILED)],
)
def test_a_value_that_is_not_taken(
    server: MooncakeServer, library: Library, code: int, outcome: BlockOutcome, there: bool
) -> None:
    values = [memoryview(b"1")] * 3
    if there:
        server.store(["a", "b", "c"], values)
    library.codes["b"] = code
    assert server.store(["a", "b", "c"], values) == [OK, outcome, OK]


def test_only_what_is_there_is_replaced(server: MooncakeServer, library: Library) -> None:
    server.store(["b"], [memoryview(b"old")])
    values = [memoryview(value) for value in (b"1", b"new", b"3")]
    assert server.store(["a", "b", "c"], values) == [OK] * 3
    assert library.added == ["b", "a", "c"]
    assert server.load(["a", "b", "c"], 100) == [b"1", b"new", b"3"]


def test_what_another_process_is_writing(server: MooncakeServer, library: Library) -> None:
    server.store(["a", "b"], [memoryview(b"1")] * 2)
    library.unreadable = 2
    assert server.load(["a"], 100) == [b"1"]
    library.codes["a"] = -703
    assert server.sizes(["a", "b"]) == [0, 1]
    assert server.delete(["a"]) == [True]
    library.codes["b"] = -706
    with pytest.raises(TransferFailed, match="not removed"):
        server.delete(["b"])


@pytest.mark.parametrize("code", [-900, -901, -1000])
def test_a_master_that_does_not_answer(server: MooncakeServer, library: Library, code: int) -> None:
    server.store(["a"], [memoryview(b"1")])
    library.code = code
    for call in (partial(server.load, most=100), server.sizes, server.delete):
        with pytest.raises(TransferFailed, match=str(code)):
            call(["a"])
    with pytest.raises(TransferFailed, match=str(code)):
        server.store(["a"], [memoryview(b"1")])


def test_a_value_whose_process_died_is_a_failure(server: MooncakeServer, library: Library) -> None:
    server.store(["a"], [memoryview(b"1")])
    library.unreadable = 100
    with pytest.raises(TransferFailed, match="cannot be read"):
        server.load(["a"], 100)


def test_a_client_that_cannot_be_set_up_is_tried_again(
    server: MooncakeServer, library: Library
) -> None:
    library.code = -1
    with pytest.raises(TransferFailed, match="cannot be set up"):
        server.sizes(["a"])
    library.code = 0
    assert server.sizes(["a"]) == [0]


@pytest.mark.parametrize(("other", "together"), [("a", 1), ("b", 2)])
def test_a_name_is_one_call_s_at_a_time(library: Library, other: str, together: int) -> None:
    with serving(library, 1) as server:
        server.sizes(["a"])
        library.free.clear()
        for name, value in (("a", b"1"), (other, b"2")):
            with pytest.raises(TransferFailed, match="no answer in 1 s"):
                server.store([name], [memoryview(value)])
        library.free.set()
        wait_until(lambda: not library.inside, "a call did not end")
        assert library.most_inside == together
        # A call without its turn in time does nothing later: its memory is another's by then.
        assert server.load(["a", "b"], 100) == [b"1", b"2" if other == "b" else None]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"address": "nowhere"}, "address='nowhere'.*HOST:PORT"),
        ({"address": "a:70000"}, "address='a:70000'"),
        ({"prefix": "a/b"}, "prefix='a/b'"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"buffer": "1MiB"}, "buffer='1MiB'.*16MiB"),
        ({"adress": "a:1"}, "adress='a:1'.*did you mean 'address'"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_store("mooncake", settings, b"f")


def test_without_its_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"install kvconnect\[mooncake\].*libibverbs1"):
        make_store("mooncake", {}, b"f")
