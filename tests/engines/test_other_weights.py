"""Engines with other weights under one name are refused until both have the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.models import change_weights, model_dir
from tests.engines.pd import (
    Pair,
    assert_quiet,
    one_clean_error,
    pair,
    pull,
    push,
    received_bytes,
    refused,
    standing_ticket,
)
from tests.engines.scenario import (
    FULL,
    HOST,
    NEW,
    assert_nothing_leaks,
    disk,
    prompts,
    settle,
)
from tests.engines.server import Answer, Server, kv_transfer


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints of the prefill and the decode engine, with one name and the same weights."""
    found = tmp_path / "p" / "llama", tmp_path / "d" / "llama"
    for folder in found:
        shutil.copytree(model_dir("llama"), folder)
    return found


@pytest.fixture
def engines(folders: tuple[Path, Path]) -> Iterator[Pair]:
    (p, d) = ({"args": ("--model", str(folder))} for folder in folders)
    with pair(prefill=p, decode=d) as both:
        yield both


def reload(server: Server) -> None:
    """Load the weights that the engine's folder has now, as the documentation asks for."""
    server.post("/collective_rpc", {"method": "reload_weights"})
    server.post("/reset_prefix_cache?reset_external=true")


def test_updated_alike_engines_meet_and_others_do_not(
    folders: tuple[Path, Path], engines: Pair
) -> None:
    (p, d), asked = engines, prompts()
    first = pull(p, d, asked[0], NEW).tokens
    moved = received_bytes(d)
    assert moved > 0

    change_weights(folders[0])
    reload(p)
    offer = standing_ticket(p)
    with one_clean_error():
        pull(p, d, asked[1], NEW)
    with one_clean_error():
        push(p, d, asked[2], NEW, offer)
    assert received_bytes(d) == moved and refused(d, "weights") > 0
    for log in (p.tail(1 << 20), d.tail(1 << 20)):
        (line, *_) = [line for line in log.splitlines() if "weights is 'files" in line]
        assert "on the decode side" in line and "on the prefill side" in line

    change_weights(folders[1])
    reload(d)
    p.post("/reset_prefix_cache?reset_external=true")
    second = pull(p, d, asked[0], NEW)
    assert received_bytes(d) > moved
    alone = d.complete(asked[0], NEW)
    assert second.tokens == alone.tokens != first
    assert push(p, d, asked[3], NEW, offer).tokens == d.complete(asked[3], NEW).tokens
    assert_quiet(p, d)


def test_engines_that_slept_or_were_reset_meet_again(engines: Pair) -> None:
    (p, d), asked = engines, prompts()
    p.post("/sleep?level=1")
    p.post("/wake_up")
    d.post("/reset_prefix_cache?reset_external=true")
    assert pull(p, d, asked[0], NEW).tokens == d.complete(asked[0], NEW).tokens
    assert received_bytes(d) > 0 and refused(d, "weights") == 0
    assert_quiet(p, d)


def test_stored_blocks_are_of_the_weights_that_they_were_computed_with(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, prompt = folders[0], prompts()[0]
    settings = kv_transfer(
        host_bytes=HOST, load_when="always", listen="off", disk=disk(tmp_path / "disk")
    )
    with Server("llama", settings, args=("--model", str(folder))) as server:
        first = server.complete(prompt, NEW).tokens
        settle(server)
        change_weights(folder)
        reload(server)
        settle(server)
        second = server.complete(prompt, NEW)
        assert second.cached == 0 and second.tokens != first
        settle(server)
        shutil.copy(folders[1] / "model.safetensors", folder)
        reload(server)
        settle(server)
        assert server.complete(prompt, NEW) == Answer(first, FULL), "they are on the disk"
        assert_nothing_leaks(server)
