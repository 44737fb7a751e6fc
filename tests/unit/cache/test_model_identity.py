"""Models are told apart by the bytes of their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect.cache.model_identity import weights_digest

BYTES = bytes(range(256)) * 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model-1.safetensors").write_bytes(BYTES)
    (tmp_path / "model-2.safetensors").write_bytes(BYTES)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_it_is_the_same_for_the_same_weights_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "copy"
    other.mkdir()
    for path in model.glob("*.safetensors"):
        (other / path.name).write_bytes(path.read_bytes())
    assert weights_digest(other) == weights_digest(model) != ""


@pytest.mark.parametrize("place", [0, 5000, len(BYTES) - 1])
def test_any_byte_of_a_small_model_counts(model: Path, place: int) -> None:
    before = weights_digest(model)
    changed = bytearray(BYTES)
    changed[place] ^= 1
    (model / "model-2.safetensors").write_bytes(changed)
    assert weights_digest(model) != before


def test_a_large_model_is_sampled_all_over(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconnect.cache.model_identity._SAMPLES", 4)
    monkeypatch.setattr("kvconnect.cache.model_identity._SAMPLE_BYTES", 512)
    before = weights_digest(model)
    changed = bytes(byte ^ (index % 100 == 0) for index, byte in enumerate(BYTES))
    (model / "model-1.safetensors").write_bytes(changed)
    assert weights_digest(model) != before


def test_names_and_sizes_count_and_other_files_do_not(model: Path) -> None:
    before = weights_digest(model)
    (model / "config.json").write_text("{1}")
    assert weights_digest(model) == before
    (model / "model-2.safetensors").rename(model / "model-3.safetensors")
    assert weights_digest(model) != before


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) == weights_digest(tmp_path / "nowhere") == ""
