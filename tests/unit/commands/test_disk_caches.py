"""``kvconnect cache``: looking into the disk tier, and clearing it."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from kvconnect.cache.keys import block_key, tenant_of
from kvconnect.cli import main
from kvconnect.commands.disk_caches import parse_seconds, parse_tenant
from kvconnect.errors import ConfigError
from kvconnect.testing.buffers import payload_of, spoil_files
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.backends.base import PagePool
from kvconnect.tiers.backends.disk import DiskOptions, DiskStore, inspect
from kvconnect.tiers.backends.disk import folder as folders
from kvconnect.tiers.backends.disk.record import pack_segment
from kvconnect.tiers.backends.disk.segment import Segment

DAY = 86_400
NOW = time.time()


def fill(path: Path, owner: str, fingerprint: bytes, keys: list[bytes], at: float = NOW) -> None:
    with_clock = DiskStore(
        DiskOptions(path=str(path), capacity=16 << 20, owner=owner), fingerprint, lambda: at
    )
    outcomes = with_clock.put(keys, [memoryview(payload_of(key, 1000)) for key in keys])
    assert set(outcomes) == {BlockOutcome.OK}
    with_clock.close()


def held(path: Path, owner: str, fingerprint: bytes, keys: list[bytes]) -> list[bytes]:
    store = DiskStore(DiskOptions(path=str(path), capacity=16 << 20, owner=owner), fingerprint)
    found = [key for key, nbytes in zip(keys, store.exists(keys), strict=True) if nbytes]
    store.close()
    return found


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """Two workers; the first has blocks of two formats and two ages."""
    fill(tmp_path, "tp0", b"\x01", [b"a", b"b"], NOW - 10 * DAY)
    fill(tmp_path, "tp0", b"\x01", [b"c"])
    fill(tmp_path, "tp0", b"\x02", [b"d"])
    fill(tmp_path, "tp1", b"\x01", [b"a"])
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["cache", *arguments])
    return code, capsys.readouterr().out


def test_stats(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = answer(capsys, "stats", str(tier), "--json")
    parts = json.loads(out)
    assert code == 0
    keys = ("owner", "format", "blocks", "block_bytes", "segments", "in_use_by")
    assert [tuple(part[key] for key in keys) for part in parts] == [
        ("tp0", "01", 3, 3000, 1, ""),
        ("tp0", "02", 1, 1000, 1, ""),
        ("tp1", "01", 1, 1000, 1, ""),
    ]
    assert (parts[0]["oldest"], parts[0]["newest"]) == (int(NOW - 10 * DAY), int(NOW))
    code, out = answer(capsys, "stats", str(tier))
    assert "tp0  format 01  3 blocks, 0.0 MiB, in 1 segments" in out


def test_stats_of_a_folder_in_use(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = DiskStore(DiskOptions(path=str(tier), capacity=16 << 20, owner="tp1"), b"\x01")
    store.put([b"live"], [memoryview(b"x" * 500)])
    parts = json.loads(answer(capsys, "stats", str(tier), "--json")[1])
    assert [part["in_use_by"].startswith("process") for part in parts] == [False, False, True]
    assert parts[2]["blocks"] == 2
    store.close()


def test_ls(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = answer(capsys, "ls", str(tier), "--json")
    entries = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(e["owner"], e["format"], bytes.fromhex(e["key"])) for e in entries] == [
        ("tp0", "01", b"a"),
        ("tp0", "01", b"b"),
        ("tp0", "01", b"c"),
        ("tp0", "02", b"d"),
        ("tp1", "01", b"a"),
    ]
    assert all(entry["nbytes"] == 1000 for entry in entries)
    assert answer(capsys, "ls", str(tier))[1].splitlines()[0].endswith("1000  61")


def test_verify_finds_and_removes(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "verify", str(tier)) == (0, "5 blocks read, 0 bad, 0 of them removed\n")
    assert spoil_files(tier / "tp0", payload_of(b"b", 1000)) == 1
    code, out = answer(capsys, "verify", str(tier), "--json")
    assert code == 1
    assert json.loads(out) == {"blocks": 5, "nbytes": 5000, "bad": 1, "removed": 1}
    assert held(tier, "tp0", b"\x01", [b"a", b"b", b"c"]) == [b"a", b"c"]
    assert answer(capsys, "verify", str(tier)) == (0, "4 blocks read, 0 bad, 0 of them removed\n")


def test_verify_only_reports_where_an_engine_is(
    tier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spoil_files(tier / "tp1", payload_of(b"a", 1000)) == 1
    store = DiskStore(DiskOptions(path=str(tier), capacity=16 << 20, owner="tp1"), b"\x01")
    code, out = answer(capsys, "verify", str(tier), "--json")
    assert (code, json.loads(out)["bad"], json.loads(out)["removed"]) == (1, 1, 0)
    assert store.exists([b"a"]) == [1000]
    store.close()


def test_verify_tells_damage_from_a_file_that_was_used_again(
    tier: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(segment: Segment, row: int, pool: PagePool) -> bool:
        """Stand for an engine that drops the segment while it is looked at."""
        head = segment.head._replace(identity=bytes(16))
        with open(f"{segment.path}.seg", "r+b") as file:
            file.write(pack_segment(head))
        return False

    monkeypatch.setattr(inspect, "is_readable", overtaken)
    code, out = answer(capsys, "verify", str(tier), "--json")
    assert (code, json.loads(out)["bad"]) == (0, 0)


def test_verify_counts_no_block_that_an_engine_removes_meanwhile(
    tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(DiskOptions(path=str(tier), capacity=16 << 20, owner="tp1"), b"\x01")
    keys = [b"k%d" % number for number in range(4)]
    store.put(keys, [memoryview(payload_of(key, 1000)) for key in keys])
    real, looked = inspect.is_readable, list[int]()

    def look(segment: Segment, row: int, pool: PagePool) -> bool:
        looked.append(row)
        if segment.rows.keys[row] == keys[0]:
            assert store.remove(keys[1:3]) == [BlockOutcome.OK] * 2
        return real(segment, row, pool)

    with monkeypatch.context() as patch:
        patch.setattr(inspect, "is_readable", look)
        found = inspect.verify(str(tier), lambda *_: None)
    assert (found.blocks, found.bad, len(looked)) == (7, 0, 9)
    assert spoil_files(tier, payload_of(keys[3], 1000)) == 1
    found = inspect.verify(str(tier), lambda *_: None)
    assert (found.blocks, found.bad) == (7, 1), "the control: damage is"
    store.close()


def test_an_engine_is_told_who_verifies_its_folder(
    tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_LOCK_WAIT_S", 0.0)
    (tier / "tp1" / folders.LOCK).write_text("4711\n")  # the engine that was there before

    def started(*_: object) -> None:
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}:"):
            DiskStore(DiskOptions(path=str(tier), capacity=16 << 20, owner="tp1"), b"\x01")
        started_at.append(1)

    started_at = list[int]()
    shutil.rmtree(tier / "tp0")
    assert inspect.verify(str(tier), started).bad == 0
    assert started_at


def test_clear_what_is_old(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "clear", str(tier), "--older-than", "11d") == (0, "0 blocks removed\n")
    code, out = answer(capsys, "clear", str(tier), "--older-than", "9d", "--json")
    assert (code, json.loads(out)) == (0, {"removed": 2})
    assert held(tier, "tp0", b"\x01", [b"a", b"b", b"c"]) == [b"c"]


def test_clear_a_format(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "clear", str(tier), "--format", "02") == (0, "1 blocks removed\n")
    assert held(tier, "tp0", b"\x02", [b"d"]) == []
    assert held(tier, "tp0", b"\x01", [b"a", b"b", b"c"]) == [b"a", b"b", b"c"]


def test_clear_all(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "clear", str(tier)) == (0, "5 blocks removed\n")
    assert list(tier.rglob("*.seg")) == list(tier.rglob("*.idx")) == []
    assert answer(capsys, "stats", str(tier))[1].count("empty") == 2


def test_clear_refuses_while_an_engine_is_there(
    tier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = DiskStore(DiskOptions(path=str(tier), capacity=16 << 20, owner="tp1"), b"\x01")
    with pytest.raises(SystemExit, match="2"):
        main(["cache", "clear", str(tier)])
    assert f"path {tier}/tp1: it is in use by process" in capsys.readouterr().err
    store.close()
    assert held(tier, "tp0", b"\x01", [b"a", b"b", b"c"]) == [b"a", b"b", b"c"]


# Tenants and models -----------------------------------------------------------------------------


def keys_of(salt: str, count: int) -> list[bytes]:
    return [block_key(tenant_of(salt) + bytes(8), 0, b"%d" % number) for number in range(count)]


ALICE, BOB, NOBODY = keys_of("alice", 3), keys_of("bob", 2), keys_of("", 1)
ALL = [*ALICE, *BOB, *NOBODY]
LLAMA, QWEN = b"\x0a", b"\x0b"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Two workers, blocks of two models by three tenants; nothing is known of a third format."""
    for owner, fingerprint, model in (
        ("0", LLAMA, "llama"),
        ("1", LLAMA, "llama"),
        ("0", QWEN, "qwen"),
    ):
        options = DiskOptions(
            path=str(tmp_path), capacity=16 << 20, owner=owner, about={"model": model}
        )
        DiskStore(options, fingerprint).close()
        fill(tmp_path, owner, fingerprint, ALL)
    fill(tmp_path, "1", b"\x0c", ALICE)
    return tmp_path


def test_stats_by_tenant(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = answer(capsys, "stats", str(shared), "--json")
    parts = json.loads(out)
    assert code == 0
    assert [(part["owner"], part["format"], part["model"]) for part in parts] == [
        ("0", "0a", "llama"),
        ("0", "0b", "qwen"),
        ("1", "0a", "llama"),
        ("1", "0c", ""),
    ]
    assert parts[0]["tenants"] == {
        tenant_of("alice").hex(): 3000,
        tenant_of("bob").hex(): 2000,
        "0" * 16: 1000,
    }
    assert parts[3]["tenants"] == {tenant_of("alice").hex(): 3000}
    lines = answer(capsys, "stats", str(shared))[1].splitlines()
    assert lines[0].startswith("0  format 0a  llama  6 blocks")
    assert lines[1] == f"    tenant {tenant_of('alice').hex()}  0.0 MiB"


def test_stats_shows_the_largest_of_many_tenants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, "0", LLAMA, [key for n in range(15) for key in keys_of(f"user {n}", 1)])
    fill(tmp_path, "0", LLAMA, ALICE)
    lines = answer(capsys, "stats", str(tmp_path))[1].splitlines()
    assert tenant_of("alice").hex() in lines[1]
    assert (len(lines), lines[-1]) == (12, "    and 6 more tenants")
    assert len(json.loads(answer(capsys, "stats", str(tmp_path), "--json")[1])[0]["tenants"]) == 16


def test_stats_and_ls_of_a_model(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"llama": 2, "qwen": 1, "": 1, "no such model": 0}
    for model, parts in counts.items():
        found = answer(capsys, "stats", str(shared), "--json", "--model", model)[1]
        assert [part["model"] for part in json.loads(found)] == [model] * parts
    lines = answer(capsys, "ls", str(shared), "--model", "qwen")[1].splitlines()
    assert len(lines) == 6
    assert all(line.endswith("  qwen") for line in lines)
    assert lines[0].split()[-2] == ALICE[0].hex()


@pytest.mark.parametrize("flags", [("--tenant", "bob"), ("--tenant-id", tenant_of("bob").hex())])
def test_ls_of_a_tenant(
    shared: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    out = answer(capsys, "ls", str(shared), "--json", *flags)[1]
    entries = [json.loads(line) for line in out.splitlines()]
    assert [bytes.fromhex(entry["key"]) for entry in entries] == BOB * 3
    assert {entry["tenant"] for entry in entries} == {tenant_of("bob").hex()}
    assert answer(capsys, "ls", str(shared), "--json", "--tenant", "eve")[1] == ""


@pytest.mark.parametrize(
    ("salt", "flags"),
    [
        ("alice", ("--tenant", "alice")),
        ("bob", ("--tenant-id", tenant_of("bob").hex().upper())),
        ("", ("--tenant", "")),
    ],
)
def test_clear_a_tenant(
    shared: Path, capsys: pytest.CaptureFixture[str], salt: str, flags: tuple[str, str]
) -> None:
    listed = len(answer(capsys, "ls", str(shared), *flags)[1].splitlines())
    left = [key for key in ALL if key[:8] != tenant_of(salt)]
    code, out = answer(capsys, "clear", str(shared), *flags, "--json")
    assert (code, json.loads(out)) == (0, {"removed": listed})
    assert listed >= 3
    for owner, fingerprint in (("0", LLAMA), ("0", QWEN), ("1", LLAMA)):
        assert held(shared, owner, fingerprint, ALL) == left
    assert answer(capsys, "ls", str(shared), *flags)[1] == ""
    assert answer(capsys, "verify", str(shared))[0] == 0


def test_what_was_cleared_stays_away_without_an_index(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "clear", str(shared), "--tenant", "alice")
    for index in shared.rglob("*.idx"):
        index.unlink()
    assert held(shared, "0", LLAMA, ALL) == [*BOB, *NOBODY]


def test_clear_a_model(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = (0, "0 blocks removed\n")
    assert answer(capsys, "clear", str(shared), "--model", "no such model") == nothing
    assert answer(capsys, "clear", str(shared), "--model", "llama") == (0, "12 blocks removed\n")
    assert held(shared, "0", LLAMA, ALL) == held(shared, "1", LLAMA, ALL) == []
    assert held(shared, "0", QWEN, ALL) == ALL
    assert held(shared, "1", b"\x0c", ALL) == ALICE
    assert answer(capsys, "clear", str(shared), "--model", "") == (0, "3 blocks removed\n")
    assert held(shared, "0", QWEN, ALL) == ALL


def test_filters_add_up(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tenant", "alice", "--model", "llama", "--format", "0A", "--older-than", "0s")
    assert answer(capsys, "clear", str(shared), *flags, "--json")[1] == '{"removed": 6}\n'
    assert held(shared, "0", LLAMA, ALL) == [*BOB, *NOBODY]
    assert held(shared, "0", QWEN, ALL) == ALL
    old = (*flags[:-1], "1d")
    assert answer(capsys, "clear", str(shared), *old, "--json")[1] == '{"removed": 0}\n'


def test_clear_a_tenant_not_while_an_engine_is_there(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = DiskStore(DiskOptions(path=str(shared), capacity=16 << 20, owner="1"), LLAMA)
    for flags in (("--tenant", "alice"), ("--model", "llama")):
        with pytest.raises(SystemExit, match="2"):
            main(["cache", "clear", str(shared), *flags])
        assert f"path {shared}/1: it is in use by process" in capsys.readouterr().err
    store.close()
    assert held(shared, "0", LLAMA, ALL) == ALL


def test_a_model_is_shown_as_plain_text(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shared / "0" / "formats" / "0a.json"
    path.write_text(json.dumps({"model": "evil\x1b[2J\nname"}))
    for what in ("stats", "ls"):
        out = answer(capsys, what, str(shared))[1]
        assert "evil?[2J?name" in out
        assert "\x1b" not in out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--tenant-id", ""), "tenant-id : use the 16 hexadecimal digits"),
        (("--tenant-id", "0" * 18), "use the 16 hexadecimal digits"),
        (("--tenant-id", "alice"), "use the 16 hexadecimal digits"),
        (("--tenant-id", "00", "--tenant", "a"), "not allowed with"),
        (("--older-than", ""), "older-than : use a number"),  # an unset variable of a shell
        (("--format", ""), "format : use hexadecimal digits"),
        (("--format", "xyz"), "use hexadecimal digits"),
    ],
)
def test_a_filter_that_cannot_be_meant(
    shared: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], text: str
) -> None:
    for what in ("ls", "clear"):
        with pytest.raises(SystemExit, match="2"):
            main(["cache", what, str(shared), *flags])
        assert text in capsys.readouterr().err
    assert held(shared, "0", LLAMA, ALL) == ALL


def test_tenant_ids() -> None:
    assert parse_tenant("x", "00fF") == b"\x00\xff"
    for text in ("0", "00 ff", "0x00", "00\n"):
        with pytest.raises(ConfigError, match="16 hexadecimal digits"):
            parse_tenant("x", text)


# Folders and durations --------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["stats", "ls", "verify", "clear"])
def test_a_folder_that_is_none_is_named(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, text in ((tmp_path, "no worker"), (tmp_path / "x", "No such file")):
        with pytest.raises(SystemExit, match="2"):
            main(["cache", what, str(folder)])
        assert f"path {folder}: {text}" in capsys.readouterr().err


def test_durations() -> None:
    texts = {"90s": 90, "30m": 1800, "12h": 43_200, "7d": 604_800, "0s": 0}
    assert {text: parse_seconds("x", text) for text in texts} == texts
    for text in ("", "7", "d", "-7d", "7w", "1.5h"):
        with pytest.raises(ConfigError, match="such as 7d"):
            parse_seconds("x", text)
