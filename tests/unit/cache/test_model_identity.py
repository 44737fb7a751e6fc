"""Models are told apart by the bytes of their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvconnect.cache.model_identity import loaded_files, weights_digest

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


def index(folder: Path, *names: str, file: str = "model.safetensors.index.json") -> None:
    (folder / file).write_text(json.dumps({"weight_map": {f"w{n}": n for n in names}}))


def test_files_that_the_engine_does_not_load_change_nothing(model: Path) -> None:
    index(model, "model-1.safetensors", "model-2.safetensors")
    before = weights_digest(model)
    for name in ("more.safetensors", "consolidated.safetensors", "pytorch_model.bin", "x.gguf"):
        (model / name).write_bytes(b"other")
    assert weights_digest(model) == before
    (model / "model-2.safetensors").write_bytes(b"changed")  # negative control
    assert weights_digest(model) != before


def test_without_an_index_every_file_of_the_first_kind_is_loaded(model: Path) -> None:
    before = weights_digest(model)
    (model / "pytorch_model.bin").write_bytes(b"other")
    assert weights_digest(model) == before
    (model / "model-3.safetensors").write_bytes(b"other")
    assert weights_digest(model) != before


def test_what_trainers_leave_is_no_weight(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(BYTES)
    before = weights_digest(tmp_path)
    (tmp_path / "optimizer.bin").write_bytes(b"x")
    (tmp_path / "training_args.bin").write_bytes(b"x")
    assert weights_digest(tmp_path) == before != ""


def test_consolidated_files_count_where_the_engine_prefers_them(model: Path) -> None:
    plain = weights_digest(model)
    assert weights_digest(model, consolidated=True) == plain
    (model / "consolidated.safetensors").write_bytes(b"the same, in another form")
    assert weights_digest(model) == plain
    preferred = weights_digest(model, consolidated=True)
    assert preferred not in ("", plain)
    (model / "model-1.safetensors").write_bytes(b"not loaded")
    assert weights_digest(model, consolidated=True) == preferred
    for path in model.glob("model-*"):
        path.unlink()
    assert weights_digest(model) == preferred


def test_a_broken_index_is_an_error_and_one_file_is_a_model(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = model / "model-1.safetensors"
    assert loaded_files(str(file), None) == weights_digest(file) != ""
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(OSError, match="is not an index of weights"):
        weights_digest(model)
    assert loaded_files(str(model), None) == ""
    assert "cannot be read" in caplog.text
    assert loaded_files("no/such model", None) == ""
