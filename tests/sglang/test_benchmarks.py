"""The benchmark of SGLang's hand-offs runs to its end, small, with servers without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.headlines import HEADLINES
from tests.fakes.model_servers import LoopbackLink, use_model_servers
from tests.small import smoke


@pytest.mark.smokes("sglang_handoff")
def test_sglang_handoff(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_model_servers(monkeypatch)
    found = smoke(
        monkeypatch, tmp_path, "sglang_handoff", "--quick", Link=LoopbackLink, HOOK_ROUNDS=2
    )
    assert {row.figure for row in HEADLINES if row.file == "sglang_handoff"} <= found.keys()
    assert {"ttft_layerwise_over_nixl_4k_apart", "exposed_over_wire_4k_apart"} <= found.keys()
    assert found["wrong_tokens"] == 0
