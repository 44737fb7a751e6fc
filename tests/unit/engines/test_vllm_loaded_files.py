"""Stored blocks go by the files that vLLM loads, wherever it keeps them. Tests ``stored_format`` of
``tier_stores.py`` and the names in ``shared_records.py``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from vllm.config import LoadConfig

from kvconnect.engines.vllm import shared_records, tier_stores, translate, weights
from kvconnect.errors import Incompatible
from kvconnect.protocol.identity import Weights

MODEL, DRAFT = "org/model", "org/draft"


def download(cache: Path, model: str, **files: bytes) -> Path:
    """Put files into a cache as Hugging Face's hub does; return the cache."""
    folder = cache / f"models--{model.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text("a" * 40)
    for name, content in files.items():
        path = snapshot / name.replace("_", ".")
        path.write_bytes(content)
    return cache


def engine(folder: Path | None, load_format: str = "auto", draft: Any = None, **extra: Any) -> Any:
    """Return the configuration of an engine that keeps its models in a folder of its own."""
    model = SimpleNamespace(
        model=MODEL,
        revision=None,
        quantization=None,
        quantization_config=None,
        model_arch_config=SimpleNamespace(quantization_config=None),
        hf_overrides={},
        hf_config_path=None,
        hf_text_config=SimpleNamespace(),
        get_total_num_kv_heads=lambda: 2,
    )
    loader = LoadConfig(
        load_format=load_format,
        download_dir=folder and str(folder),
        model_loader_extra_config=extra,
    )
    return SimpleNamespace(
        model_config=model,
        load_config=loader,
        speculative_config=draft,
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
    )


def stored(config: Any, name: str = "weights") -> Any:
    return tier_stores.stored_format(config, SimpleNamespace(kv_cache_groups=[]), {})[name]  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The usual cache: it has an old snapshot of the model, and the configuration."""
    monkeypatch.setattr(translate, "handoff_format", lambda *_: {})
    monkeypatch.setattr(tier_stores, "_names", lambda *_: "tokens")
    usual = download(tmp_path / "usual", MODEL, model_safetensors=b"old", config_json=b"{}")
    download(usual, DRAFT, model_safetensors=b"old")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(usual))
    return usual


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two download folders: the same model with other weights in each, and the same draft."""
    found = []
    for number in ("1", "2"):
        folder = download(tmp_path / number, MODEL, model_safetensors=number.encode())
        found.append(download(folder, DRAFT, model_safetensors=b"draft" + number.encode()))
    return found


def test_weights_in_a_download_folder_are_those_that_count(two: list[Path]) -> None:
    configs = [engine(folder) for folder in (None, *two)]
    names = [stored(config) for config in configs]
    assert len(set(names)) == 3
    known = [weights._of_files(c.load_config, c.model_config).files for c in configs]
    assert names == known


def test_so_do_those_of_a_draft_model_which_may_have_its_own(two: list[Path]) -> None:
    model = SimpleNamespace(model=DRAFT, revision=None)
    draft = SimpleNamespace(method="eagle", draft_model_config=model, draft_load_config=None)
    own = LoadConfig(download_dir=str(two[0]))
    apart = SimpleNamespace(method="eagle", draft_model_config=model, draft_load_config=own)
    (first, second), third = (
        [stored(engine(folder, draft=draft), "draft") for folder in two],
        stored(engine(two[1], draft=apart), "draft"),
    )
    assert first == third != second
    loaded, known = weights._start_weights(engine(two[1], draft=apart))
    assert known.files in third and loaded.files == stored(engine(two[1]))


def test_blocks_that_sglang_reads_go_by_them_too(
    two: list[Path], usual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = shared_records._PlainRows((0,), [[SimpleNamespace(heads=2)]], "float16", (32, 32))  # type: ignore[list-item]
    monkeypatch.setattr(shared_records, "_plain_rows", lambda *_: rows)
    monkeypatch.setattr(shared_records, "units", lambda *_: [])
    spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    cache: Any = SimpleNamespace(kv_cache_groups=[spec])
    geometry: Any = SimpleNamespace(groups=[None])

    def name(config: Any) -> str:
        return shared_records.records_for_all(config, cache, {}, geometry)[0].model

    assert len({name(engine(folder)) for folder in (None, *two)}) == 3
    before = name(engine(two[0]))
    download(usual, MODEL, config_json=b'{"rope_theta": 5}')
    assert name(engine(two[0])) != before, "the configuration is in the usual cache"
    for (snapshot,) in [list(usual.glob("models--org--model/snapshots/*"))]:
        (snapshot / "config.json").unlink()
    with pytest.raises(Incompatible, match=r"no config\.json"):
        name(engine(two[0]))
    with pytest.raises(Incompatible, match="weights of other files"):
        name(engine(two[0], "tensorizer"))


def test_mistrals_files_count_where_vllm_prefers_them(tmp_path: Path) -> None:
    folder = download(tmp_path / "3", MODEL, model_safetensors=b"a", consolidated_safetensors=b"b")
    assert stored(engine(folder)) == stored(engine(folder, "mistral"))
    assert stored(engine(folder)) != stored(engine(folder, "safetensors"))


def test_formats_that_load_other_files_say_which(two: list[Path]) -> None:
    given = [{}, {"tensorizer_uri": "s3://a"}, {"tensorizer_uri": "s3://b"}]
    names = [stored(engine(two[0], "tensorizer", **extra)) for extra in given]
    assert len({stored(engine(two[0])), *names}) == 4
    assert not any("s3:" in name for name in names), "the disk keeps the fields in plain text"


@pytest.mark.parametrize(
    "load_format", ["tensorizer", "modelexpress", "ipc_cache", "sharded_state"]
)
def test_weights_of_other_files_or_servers_are_not_known_by_the_model_s(
    two: list[Path], load_format: str
) -> None:
    """Engines compare their parameters then, before they hand off."""
    config = engine(two[0], load_format)
    config.model_config.revision = "main"
    assert weights._of_files(config.load_config, config.model_config) == Weights()
    of_files = engine(two[0])
    assert weights._of_files(of_files.load_config, of_files.model_config).files, "the control"
    reloaded = weights.WorkerWeights(config, mixes=False)
    reloaded.updated(draft=False, from_files=True)
    assert reloaded.identity.weights == Weights()
