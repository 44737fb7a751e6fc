"""Routers in front of SGLang servers with KVConnect between them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import requests
from sglang.srt.utils import kill_process_tree

from tests.engines.models import prompt_tokens
from tests.outside.sglang import servers
from tests.servers import free_port

PEERS = Path(__file__).resolve().parents[3] / ".venv-peers"
START_S = 60.0


class TestFront(servers.RunningPair):
    """Each answers as ``mini_lb`` does, which ``pd_parity_kit`` compares with one server."""

    prompts: ClassVar = [prompt_tokens(length, 3000 + 500 * length) for length in (9, 64, 700)]

    def test_sglang_router(self) -> None:
        self.compare([sys.executable, "-m", "sglang_router.launch_router", *self.pair_of_urls()])

    def test_smg(self) -> None:
        launch = [str(PEERS / "smg" / "bin" / "smg"), "launch", "--backend", "sglang"]
        self.compare([*launch, *self.pair_of_urls()])

    def test_own_router(self) -> None:
        prefill = f"{self.prefill_url},engine=sglang,bootstrap={self.bootstrap_port}"
        own = [sys.executable, "-m", "kvconnect.cli", "router", "--prefill", prefill]
        self.compare([*own, "--decode", f"{self.decode_url},engine=sglang"])

    def pair_of_urls(self) -> list[str]:
        pair = ["--prefill", self.prefill_url, self.bootstrap_port, "--decode", self.decode_url]
        metrics = ["--prometheus-port", str(free_port())]
        return ["--pd-disaggregation", *pair, "--host", "127.0.0.1", *metrics]

    def compare(self, command: list[str]) -> None:
        want = [self.generated(self.lb_url, prompt) for prompt in self.prompts]
        self.assertEqual(len({tuple(tokens) for tokens in want}), len(want))
        for url in (self.prefill_url, self.decode_url):
            requests.post(f"{url}/flush_cache", params={"timeout": 30}, timeout=60)
        port = free_port()
        front = subprocess.Popen([*command, "--port", str(port)])
        try:
            url = f"http://127.0.0.1:{port}"
            self.await_answer(url, front)
            self.assertEqual([self.generated(url, prompt) for prompt in self.prompts], want)
        finally:
            kill_process_tree(front.pid, wait_timeout=60)
            front.wait()

    def await_answer(self, url: str, front: subprocess.Popen[bytes]) -> None:
        """Wait until the front knows its servers: it answers a request."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.assertIsNone(front.poll(), "the front has ended")
            try:
                self.generated(url, [5, 6, 7])
            except (requests.RequestException, KeyError):
                time.sleep(0.2)
            else:
                return
        self.fail("the front does not answer")

    def generated(self, url: str, prompt: list[int]) -> list[int]:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = requests.post(f"{url}/generate", json=body, timeout=120)
        answer.raise_for_status()
        return list(answer.json()["output_ids"])
