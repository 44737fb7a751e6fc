"""Which adapters' KV may be reused."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvconnect import timed_calls
from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.engines.vllm import adapters
from kvconnect.engines.vllm.adapters import UNCHANGED_S, Adapters
from kvconnect.errors import Refused
from kvconnect.timed_calls import TimedCalls

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def poet(tmp_path: Path) -> LoRARequest:
    (tmp_path / WEIGHTS).write_bytes(bytes(100))
    (tmp_path / "adapter_config.json").write_text("{}")
    return LoRARequest("poet", 1, str(tmp_path))


def again(lora: LoRARequest, **changes: object) -> LoRARequest:
    fields = {name: getattr(lora, name) for name in ("lora_name", "lora_int_id", "lora_path")}
    return LoRARequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_an_adapter_is_trusted_while_it_stays_the_same(poet: LoRARequest) -> None:
    seen = Adapters()
    for _ in range(3):
        assert seen.trusted(poet)
        seen.next_step()
    for changes in ({"load_inplace": True}, {"lora_int_id": 2}):  # it was loaded again
        seen.reset()
        assert seen.trusted(poet)
        assert not seen.trusted(again(poet, **changes))
        assert not seen.trusted(poet), "nobody knows which weights are loaded now"
        assert seen.trusted(again(poet, lora_name="painter")), "others have hashes of their own"


@pytest.mark.parametrize("how", ["written", "replaced", "backdated", "added", "removed"])
def test_changed_files_are_other_weights(poet: LoRARequest, how: str) -> None:
    seen, path = Adapters(), Path(poet.lora_path) / WEIGHTS
    assert seen.trusted(poet)
    before = path.stat()
    if how == "added":
        (path.parent / "new_embeddings.safetensors").write_bytes(b"")
    elif how == "removed":
        path.unlink()
    elif how == "replaced":
        (path.parent / "next").write_bytes(bytes(100))
        (path.parent / "next").rename(path)
    else:
        path.write_bytes(bytes([1] * 100))
    if how == "backdated":  # as a copy that preserves times
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert seen.trusted(poet), "files are read once a step"
    seen.next_step()
    assert not seen.trusted(poet)
    seen.reset()
    assert seen.trusted(poet) == (how != "removed"), "nothing of the old weights is stored"


def test_weights_that_are_in_no_file_are_not_known(tmp_path: Path) -> None:
    """As those that a trainer sends as tensors."""
    seen = Adapters()
    assert not seen.trusted(LoRARequest("poet", 1, str(tmp_path / "nowhere")))
    assert not seen.trusted(LoRARequest("poet", 1, str(tmp_path)))


def test_a_disk_that_does_not_answer_ends_nothing(
    poet: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Adapters()
    assert seen.trusted(poet)
    seen.next_step()

    def gone(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", gone)
        assert not seen.trusted(poet)
        assert seen.contents(poet) == ""
        assert not seen.trusted(again(poet, lora_name="painter"))
    seen.reset()
    assert seen.trusted(poet), "it is back"


def test_an_adapter_whose_disk_fails_in_a_step_is_not_taken_for_the_model(
    poet: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was trusted earlier in the step. The model's own blocks have an empty scope."""
    seen = Adapters()
    assert seen.trusted(poet)
    monkeypatch.setattr(seen, "contents", lambda _: "")
    assert seen.trusted(poet)
    first = seen.scope(poet)
    assert first and seen.scope(poet) != first, "for nobody"


def test_a_disk_that_hangs_holds_up_one_look(
    poet: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a hard mount whose server is gone: each of its calls waits for ever."""
    seen, go_on, looks = Adapters(), threading.Event(), list[object]()
    seen._call = TimedCalls("test", 0.05)
    assert seen.trusted(poet)
    first = seen.contents(poet)
    real = os.scandir

    def hung(path: Path) -> object:
        looks.append(path)
        go_on.wait()
        return real(path)

    monkeypatch.setattr(os, "scandir", hung)
    for _ in range(5):
        seen.next_step()
        assert not seen.trusted(poet)
        assert seen.contents(poet) == ""
        with pytest.raises(Refused, match="no file tells the weights"):
            seen.prompt_identity(_asking(poet))
    assert len(looks) == 1, "nobody waits for it again"
    go_on.set()
    assert seen._call._last is not None
    seen._call._last.result()
    seen._call._breaker = CircuitBreaker(1)
    seen.reset()
    assert seen.trusted(poet) and seen.contents(poet) == first, "it is back"


def test_a_late_look_at_an_adapter_costs_the_trust_of_its_step_only(
    poet: LoRARequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of others, whose files cannot be looked at meanwhile."""
    painter = LoRARequest("painter", 2, str(_copied(poet, tmp_path / "painter")))
    singer = LoRARequest("singer", 3, str(_copied(poet, tmp_path / "singer")))
    seen, go_on, real = Adapters(), threading.Event(), os.scandir
    seen._call = TimedCalls("test", 30.0)
    assert seen.trusted(poet) and seen.trusted(painter) and seen.trusted(singer)

    def hung(path: Path) -> object:
        if path == Path(poet.lora_path):
            go_on.wait()
        return real(path)

    monkeypatch.setattr(os, "scandir", hung)
    seen._call._limit_s = 0.05
    seen.next_step()
    assert not seen.trusted(poet) and not seen.trusted(painter)
    (Path(singer.lora_path) / WEIGHTS).write_bytes(bytes([1] * 100))
    assert not seen.trusted(singer)
    go_on.set()
    assert seen._call._last is not None
    seen._call._last.result()
    seen._call._limit_s = 30.0
    assert not seen.trusted(poet), "files are read once a step"
    seen.next_step()
    now = time.monotonic() + 1.0
    monkeypatch.setattr(timed_calls.time, "monotonic", lambda: now)
    assert seen.trusted(poet) and seen.trusted(painter)
    assert not seen.trusted(singer), "its files have changed"


@pytest.mark.parametrize("how", ["old", "young", "changed", "loaded again"])
def test_a_late_first_look_tells_what_was_loaded_long_after_it_was_written(
    how: str, poet: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the engine may have loaded others, if they are young, or were written meanwhile."""
    seen, go_on, real = Adapters(), threading.Event(), os.scandir
    seen._call = TimedCalls("test", 0.05)

    def hung(path: Path) -> object:
        go_on.wait()
        return real(path)

    monkeypatch.setattr(os, "scandir", hung)
    now = time.time()
    then = now + UNCHANGED_S - (60.0 if how == "young" else 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(adapters.time, "time", lambda: then)
        assert not seen.trusted(poet)
    go_on.set()
    assert seen._call._last is not None
    seen._call._last.result()
    seen._call = TimedCalls("test", 30.0)
    assert not seen.trusted(poet), "files are read once a step"
    seen.next_step()
    if how == "changed":
        weights = Path(poet.lora_path) / WEIGHTS
        while weights.stat().st_ctime <= now:  # its clock is coarse
            weights.write_bytes(bytes([1] * 100))
    asked = again(poet, lora_int_id=2) if how == "loaded again" else poet
    assert seen.trusted(asked) is (how == "old")
    seen.next_step()
    assert seen.trusted(asked) is (how == "old"), "until the next reset"
    seen.reset()
    assert seen.trusted(asked)


@pytest.mark.parametrize("how", ["same", "changed"])
def test_an_adapter_that_takes_long_to_read_is_read_once_and_holds_up_no_other(
    how: str, poet: LoRARequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are young: what counts is that their files were seen in time. Control: they changed."""
    painter = LoRARequest("painter", 2, str(_copied(poet, tmp_path / "painter")))
    singer = LoRARequest("singer", 3, str(_copied(poet, tmp_path / "singer")))
    seen, go_on, read = Adapters(), threading.Event(), list[str]()
    seen._read_call = TimedCalls("test", 30.0)
    assert seen.trusted(painter)
    real = adapters.adapter_name

    def slow(path: str) -> str:
        read.append(path)
        if path == poet.lora_path:
            go_on.wait()
        return real(path)

    monkeypatch.setattr(adapters, "adapter_name", slow)
    seen._read_call._limit_s = 0.05
    for _ in range(3):
        seen.next_step()
        assert not seen.trusted(poet)
        assert not seen.trusted(singer), "its contents are not read yet"
        assert seen.trusted(painter)
    go_on.set()
    assert seen._read_call._last is not None
    seen._read_call._last.result()
    seen._read_call = TimedCalls("test", 30.0)
    seen.next_step()
    if how == "changed":
        for adapter in (poet, singer):
            (Path(adapter.lora_path) / WEIGHTS).write_bytes(bytes([1] * 100))
    assert [seen.trusted(poet), seen.trusted(singer)] == [how == "same"] * 2
    assert read.count(poet.lora_path) == (1 if how == "same" else 2)


def test_without_a_thread_for_a_look_an_adapter_is_trusted_again_later(
    poet: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Adapters()
    assert seen.trusted(poet)

    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        seen._call = TimedCalls("test")
        seen.next_step()
        assert not seen.trusted(poet)
        assert seen.contents(poet) == ""
    seen.next_step()
    assert seen.trusted(poet)


def test_a_prompt_with_unknown_weights_is_not_handed_off(poet: LoRARequest, tmp_path: Path) -> None:
    """Else two engines would take weights that neither knows for the same."""
    seen, nowhere = Adapters(), LoRARequest("poet", 1, str(tmp_path / "nowhere"))
    assert seen.prompt_identity(_asking(poet)) == Adapters().prompt_identity(_asking(poet))
    seen.prompt_identity(_asking(None))
    with pytest.raises(Refused, match="no file tells the weights of adapter poet") as refused:
        seen.prompt_identity(_asking(nowhere))
    assert refused.value.field == "params"


def _asking(lora: LoRARequest | None) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(), None, lora_request=lora)


def _copied(lora: LoRARequest, folder: Path) -> Path:
    """Copy an adapter's files into a new folder, and return it."""
    folder.mkdir()
    for name in (WEIGHTS, "adapter_config.json"):
        (folder / name).write_bytes((Path(lora.lora_path) / name).read_bytes())
    return folder


def test_contents_are_the_same_in_all_engines(poet: LoRARequest, tmp_path: Path) -> None:
    copy = _copied(poet, tmp_path / "copy")
    other = LoRARequest("painter", 7, str(copy))
    seen = Adapters()
    first = seen.contents(poet)
    assert first and Adapters().contents(other) == first
    assert seen.scope(poet) == Adapters().scope(other)
    (copy / WEIGHTS).write_bytes(bytes([1] * 100))
    assert seen.contents(other) not in ("", first)
    assert seen.trusted(other) and not seen.trusted(again(other, lora_int_id=8))
    assert seen.scope(other) != seen.scope(other), "for nobody"


def test_adapters_come_and_go_in_bounded_memory(
    poet: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "MOST_ADAPTERS", 8)
    monkeypatch.setattr(adapters, "MOST_DIGESTS", 4)
    seen = Adapters()
    trusted = [seen.trusted(again(poet, lora_name=f"l{number}")) for number in range(20)]
    assert trusted == [True] * 8 + [False] * 12
    assert not seen.trusted(poet)
    assert seen.trusted(again(poet, lora_name="l3")), "those that are known are served on"
    for number in range(20):
        seen.contents(LoRARequest("poet", 1, f"/nowhere/{number}"))
    assert len(seen._contents) == 4 and len(seen._known) == 8
    seen.reset()
    assert seen.trusted(poet)
