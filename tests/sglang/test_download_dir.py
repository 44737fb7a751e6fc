"""Weights that SGLang keeps at a place of its own, ``--download-dir``, name stored pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvconnect.engines.sglang import shared_records
from kvconnect.engines.sglang.storage_backends import stored_format
from tests.engines.models import model_dir
from tests.sglang.storage_bench import RANKS, host_pool, serving

MODEL, COMMIT = "org/model", "5" * 40


def hub_cache(folder: Path, **files: bytes) -> Path:
    """Make a cache of the Hub's with one model; names of files have ``__`` for dots."""
    model = folder / f"models--{MODEL.replace('/', '--')}"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        (snapshot / name.replace("__", ".")).write_bytes(content)
    return folder


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return two folders with other weights of a model; the usual cache has its configuration."""
    config = (model_dir("llama") / "config.json").read_bytes()
    usual = hub_cache(tmp_path / "usual", config__json=config)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(usual))
    first, second = (
        hub_cache(tmp_path / str(number), model__safetensors=bytes([number]) * 100)
        for number in range(2)
    )
    return first, second


def test_pages_of_weights_elsewhere_have_names_of_their_own(places: tuple[Path, Path]) -> None:
    def found(**settings: Any) -> tuple[Any, Any]:
        draft = {"speculative_draft_model_path": MODEL, "speculative_algorithm": "EAGLE"}
        with serving(MODEL, **settings, **draft):
            fields = stored_format(RANKS)
        return fields["weights"], fields["draft"]

    names = [found(download_dir=str(place)) for place in places]
    assert names[0] == found(download_dir=str(places[0]))
    for one, other, usual in zip(*names, found(), strict=True):
        assert len({one, other, usual}) == 3
        assert MODEL not in one and MODEL in usual, "without files, the name counts"


def test_the_same_files_have_the_same_name_at_any_place(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(MODEL, download_dir=str(places[0])):
        name = stored_format(RANKS)["weights"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(places[0]))
    with serving(MODEL):
        assert stored_format(RANKS)["weights"] == name


def test_records_of_weights_elsewhere_have_names_of_their_own(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = host_pool(monkeypatch)
    config: Any = shared_records.ModelConfig(str(model_dir("llama")), dtype="float32")
    assert config.dtype == pool.dtype
    monkeypatch.setattr(shared_records.ModelConfig, "from_server_args", lambda _: config)
    forms = []
    for place in (*places, places[0]):
        with serving(MODEL, download_dir=str(place)):
            forms.append(shared_records.records_for_all({PoolName.KV: pool}, RANKS).form.model)
    assert forms[0] == forms[2] != forms[1]
