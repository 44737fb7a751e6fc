"""Prefill and decode servers with other weights under one name, and updates of a running server."""

from __future__ import annotations

import shutil
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import change_weights, model_dir, prompt_tokens
from tests.sglang.pd import ask, decode_server, prefill_server, side_by_side
from tests.sglang.scenario import NEW
from tests.sglang.server import SglangServer

REFUSED = "sglang:kvconnect_handoff_refused_total"


def update(server: SglangServer, folder: Path, version: str | None = None) -> None:
    body: dict[str, Any] = {"model_path": str(folder), "flush_cache": True}
    server.post("/update_weights_from_disk", {**body, "weight_version": version})


def test_servers_with_other_weights_do_not_hand_off_until_both_are_updated(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(model_dir("llama"), folder)
    change_weights(folder)
    p, d = prefill_server(), decode_server()
    single = SglangServer(args=("--model-path", str(folder)))
    with side_by_side(p, d, single):
        first = ask(p, d, prompt_tokens(200), NEW).tokens
        update(p, folder)
        with pytest.raises(urllib.error.HTTPError) as failed:
            ask(p, d, prompt_tokens(200, 1000), NEW)
        failed.value.close()
        assert d.metric(REFUSED, field="weights") > 0
        for log in (p.tail(1 << 20), d.tail(1 << 20)):
            (line, *_) = [line for line in log.splitlines() if "weights is 'files" in line]
            assert "on the decode side" in line and "on the prefill side" in line
        update(d, folder)
        second = ask(p, d, prompt_tokens(200), NEW).tokens
        assert second != first
        assert second == single.complete(prompt_tokens(200), NEW).tokens
        assert ask(p, d, prompt_tokens(200), NEW).tokens == second
