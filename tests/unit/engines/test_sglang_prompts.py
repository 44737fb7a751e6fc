"""Identities of SGLang's requests: equal on both servers for one request, and for no other."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvconnect.engines.sglang import prompts
from kvconnect.engines.sglang.prompts import AdapterContents, prompt_identity
from kvconnect.protocol.prompts import PromptIdentity, difference
from kvconnect.timed_calls import TimedCalls


def adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def scheduler(**loaded: Path) -> Any:
    """A server's scheduler with adapters named ``poet``, by SGLang's ids."""
    refs = {
        name: SimpleNamespace(lora_name="poet", lora_path=str(path))
        for name, path in loaded.items()
    }
    runner = SimpleNamespace(lora_manager=SimpleNamespace(lora_refs=refs))
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


@dataclass
class Item:
    """One of a prompt's media, as SGLang has it."""

    hash: int

    def padding_values(self) -> tuple[int, ...]:
        return (1_000_000 + self.hash,)


def identity(server: Any = None, compares_media: bool = True, **fields: Any) -> PromptIdentity:
    known = {"origin_input_ids": [1, 2, 3], "output_ids": [], "lora_id": None, "extra_key": None}
    req = SimpleNamespace(**{**known, "cache_salt": None, "multimodal_inputs": None, **fields})
    made, contents = server or scheduler(), AdapterContents()
    return prompt_identity(req, made, contents, compares_media=compares_media)


def media(*hashes: int) -> Any:
    return SimpleNamespace(mm_items=[Item(value) for value in hashes])


def picture(value: int, *, first: int = 1, compares_media: bool = True) -> PromptIdentity:
    """The identity of a prompt with a picture of this hash."""
    items = media(value)
    ids = [first, *items.mm_items[0].padding_values() * 2, 3]
    return identity(origin_input_ids=ids, multimodal_inputs=items, compares_media=compares_media)


@pytest.mark.parametrize(
    "other",
    [
        {"origin_input_ids": [1, 2, 4]},
        {"origin_input_ids": [1, 2, 3, 4]},
        {"cache_salt": "a tenant"},
        {"extra_key": "a class"},
        {"multimodal_inputs": media(5)},
    ],
)
def test_a_request_that_differs_has_another_identity(other: dict[str, Any]) -> None:
    assert identity(**other) == identity(**other)  # control
    assert identity(**other) != identity()


def test_media_go_by_what_they_are() -> None:
    assert identity(multimodal_inputs=media(5)) != identity(multimodal_inputs=media(6))


@pytest.mark.parametrize("sides", [(False, True), (True, False), (False, False)], ids=str)
def test_media_with_hashes_of_one_server_are_not_compared(sides: tuple[bool, bool]) -> None:
    """As of a prefill server whose media an encoder server computes."""
    prefill, decode = sides
    ours = picture(5, compares_media=prefill)
    assert difference(ours, picture(6, compares_media=decode)) == ""
    assert "token ids" in difference(ours, picture(6, first=2, compares_media=decode))
    text = identity(origin_input_ids=[1, -1, -1, 3])
    assert "differ in their media" in difference(ours, text)


def test_media_with_hashes_of_all_servers_are_compared() -> None:
    """The control."""
    assert difference(picture(5), picture(5)) == ""
    said = difference(picture(5), picture(6))
    assert "differ in their media" in said
    assert all(
        f"hashes of media {side.media[:8].hex()}" in said for side in (picture(5), picture(6))
    )


def test_media_go_by_their_places() -> None:
    one, other = (1_000_000 + value for value in (5, 6))
    first, second = (
        identity(origin_input_ids=ids, multimodal_inputs=media(5, 6))
        for ids in ([one, 2, other], [other, 2, one])
    )
    assert difference(first, second)


def test_adapters_go_by_name_and_files_and_not_by_the_number_that_an_engine_gave(
    tmp_path: Path,
) -> None:
    first = adapter(tmp_path / "a", b"weights" * 100)
    same = adapter(tmp_path / "b", b"weights" * 100)
    other = adapter(tmp_path / "c", b"changed" * 100)
    ours = identity(scheduler(aa=first), lora_id="aa", extra_key="classaa")
    assert identity(scheduler(bb=same), lora_id="bb", extra_key="classbb") == ours
    assert identity(scheduler(cc=other), lora_id="cc", extra_key="classcc") != ours
    assert identity(scheduler(bb=same), lora_id="bb", extra_key="otherbb") != ours


@pytest.mark.parametrize("left", [(), ("adapter_config.json",)], ids=str)
def test_adapters_whose_files_are_not_known_are_never_equal(
    tmp_path: Path, left: tuple[str, ...]
) -> None:
    """As if given as tensors. Also not on one server."""
    folder = adapter(tmp_path / "a", b"weights")
    for path in folder.iterdir():
        if path.name not in left:
            path.unlink()
    server, contents = scheduler(aa=folder), AdapterContents()
    loaded = server.tp_worker.model_runner.lora_manager.lora_refs["aa"]
    assert contents.identify("aa", loaded) != contents.identify("aa", loaded)
    assert identity(server, lora_id="aa") != identity(server, lora_id="aa")
    assert identity(server) == identity(server)  # control: a request without an adapter


def test_a_disk_that_hangs_holds_up_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, contents = scheduler(aa=adapter(tmp_path / "a", b"weights")), AdapterContents()
    loaded = server.tp_worker.model_runner.lora_manager.lora_refs["aa"]
    go_on, looks = threading.Event(), list[str]()

    def hung(path: str) -> str:
        looks.append(path)
        go_on.wait()
        return "digest"

    contents._call = TimedCalls("test", 0.05)
    monkeypatch.setattr(prompts, "adapter_name", hung)
    found = {contents.identify("aa", loaded) for _ in range(3)}
    assert len(found) == 3, "unknown weights are equal to none"
    assert len(looks) == 1, "nobody waits for it again"
    go_on.set()
    assert contents._call._last is not None
    contents._call._last.result()
    assert contents.identify("aa", loaded) == ("poet", "digest"), "it is back"
    assert len(looks) == 1, "what came late is known"


def test_an_adapter_that_could_not_be_read_is_read_again_30_seconds_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each request would wait for its disk."""
    folder = tmp_path / "a"
    server, contents = scheduler(aa=folder), AdapterContents()
    loaded = server.tp_worker.model_runner.lora_manager.lora_refs["aa"]
    now, looks, real = 1000.0, list[str](), prompts.adapter_name

    def read(path: str) -> str:
        looks.append(path)
        return real(path)

    monkeypatch.setattr(prompts, "adapter_name", read)
    monkeypatch.setattr(prompts, "time", SimpleNamespace(monotonic=lambda: now))
    found = {contents.identify("aa", loaded) for _ in range(3)}
    assert (len(found), len(looks)) == (3, 1)
    now += 30.0
    found |= {contents.identify("aa", loaded) for _ in range(3)}
    assert (len(found), len(looks)) == (6, 2)
    adapter(folder, b"weights")
    now += 29.0
    assert contents.identify("aa", loaded) != contents.identify("aa", loaded)
    now += 1.0
    assert contents.identify("aa", loaded) == contents.identify("aa", loaded)
    assert len(looks) == 3


def test_adapters_that_a_server_does_not_have_are_never_equal() -> None:
    assert identity(lora_id="0a") != identity(lora_id="0a")


def test_the_size_of_an_elastic_engine_is_not_the_requests() -> None:
    assert identity(extra_key="class|elastic_ep_size=4") == identity(extra_key="class")
    assert identity(extra_key="elastic_ep_size=4") == identity(extra_key=None)


def test_a_prompt_that_is_computed_once_more_has_the_answer_so_far() -> None:
    again = identity(output_ids=[7, 8], pd_rebootstrap_in_progress=True)
    assert again == identity(origin_input_ids=[1, 2, 3, 7, 8])
    assert identity(output_ids=[7, 8]) == identity()  # control: decode's own tokens
