"""What users set for SGLang, and what a SGLang that is not the one we know is told."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvconnect.engines import sglang
from kvconnect.engines.sglang import plugin
from kvconnect.engines.sglang.settings_flags import storage_settings
from kvconnect.errors import ConfigError
from kvconnect.settings import Settings, find_settings


def test_settings_come_from_one_variable(tmp_path: Path) -> None:
    assert find_settings({}, {}).settings == Settings()
    text = '{"transport": "tcp", "digest": "full"}'
    found = find_settings({}, {"KVCONNECT_CONFIG": text}).settings
    assert (found.transport, found.digest) == ("tcp", "full")
    file = tmp_path / "settings.json"
    file.write_text('{"host_bytes": "4GiB"}')
    assert find_settings({}, {"KVCONNECT_CONFIG": f"@{file}"}).settings.host_bytes == 4 << 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "use a JSON object"),
        ("[]", "use a JSON object"),
        ("@/nowhere/at/all", "No such file"),
        ('{"trasport": "tcp"}', "did you mean 'transport'"),
        ('{"transport": "udp"}', "use one of auto, tcp, nixl"),
    ],
)
def test_settings_that_cannot_be_used(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_settings({}, {"KVCONNECT_CONFIG": text})


def test_flags_are_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.TAKEOVER, raising=False)
    monkeypatch.delenv(plugin.LAYERWISE, raising=False)
    assert not plugin.takes_over() and not plugin.is_layerwise()
    monkeypatch.setenv(plugin.TAKEOVER, "nixl")
    monkeypatch.setenv(plugin.LAYERWISE, "1")
    assert plugin.takes_over() and plugin.is_layerwise()
    monkeypatch.setenv(plugin.TAKEOVER, "mooncake")
    monkeypatch.setenv(plugin.LAYERWISE, "yes")
    with pytest.raises(ConfigError, match="KVCONNECT_TAKEOVER='mooncake'"):
        plugin.takes_over()
    with pytest.raises(ConfigError, match="KVCONNECT_LAYERWISE='yes'"):
        plugin.is_layerwise()


def server_args(**flags: Any) -> SimpleNamespace:
    """SGLang's flags as far as they are looked at, with SGLang's defaults."""
    defaults = {
        "tokenizer_worker_num": 1,
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_mode": "null",
        "unified_cache_external_linker_config": None,
        "hicache_storage_backend_extra_config": None,
        "enable_hierarchical_cache": False,
        "disaggregation_decode_enable_offload_kvcache": False,
    }
    return SimpleNamespace(**{**defaults, **flags})


HANDS_OFF = {"disaggregation_transfer_backend": plugin.NAME, "disaggregation_mode": "prefill"}
WRONG = {"disk": {"paht": "/x", "capacity": "1GiB"}}


def linker(module: str, **extra: Any) -> dict[str, Any]:
    config = {"linker": "L", "linker_module_path": module, "linker_extra_config": extra}
    return {"unified_cache_external_linker_config": config}


def storage(module: str, **extra: Any) -> dict[str, Any]:
    text = json.dumps({"module_path": module, "prefetch_threshold": 1, **extra})
    return {"hicache_storage_backend_extra_config": text}


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (HANDS_OFF, WRONG),
        (linker("kvconnect.engines.sglang.linker", **WRONG), {}),
        (linker("kvconnect.engines.sglang.linker"), WRONG),
        (storage("kvconnect.engines.sglang.storage", **WRONG), {}),
        (storage("kvconnect.engines.sglang.storage"), WRONG),
    ],
)
def test_wrong_settings_are_found_before_a_model_is_loaded(
    flags: dict[str, Any], environ: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCONNECT_CONFIG", json.dumps(environ))
    with pytest.raises(ConfigError, match=r"disk\.paht='/x' is not usable: .*'disk\.path'"):
        plugin.check(server_args(**flags))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        linker("mine.linker", **WRONG),
        storage("mine.storage", **WRONG),
        {**HANDS_OFF, "disaggregation_mode": "null"},
        {"hicache_storage_backend_extra_config": "@/etc/x.toml"},
        {"hicache_storage_backend_extra_config": "no JSON"},
    ],
)
def test_settings_of_nobody_are_not_looked_at(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang loads the plugin of every package that is installed."""
    monkeypatch.setenv("KVCONNECT_CONFIG", json.dumps(WRONG))
    plugin.check(server_args(**flags))


def test_the_storage_backend_s_object_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kv.yaml"
    path.write_text("module_path: kvconnect.engines.sglang.storage\nlease_s: 0\n")
    with pytest.raises(ConfigError, match="lease_s=0"):
        plugin.check(server_args(hicache_storage_backend_extra_config=f"@{path}"))


def test_a_decode_server_has_one_storage() -> None:
    """SGLang makes one for HiCache, and one for what decode offloads."""
    flags = {
        "enable_hierarchical_cache": True,
        "disaggregation_decode_enable_offload_kvcache": True,
    }
    own = storage("kvconnect.engines.sglang.storage")
    for each in flags:
        plugin.check(server_args(**own, **{each: True}))
    plugin.check(server_args(**storage("mine.storage"), **flags))
    with pytest.raises(ConfigError, match=r"-offload-kvcache=True.*both store the same pages"):
        plugin.check(server_args(**own, **flags))


def test_sglang_s_own_keys_are_no_settings() -> None:
    """SGLang adds the last one by a flag of its own."""
    given = {"module_path": "x", "lease_s": 5, "file_storage_path": "/x"}
    assert storage_settings(given) == {"lease_s": 5}


def test_several_tokenizer_workers_need_the_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.TAKEOVER, raising=False)

    def args(workers: int, backend: str) -> SimpleNamespace:
        return server_args(tokenizer_worker_num=workers, disaggregation_transfer_backend=backend)

    plugin.check(args(1, plugin.NAME))
    plugin.check(args(4, "nixl"))
    with pytest.raises(ConfigError, match=r"--tokenizer-worker-num=4.*KVCONNECT_TAKEOVER=nixl"):
        plugin.check(args(4, plugin.NAME))


def test_without_sglang_the_plugin_says_one_line_and_does_not_raise(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # as if it were not installed
    sglang._register.cache_clear()
    sglang.register()
    (record,) = caplog.records
    assert "kvconnect is not available" in record.getMessage()
    assert sglang.TESTED in record.getMessage()


def test_a_backend_is_added_once_and_found_by_its_value() -> None:
    class Kinds(enum.Enum):
        NIXL = "nixl"

    sglang._add_member(Kinds, "kvconnect")
    sglang._add_member(Kinds, "kvconnect")
    assert [kind.value for kind in Kinds] == ["nixl", "kvconnect"]
    assert Kinds("kvconnect") is Kinds["KVCONNECT"]
    with pytest.raises(ValueError, match="mooncake"):
        Kinds("mooncake")


def test_the_plugin_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, kvconnect.engines.sglang\n"
        "print([name for name in ('torch', 'sglang', 'prometheus_client') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
