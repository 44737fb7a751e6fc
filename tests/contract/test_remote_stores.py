"""Shared tiers on real servers: conformance, faults, and settings that cannot be used."""

from __future__ import annotations

import json
import queue
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvconnect import changed_files
from kvconnect.cache.head_shards import HeadUnit
from kvconnect.errors import ConfigError, TransferFailed
from kvconnect.testing.buffers import payload_of
from kvconnect.testing.store import check_store
from kvconnect.tiers.backends import BlockOutcome, Store, make_store
from kvconnect.tiers.backends.head_sharded import HeadShardedStore
from kvconnect.tiers.backends.remote import RemoteStore, Server
from tests.links import make_certificates
from tests.servers import PASSWORD, Valkey
from tests.stores import get, put, spoil

OK, ABSENT = BlockOutcome.OK, BlockOutcome.ABSENT


# Conformance ------------------------------------------------------------------------------------


def test_valkey(valkey: Valkey, tmp_path: Path) -> None:
    def make(folder: Path) -> Store:
        return make_store("valkey", valkey.settings(prefix=folder.name), b"f")

    folder = tmp_path / "checks"
    folder.mkdir()
    check_store(make, folder, persistent=True, spoil=spoil)


def as_cluster(valkey: Valkey, **options: Any) -> None:
    """Have a server with cluster mode serve all names, and wait until it does."""
    import valkey as client

    direct = client.Valkey("127.0.0.1", valkey.port, password=PASSWORD, **options)
    direct.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    deadline = time.monotonic() + 30
    while direct.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
        assert time.monotonic() < deadline, "the cluster does not come up"
        time.sleep(0.05)
    direct.close()


def test_a_valkey_cluster(valkey: Valkey, tmp_path: Path) -> None:
    valkey.kill()
    valkey.start("--cluster-enabled", "yes")
    as_cluster(valkey)
    folder = tmp_path / "checks"
    folder.mkdir()
    check_store(
        lambda folder: make_store(
            "valkey", valkey.settings(prefix=folder.name, cluster=True), b"f"
        ),
        folder,
        persistent=True,
        spoil=spoil,
    )


def until(done: Callable[[], bool]) -> None:
    """Wait until something is true: a store leaves a server alone that did not answer."""
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def with_tls(valkey: Valkey, folder: Path, *options: str, alternative: str) -> None:
    """Start the server again, with a certificate for one name."""
    make_certificates(folder, "cache", alternative=alternative)
    valkey.kill()
    files = ("--tls-cert-file", "tls.crt", "--tls-key-file", "tls.key", "--tls-ca-cert-file")
    valkey.start("--port", "0", "--tls-port", str(valkey.port), *files, "ca.crt", *options)


def test_valkey_over_tls(valkey: Valkey, tmp_path: Path) -> None:
    with_tls(valkey, tmp_path, alternative="IP:127.0.0.1")
    store = make_store("valkey", valkey.settings(tls_dir=str(tmp_path)), b"f")
    assert put(store, [b"a", b"b"]) == [OK, OK]
    assert get(store, [b"a", b"b"]) == [OK, OK]
    store.close()
    plain = make_store("valkey", valkey.settings(), b"f")
    assert get(plain, [b"a"]) == [BlockOutcome.FAILED]
    plain.close()
    (tmp_path / "other").mkdir()
    make_certificates(tmp_path / "other")
    stranger = make_store("valkey", valkey.settings(tls_dir=str(tmp_path / "other")), b"f")
    assert get(stranger, [b"a"]) == [BlockOutcome.FAILED]
    stranger.close()


@pytest.mark.parametrize("cluster", [False, True])
def test_password_and_certificates_are_those_of_now(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: bool
) -> None:
    monkeypatch.setattr(changed_files, "LOOK_S", 0.0)
    options = ("--cluster-enabled", "yes", "--tls-cluster", "yes") if cluster else ()
    with_tls(valkey, tmp_path, *options, alternative="IP:127.0.0.1")
    if cluster:
        names = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
        as_cluster(valkey, ssl=True, **{key: str(tmp_path / n) for key, n in names.items()})
    settings = valkey.settings(tls_dir=str(tmp_path), cluster=cluster)
    store = make_store("valkey", settings, b"f")
    assert put(store, [b"a"]) == [OK]
    if not cluster:
        options = ("--requirepass", "another-password")
        (tmp_path / "password").write_text("another-password")
    with_tls(valkey, tmp_path, *options, alternative="IP:127.0.0.1")  # by a new authority
    until(lambda: put(store, [b"a"]) == [OK])
    (tmp_path / "ca.crt").write_text("not a certificate")
    assert get(store, [b"a"]) == [OK], "what is no certificate changes nothing"
    store.close()


def test_a_private_key_that_others_may_write_is_refused(valkey: Valkey, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    make_store("valkey", valkey.settings(tls_dir=str(tmp_path)), b"f").close()
    (tmp_path / "tls.key").chmod(0o666)
    with pytest.raises(ConfigError, match="others may write it"):
        make_store("valkey", valkey.settings(tls_dir=str(tmp_path)), b"f")


@pytest.mark.parametrize("cluster", [False, True])
def test_the_password_goes_to_nobody_with_a_certificate_for_another_name(
    valkey: Valkey, tmp_path: Path, cluster: bool
) -> None:
    options = ("--cluster-enabled", "yes", "--tls-cluster", "yes") if cluster else ()
    with_tls(valkey, tmp_path, *options, alternative="DNS:cache-1.example")
    if cluster:
        names = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
        as_cluster(valkey, ssl=True, **{key: str(tmp_path / n) for key, n in names.items()})
    logins: dict[str, object] = valkey.settings(tls_dir=str(tmp_path), cluster=cluster)
    for name, outcome in (("", BlockOutcome.FAILED), ("cache-2.example", BlockOutcome.FAILED)):
        store = make_store("valkey", logins | {"tls_name": name}, b"f")
        assert put(store, [b"a"]) == [outcome]
        store.close()
    store = make_store("valkey", logins | {"tls_name": "cache-1.example"}, b"f")
    assert put(store, [b"a"]) == [OK]
    assert get(store, [b"a"]) == [OK]
    store.close()


def test_an_impostor_hears_nothing_but_a_handshake(tmp_path: Path) -> None:
    pytest.importorskip("valkey")
    files = make_certificates(tmp_path, "pod", alternative="DNS:some-other-pod.example")
    (tmp_path / "password").write_text(PASSWORD)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.tls_cert, files.tls_key)
    heard: queue.Queue[bytes] = queue.Queue()

    def listen(server: socket.socket) -> None:
        for _ in range(2):
            try:
                with context.wrap_socket(server.accept()[0], server_side=True) as taken:
                    heard.put(taken.recv(4096))
            except OSError:
                heard.put(b"")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen, args=(server,), daemon=True)
        thread.start()
        port = server.getsockname()[1]
        secrets: dict[str, object] = {
            "tls_dir": str(tmp_path),
            "password_file": str(tmp_path / "password"),
        }
        for name in ("", "some-other-pod.example"):  # the control: its own name
            address = {"address": f"localhost:{port}", "tls_name": name, "timeout_s": 5}
            store = make_store("valkey", secrets | address, b"f")
            assert store.exists([b"a"]) == [0]
            said = heard.get(timeout=30)
            store.close()
            assert (PASSWORD.encode() in said) == bool(name)


def test_objects_in_files(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    check_store(
        lambda folder: make_store("object", {"url": f"file://{folder}"}, b"f"),
        tmp_path,
        persistent=True,
    )


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Settings of a bucket on an S3 server."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    from werkzeug.serving import make_server

    app = moto.DomainDispatcherApplication(moto.create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environ: dict[str, object], start: object) -> list[bytes]:
        with lock:  # it answers 500 to two writers of one object
            return list(app(environ, start))

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    request = urllib.request.Request(f"{endpoint}/blocks", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    config = {"endpoint": endpoint, "access_key_id": "a", "secret_access_key": "b"}
    path = tmp_path / "s3.json"
    path.write_text(json.dumps(config | {"region": "us-east-1"}))
    yield {"url": "s3://blocks", "config_file": str(path)}
    server.shutdown()
    server.server_close()
    thread.join()


def test_objects_on_an_s3_server(bucket: dict[str, object], tmp_path: Path) -> None:
    folder = tmp_path / "checks"
    folder.mkdir()
    check_store(
        lambda folder: make_store("object", bucket | {"prefix": folder.name}, b"f"),
        folder,
        persistent=True,
        spoil=spoil,
    )


def test_an_s3_server_that_is_not_there(bucket: dict[str, object], tmp_path: Path) -> None:
    config = tmp_path / "s3.json"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        settings = json.loads(config.read_text()) | {"endpoint": address}
        config.write_text(json.dumps(settings))
        store = make_store("object", bucket | {"timeout_s": 1}, b"f")
        assert put(store, [b"a"]) == [BlockOutcome.FAILED]
        assert get(store, [b"a"]) == [BlockOutcome.UNAVAILABLE]
        store.close()


# Servers that come and go -----------------------------------------------------------------------


def test_a_server_that_is_killed_and_comes_back(valkey: Valkey) -> None:
    now = [0.0]
    store = make_store("valkey", valkey.settings(timeout_s=1), b"f")
    assert isinstance(store, RemoteStore)
    store._clock = lambda: now[0]
    assert put(store, [b"a", b"b"]) == [OK, OK]
    valkey.kill()
    assert get(store, [b"a"]) == [BlockOutcome.FAILED]
    assert get(store, [b"a"]) == [BlockOutcome.UNAVAILABLE]
    assert put(store, [b"a"]) == [BlockOutcome.UNAVAILABLE]
    assert (store.exists([b"a"]), store.usage().available) == ([0], False)
    valkey.start()
    now[0] = 1.0
    assert put(store, [b"a", b"b"]) == [OK, OK]  # by itself
    assert get(store, [b"a", b"b", b"c"]) == [OK, OK, ABSENT]
    store.close()


@pytest.mark.parametrize("cluster", [False, True])
def test_a_server_that_is_not_there_at_the_start(valkey: Valkey, cluster: bool) -> None:
    valkey.kill()
    store = make_store("valkey", valkey.settings(timeout_s=1, cluster=cluster), b"f")
    assert put(store, [b"a"]) == [BlockOutcome.FAILED]
    stats = store.take_stats()
    assert stats is not None
    assert stats.reduce() == {"store_failed_blocks_failed": 1}
    store.close()


def test_a_server_that_hangs_costs_a_time_out(valkey: Valkey) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        store = make_store("valkey", {"address": address, "timeout_s": 0.2}, b"f")
        assert get(store, [b"a"]) == [BlockOutcome.FAILED]
        store.close()


def test_a_server_that_is_full(valkey: Valkey) -> None:
    valkey.kill()
    valkey.start("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    store = make_store("valkey", valkey.settings(), b"f")
    outcomes = [put(store, [b"%d" % n], 1_000_000)[0] for n in range(12)]
    assert set(outcomes) == {OK, BlockOutcome.FULL}
    assert store.usage().available  # it is full, not broken
    assert get(store, [b"0"], 1_000_000) == [OK]
    store.close()


def test_a_wrong_password_is_a_failure_and_no_crash(valkey: Valkey, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("wrong")
    store = make_store("valkey", valkey.settings(), b"f")
    assert put(store, [b"a"]) == [BlockOutcome.FAILED]
    store.close()


def test_two_engines_share_blocks_and_formats_do_not(valkey: Valkey) -> None:
    first, second = (make_store("valkey", valkey.settings(), b"one") for _ in range(2))
    other = make_store("valkey", valkey.settings(), b"two")
    assert put(first, [b"a"]) == [OK]
    assert get(second, [b"a"]) == [OK]
    assert get(other, [b"a"]) == [ABSENT]
    assert other.exists([b"a"]) == [0]
    for store in (first, second, other):
        store.close()


def test_blocks_get_too_old_on_the_server(valkey: Valkey) -> None:
    import valkey as client

    store = make_store("valkey", valkey.settings(ttl_s=1000), b"f")
    put(store, [b"a"])
    direct = client.Valkey("127.0.0.1", valkey.port, password=PASSWORD)
    [name] = direct.keys("*")
    assert 990 < direct.ttl(name) <= 1000
    direct.close()
    store.close()


def test_a_value_of_another_key_is_not_taken_for_it(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    store = make_store("object", {"url": f"file://{tmp_path}"}, b"f")
    put(store, [b"one", b"two"])
    one, two = sorted(tmp_path.rglob("*.kv"))
    two.write_bytes(one.read_bytes())
    assert sorted(get(store, [b"one", b"two"])) == [BlockOutcome.CORRUPT, OK]
    store.close()


# What is not the client's -----------------------------------------------------------------------


class Counting(Server):
    """Keeps values in a dict, and counts exchanges."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.exchanges: list[int] = []
        self.broken = False

    def store(self, names: Sequence[str], values: Sequence[memoryview]) -> list[BlockOutcome]:
        self._exchange(sum(map(len, values)))
        self.values.update(zip(names, map(bytes, values), strict=True))
        return [OK] * len(names)

    def load(self, names: Sequence[str], most: int) -> list[memoryview | None]:
        self._exchange(len(names))
        found = [self.values.get(name) for name in names]
        return [None if value is None else memoryview(value)[:most] for value in found]

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [len(self.values.get(name, b"")) for name in names]

    def delete(self, names: Sequence[str]) -> list[bool]:
        return [self.values.pop(name, None) is not None for name in names]

    def close(self) -> None:
        self.values.clear()

    def _exchange(self, size: int) -> None:
        if self.broken:
            raise TransferFailed("no answer")
        self.exchanges.append(size)


def test_a_large_batch_goes_in_bounded_exchanges() -> None:
    server = Counting()
    store = RemoteStore(server, "p", b"f")
    keys = [b"%d" % number for number in range(40)]
    assert put(store, keys, 1 << 20) == [OK] * 40
    assert len(server.exchanges) == 5
    assert max(server.exchanges) < (8 << 20) + 4096
    assert get(store, keys, 1 << 20) == [OK] * 40
    stats = store.take_stats()
    assert stats is not None
    assert stats.reduce()["CPU_to_REMOTE_total_bytes"] == 40 << 20
    assert stats.reduce()["REMOTE_to_CPU_operations"] == 1


def test_a_key_is_sent_once_per_exchange_and_the_last_counts() -> None:
    server = Counting()
    store = RemoteStore(server, "p", b"f")
    versions = [memoryview(payload_of(b"%d" % n, 5000)) for n in range(3)]
    assert store.put([b"a", b"b", b"a"], versions) == [OK] * 3
    assert len(server.values) == 2
    assert server.exchanges == [2 * 5020]
    buffer = bytearray(5000)
    assert store.get([b"a"], [memoryview(buffer)]) == [OK]
    assert buffer == versions[2]


def test_what_is_left_of_a_batch_is_not_tried_on_a_broken_server() -> None:
    server = Counting()
    store = RemoteStore(server, "p", b"f")
    server.broken = True
    outcomes = put(store, [b"%d" % number for number in range(24)], 1 << 20)
    assert outcomes == [BlockOutcome.FAILED] * 8 + [BlockOutcome.UNAVAILABLE] * 16


class HalfWay(Counting):
    """Fails after the first value of an exchange while it is broken."""

    one_by_one = True

    def store(self, names: Sequence[str], values: Sequence[memoryview]) -> list[BlockOutcome]:
        if self.broken:
            self.values[names[0]] = bytes(values[0])
        return super().store(names, values)


def test_a_block_of_which_a_part_came_is_not_taken_for_stored() -> None:
    server, now = HalfWay(), [0.0]
    remote = RemoteStore(server, "p", b"f", lambda: now[0])
    units = [HeadUnit(0, ((0, 4000),)), HeadUnit(1, ((4000, 1000),))]
    store = HeadShardedStore(remote, [units], lambda _: 0)
    server.broken = True
    assert put(store, [b"a"]) == [BlockOutcome.FAILED]
    server.broken = False
    now[0] = 60.0
    assert store.exists([b"a"]) == [5000], "its first part could not be removed"
    assert store.exists_whole([b"a"]) == [0]
    assert put(store, [b"a"]) == [OK]
    assert store.exists_whole([b"a"]) == [5000]
    assert get(store, [b"a"]) == [OK]


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (b"", BlockOutcome.CORRUPT),
        (b"x" * 19, BlockOutcome.CORRUPT),
        (b"x" * 5020, BlockOutcome.CORRUPT),
    ],
)
def test_a_value_that_is_none_of_ours(value: bytes, outcome: BlockOutcome) -> None:
    server = Counting()
    store = RemoteStore(server, "p", b"f")
    put(store, [b"a"])
    [name] = server.values
    server.values[name] = value
    assert get(store, [b"a"]) == [outcome]
    assert get(store, [b"a"]) == [ABSENT]


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        ("valkey", {"address": "nowhere"}, "address='nowhere'.*HOST:PORT"),
        ("valkey", {"address": "a:1,b:2"}, "set cluster to true"),
        ("valkey", {"address": "a:1", "password": "x"}, r"password='\*\*\*'.*'password_file'"),
        ("valkey", {"address": "redis://:x@a:1"}, r"redis://:\*\*\*@a:1'.*HOST:PORT"),
        ("valkey", {"address": "a:1", "password_file": "/none"}, "password_file='/none'"),
        ("valkey", {"address": "a:1", "tls_dir": "/none"}, "tls_dir='/none'.*ca.crt"),
        ("valkey", {"address": "a:1", "prefix": "a b"}, "prefix='a b'"),
        ("valkey", {"address": "a:1", "timeout_s": 0}, "timeout_s=0"),
        ("valkey", {"adress": "a:1"}, "adress='a:1'.*did you mean 'address'"),
        ("object", {"url": "pigeon://x"}, "url='pigeon://x'.*s3://bucket"),
        ("object", {"url": "file:///tmp", "config_file": "/none"}, "config_file='/none'"),
        ("object", {"url": "file:///tmp", "connections": 0}, "connections=0"),
        ("object", {"url": "file:///tmp", "prefix": "../x"}, "prefix='../x'"),
    ],
)
def test_a_wrong_setting_is_named(kind: str, settings: dict[str, object], text: str) -> None:
    pytest.importorskip({"valkey": "valkey", "object": "obstore"}[kind])
    with pytest.raises(ConfigError, match=text):
        make_store(kind, settings, b"f")
