"""What cannot be served is refused before weights are loaded, and the refusal is the last line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from kvconnect.engines.vllm import register
from kvconnect.errors import ConfigError, Incompatible
from tests.engines.models import VOCAB_SIZE, engine_args, model_dir
from tests.engines.scenario import HOST
from tests.engines.server import Server, ServerDied, kv_transfer

LOADS = "Starting to load model"  # vLLM's log
NO_CROSS = (
    "no offload with cross attention (encoder and decoder): "
    "vLLM runs no KV connector with encoder-decoder models: run it without KVConnect"
)


def whisper(folder: Path) -> str:
    """Make a model with cross attention, without weights: nobody must miss them."""
    import transformers

    half: dict[str, Any] = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))
    }
    config = transformers.WhisperConfig(
        vocab_size=VOCAB_SIZE,
        d_model=64,
        architectures=["WhisperForConditionalGeneration"],
        **half,
    )
    config.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir("llama"))
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_server_ends_with_the_refusal_before_it_loads_weights(tmp_path: Path) -> None:
    folder = whisper(tmp_path / "whisper")
    connector = kv_transfer(host_bytes=HOST)
    server = Server("llama", connector, max_len=256, args=("--model", folder))
    with pytest.raises(ServerDied) as died, server:
        pass
    log = str(died.value)
    assert log.splitlines()[-1] == (
        f"kvconnect.errors.Incompatible: kvconnect: model {folder} is not usable: {NO_CROSS}"
    )
    assert LOADS not in log and "EngineCore" not in log


def test_a_server_that_starts_says_that_it_loads_weights() -> None:
    """The control: what the log of a refused one lacks."""
    with Server("llama", kv_transfer(host_bytes=HOST), max_len=256) as server:
        log = server.log.read_text()
    assert LOADS in log and "EngineCore" in log


def transfer(connector: str = "KVConnect", **extra: Any) -> dict[str, Any]:
    both: dict[str, Any] = json.loads(kv_transfer(connector, **extra))
    return both


def configured(model: str, connector: dict[str, Any] | None, **changes: Any) -> Any:
    """Configure an engine as a server and ``LLM`` do."""
    from vllm.config import KVTransferConfig

    register()
    fields = {**engine_args("llama"), "model": model, "max_model_len": 256} | changes
    return EngineArgs(
        **fields, kv_transfer_config=KVTransferConfig(**connector) if connector else None
    ).create_engine_config()


@pytest.mark.parametrize("several", [False, True])
def test_configuring_an_engine_checks_the_model(tmp_path: Path, several: bool) -> None:
    folder, ours = whisper(tmp_path / "whisper"), transfer()
    connectors = transfer("MultiConnector", connectors=[ours]) if several else ours
    with pytest.raises(Incompatible) as refused:
        configured(folder, connectors)
    assert str(refused.value) == f"kvconnect: model {folder} is not usable: {NO_CROSS}"
    # Controls: the same model without KVConnect, and another one with it.
    assert configured(folder, None).model_config.is_encoder_decoder
    assert configured(str(model_dir("llama")), connectors).kv_transfer_config is not None


@pytest.mark.parametrize(
    ("extra", "changes", "said"),
    [
        ({"host_byte": 1}, {}, "did you mean 'host_bytes'"),
        ({"policy": "mru"}, {"enforce_eager": False}, "policy='mru'"),
        ({"role": "kv_producer", "listen": "off"}, {}, "hands KV blocks out"),
    ],
)
def test_what_is_refused_takes_one_line(
    extra: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        configured(str(model_dir("llama")), transfer(**extra), **changes)
    line = str(refused.value)
    assert line.startswith("kvconnect: ") and "\n" not in line


def test_the_plugin_wraps_once() -> None:
    register()
    before = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is before
