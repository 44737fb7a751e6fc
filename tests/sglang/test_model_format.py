"""Servers of the same weight files whose KV is not the same: they do not hand off."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.runtime_context import reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import publish

from kvconnect.engines.sglang import model_format, runtime_context, translate
from kvconnect.errors import Refused
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.messages import HandoffHello
from kvconnect.protocol.negotiation import negotiate
from tests.engines.models import model_dir
from tests.sglang.linker_bench import LAYERS, mha_pool
from tests.sglang.pools import POOLS, Pools, transfer_args

SAME = Identity(weights=Weights(files="same"))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a checkpoint."""
    found = tmp_path / "a" / "llama"
    shutil.copytree(model_dir("llama"), found)
    return found


def hello(folder: Path, kv: str = "auto", pools: Pools | None = None, **flags: Any) -> HandoffHello:
    """Return what a server of a checkpoint says of its cache."""
    reset_context()
    server = ServerArgs(model_path=str(folder), device="cpu", **flags)
    publish(server, role="test")
    pools = pools or Pools(mha_pool())
    args = transfer_args(pools, torch.zeros(8, 16, dtype=torch.uint8), kv)
    args.pp_rank = 0
    model = runtime_context.model(args, server, False)
    reset_context()
    model = replace(model, layers=(0, LAYERS), kv_heads=2)
    return translate.describe(args, model, SAME).hello


def configured(folder: Path, **values: Any) -> Path:
    """Return a copy of a checkpoint with another configuration; SGLang reads a file once."""
    copy = folder.parent.parent / "b" / folder.name
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return copy


def test_servers_that_differ_in_nothing_that_changes_kv_agree(folder: Path) -> None:
    """Another folder of the same name, a shorter context and another version of transformers."""
    other = configured(folder, transformers_version="0.0.1", _name_or_path="elsewhere")
    assert negotiate(hello(folder), hello(other, context_length=1024))


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize(
    "overrides", [{"rope_scaling": YARN}, {"rope_theta": 5e5}, {"sliding_window": 64}], ids=str
)
def test_another_configuration_of_the_same_files_is_refused(
    folder: Path, overrides: dict[str, Any], decode: bool
) -> None:
    plain = hello(folder)
    told = hello(folder, json_model_override_args=json.dumps(overrides))
    assert negotiate(told, hello(folder, json_model_override_args=json.dumps(overrides)))
    with pytest.raises(Refused, match="architecture is") as refused:
        negotiate(*((told, plain) if decode else (plain, told)))
    assert refused.value.field == "architecture"


def test_an_edited_configuration_is_refused(folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 7e5}
    edited = configured(folder, rope_parameters=rope)
    with pytest.raises(Refused, match="architecture is"):
        negotiate(hello(folder), hello(edited))


def test_quantisation_on_one_side_is_refused(folder: Path) -> None:
    fp8 = hello(folder, quantization="fp8")
    assert negotiate(fp8, hello(folder, quantization="fp8"))
    with pytest.raises(Refused, match="quantization is 'fp8' on the decode side, None on"):
        negotiate(fp8, hello(folder))


@pytest.mark.parametrize("setting", [envs.SGLANG_MAMBA_SSM_DTYPE, envs.SGLANG_MAMBA_CONV_DTYPE])
def test_states_of_another_type_of_the_same_size_are_refused(setting: Any, folder: Path) -> None:
    """--mamba-ssm-dtype sets the first one."""

    def side(dtype: str) -> HandoffHello:
        with setting.override(dtype):
            return hello(model_dir("lfm2"), pools=POOLS["HybridLinearKVPool"]())

    half = side("float16")
    assert negotiate(half, side("float16"))
    with pytest.raises(Refused, match=r"state_dtypes is .*float16.* on the decode side"):
        negotiate(half, side("bfloat16"))
    assert "state_dtypes" not in hello(folder).format, "there are none"


def test_another_compute_type_of_an_8_bit_cache_is_refused(folder: Path) -> None:
    half = hello(folder, kv="fp8_e4m3", dtype="float16")
    assert negotiate(half, hello(folder, kv="fp8_e4m3", dtype="float16"))
    with pytest.raises(Refused, match="dtype is 'float16'"):
        negotiate(half, hello(folder, kv="fp8_e4m3", dtype="bfloat16"))


def test_other_scales_of_an_8_bit_cache_are_refused(folder: Path) -> None:
    scales = [folder / f"scales{number}.json" for number in range(2)]
    for number, path in enumerate(scales):
        path.write_text(str(number))

    def side(path: Path | None, kv: str) -> HandoffHello:
        return hello(folder, kv, quantization_param_path=str(path) if path else None)

    assert negotiate(side(scales[0], "fp8_e4m3"), side(scales[0], "fp8_e4m3"))
    for other in (scales[1], None):
        with pytest.raises(Refused, match="scales is"):
            negotiate(side(scales[0], "fp8_e4m3"), side(other, "fp8_e4m3"))
        assert negotiate(side(scales[0], "auto"), side(other, "auto"))  # SGLang reads none


@pytest.mark.parametrize(
    ("told", "method", "found"),
    [
        (None, None, ""),
        (None, "fp8", "fp8"),
        ({"quant_method": "awq"}, "awq", ""),
        ({"quant_method": "awq"}, "awq_marlin", ""),
        ({"quant_method": "modelopt"}, "modelopt_fp4", ""),
        ({"quant_method": "fp8"}, "modelopt_fp4", "modelopt_fp4"),
        ({"quant_method": "fp8"}, "nvfp4_online", "nvfp4_online"),
    ],
    ids=str,
)
def test_names_of_a_checkpoints_own_quantisation_are_not_compared(
    folder: Path, told: dict[str, str] | None, method: str | None, found: str
) -> None:
    assert quantisation_of(folder, told, method) == found


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quant_model_description.json"])
def test_a_checkpoint_may_say_in_another_file_how_it_is_quantised(folder: Path, name: str) -> None:
    assert quantisation_of(folder, None, "modelopt_fp8") == "modelopt_fp8"
    (folder / name).write_text("{}")
    assert quantisation_of(folder, None, "modelopt_fp8") == ""


def quantisation_of(folder: Path, told: dict[str, str] | None, method: str | None) -> str:
    reset_context()
    publish(ServerArgs(model_path=str(folder), device="cpu"), role="test")
    hf_config = SimpleNamespace(quantization_config=told)
    config: Any = SimpleNamespace(
        hf_config=hf_config, quantization=method, model_path=str(folder), revision=None
    )
    found = model_format.quantization(config)
    reset_context()
    return found


def test_a_configuration_is_read_alike_in_all_processes() -> None:
    def digest(**fields: Any) -> str:
        hf_config = SimpleNamespace(to_dict=lambda: fields)
        config: Any = SimpleNamespace(hf_config=hf_config)
        return model_format.architecture(config)

    assert digest(dtype=torch.float16) == digest(dtype=torch.float16) != digest(dtype=torch.int8)
    assert digest(part=object()) == digest(part=object())
    assert digest(part={"a", "b"}) == digest(part=["a", "b"])
    assert digest(labels={0: "a", "1": "b"}) == digest(labels={"1": "b", "0": "a"})
    assert digest(part={"rope": 1.0, "_x": 1}) == digest(part={"rope": 1.0, "_x": 2})
    assert digest(part={"rope": 1.0}) != digest(part={"rope": 2.0})


def test_what_sglang_writes_into_a_configuration_is_known(folder: Path) -> None:
    """A new field would be compared: it may come from flags in which servers differ."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    server = ServerArgs(model_path=str(folder), device="cpu")
    made = ModelConfig.from_server_args(server).hf_config.to_dict()
    read = get_config(str(folder), trust_remote_code=False).to_dict()
    of_the_model = {"v_head_dim", "swa_head_dim", "swa_v_head_dim"}
    assert set(made) - set(read) == {*model_format._OF_FLAGS, *of_the_model}
