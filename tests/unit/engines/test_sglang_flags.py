"""What users set for SGLang, and what a SGLang that is not the one we know is told."""

from __future__ import annotations

import enum
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnect.config import Config, config_from_environment
from kvconnect.engines import sglang
from kvconnect.engines.sglang import plugin
from kvconnect.errors import ConfigError


def test_settings_come_from_one_variable(tmp_path: Path) -> None:
    assert config_from_environment({}) == Config()
    found = config_from_environment({"KVCONNECT_CONFIG": '{"transport": "tcp", "digest": "full"}'})
    assert (found.network.transport, found.digest) == ("tcp", "full")
    file = tmp_path / "settings.json"
    file.write_text('{"host_bytes": "4GiB"}')
    assert config_from_environment({"KVCONNECT_CONFIG": f"@{file}"}).offload.host_bytes == 4 << 30


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
        config_from_environment({"KVCONNECT_CONFIG": text})


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


def test_several_tokenizer_workers_need_the_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.TAKEOVER, raising=False)

    def args(workers: int, backend: str) -> SimpleNamespace:
        return SimpleNamespace(
            tokenizer_worker_num=workers, disaggregation_transfer_backend=backend
        )

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
