"""A rolling update of engines, driven as the manifests of ``deploy/kubernetes`` say: no request is
lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.load import Load
from tests.engines.models import prompt_tokens
from tests.engines.pd import decode_config, prefill_config, side_by_side
from tests.engines.ranks import WAIT_S, until
from tests.engines.server import Router, Server, events

MANIFESTS = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
NEW, LONG = 8, 600
MAX_LEN = 1024
PROMPTS = [prompt_tokens(200 + 8 * n, start=41 * n) for n in range(24)]


def container(role: str) -> dict[str, Any]:
    """What Kubernetes runs for a role."""
    (deployment,) = (
        doc
        for doc in yaml.safe_load_all((MANIFESTS / f"{role}.yaml").read_text())
        if doc["kind"] == "Deployment"
    )
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


def engine(role: str) -> Server:
    """An engine with the manifest's flags about its end."""
    connector = prefill_config() if role == "prefill" else decode_config()
    flags = tuple(arg for arg in container(role)["args"] if arg.startswith("--shutdown-timeout"))
    assert flags
    return Server("llama", connector, max_len=MAX_LEN, args=flags)


def name_engines(file: Path, prefill: Sequence[Server], decode: Sequence[Server]) -> None:
    """Stands for the Services, which the router looks up."""
    lines = [f"prefill {each.url}\n" for each in prefill] + [
        f"decode {each.url}\n" for each in decode
    ]
    fresh = file.with_suffix(".new")
    fresh.write_text("".join(lines))
    fresh.replace(file)


def until_up(router: Router, role: str, url: str) -> None:
    name = "kvconnect_router_upstream_up"
    until(lambda: has(router, name, role=role, upstream=url), f"{url} is up")


def has(router: Router, name: str, **labels: str) -> bool:
    try:
        return router.metric(name, **labels) == 1
    except KeyError:
        return False


def pause(role: str) -> None:
    """What Kubernetes does once the pod has left its Service."""
    subprocess.run(container(role)["lifecycle"]["preStop"]["exec"]["command"], check=True)


def token_ids(event: dict[str, Any]) -> list[int]:
    return event["choices"][0]["token_ids"] or []


@pytest.fixture(scope="module")
def want() -> list[tuple[int, ...]]:
    with Server("llama", max_len=MAX_LEN) as single:
        return [single.complete(prompt, NEW).tokens for prompt in PROMPTS]


def test_a_rolling_update_loses_no_request(tmp_path: Path, want: list[tuple[int, ...]]) -> None:
    """Both engines are replaced under load. A stream that is open when its engine is told to end
    gets all its tokens."""
    file = tmp_path / "engines"
    old, new = ((engine("prefill"), engine("decode")) for _ in range(2))
    with side_by_side(*old):
        name_engines(file, old[:1], old[1:])
        flags = ("--workers-file", str(file))
        with (
            Router([], [], flags) as router,
            ExitStack() as later,
            Load(router, PROMPTS, want) as load,
        ):
            load.advance(6)
            later.enter_context(side_by_side(*new))
            name_engines(file, (old[0], new[0]), (old[1], new[1]))
            until_up(router, "prefill", new[0].url)
            until_up(router, "decode", new[1].url)
            load.advance(6)
            name_engines(file, new[:1], new[1:])
            with ThreadPoolExecutor(2) as pool:  # two Deployments roll at the same time
                list(pool.map(pause, ("prefill", "decode")))
            for server in old:
                body = server.body(PROMPTS[0], LONG, stream=True)
                with server.open("/v1/completions", body) as stream:
                    arriving = events(stream)
                    tokens = token_ids(next(arriving))
                    os.kill(server.process.pid, signal.SIGTERM)
                    tokens += [token for event in arriving for token in token_ids(event)]
                assert len(tokens) == LONG
                server.process.wait(WAIT_S)
            load.advance(12)
        assert not load.failed + load.broken
        assert load.right[0, 0] and load.right[1, 1]
