"""Load generators that others wrote, each as it comes, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve import words

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers"
"""A folder with a virtual environment for each of them (scripts/setup peers)."""
LMCACHE = PEERS / "lmcache" / "bin" / "lmcache"
GUIDELLM = PEERS / "guidellm" / "bin" / "guidellm"
SGLANG = ROOT / ".venv-sglang" / "bin" / "python"
# `vllm bench serve`, as its command does it. The command itself asks for the version of a package
# named vllm, and the build for CPUs has another name.
_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# smg takes no prompts of token ids, which are what a trace's prompts are made of.
_AS_TEXTS = """
from vllm.benchmarks.datasets import datasets
def as_texts(self, tokenizer, *args, ids=datasets.TimedTrace.sample, **options):
    samples = ids(self, tokenizer, *args, **options)
    for sample in samples:
        sample.prompt = tokenizer.decode(sample.prompt)
    return samples
datasets.TimedTrace.sample = as_texts
"""


class LoadFailed(RuntimeError):
    """A load generator ended without a result; the message holds the end of its output."""


def bench_serve(
    port: int, tokenizer: Path, arguments: Sequence[str], limit_s: float, texts: bool = False
) -> dict[str, Any]:
    """Run vLLM's ``bench serve`` against a port; return what it saves. ``texts``: the prompts of a
    trace are sent as texts.

    Raises:
        LoadFailed: it ends with an error, or not within ``limit_s`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-c", _AS_TEXTS * texts + _BENCH_SERVE, "--backend", "vllm"),
            *("--host", "127.0.0.1", "--port", str(port), "--endpoint", "/v1/completions"),
            *("--model", "model", "--tokenizer", str(tokenizer), "--temperature", "0"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
            *("--ready-check-timeout-sec", "0", "--disable-tqdm"),  # it would ask the first prompt
            *("--save-result", "--save-detailed"),  # with the errors
            *("--result-dir", folder, "--result-filename", "result.json"),
            *arguments,
        ]
        # The words of a trace are drawn from the hashes of its ids.
        _run(command, {"PYTHONHASHSEED": "0"}, limit_s)
        return _saved(Path(folder) / "result.json")


def sglang_bench(
    port: int, tokenizer: Path, arguments: Sequence[str], limit_s: float, backend: str = "vllm"
) -> dict[str, Any]:
    """Run SGLang's ``bench_serving`` against a port; return what it saves. ``backend`` is its name
    for the server's interface.

    Raises:
        LoadFailed: it is not installed, ends with an error, or not within ``limit_s`` seconds.
    """
    if not SGLANG.exists():
        raise LoadFailed(f"{SGLANG} is not there: run scripts/setup sglang")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.jsonl"
        command = [
            *(str(SGLANG), "-m", "sglang.benchmark.serving", "--backend", backend),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--model", "model", "--tokenizer", str(tokenizer)),
            *("--warmup-requests", "0", "--disable-tqdm"),  # it would ask the first prompt
            *("--output-file", str(result), "--output-details"),  # with the errors
            *arguments,
        ]
        # Prompts are kept in the home folder, under a name that does not tell the tokenizer.
        _run(command, {"HOME": folder, "HF_HUB_OFFLINE": "1"}, limit_s)
        return _saved(result)


def guidellm(
    port: int, tokenizer: Path, data: Mapping[str, Any], arguments: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Run ``guidellm`` with one set of synthetic prompts; return its first benchmark's metrics.

    Raises:
        LoadFailed: it is not installed, ends with an error, or not within ``limit_s`` seconds.
    """
    if not GUIDELLM.exists():
        raise LoadFailed(f"{GUIDELLM} is not there: run scripts/setup peers")
    backend = {
        "kind": "openai_http",
        "target": f"http://127.0.0.1:{port}",
        "model": "model",
        "request_format": "/v1/completions",
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *(str(GUIDELLM), "run", "--backend", json.dumps(backend)),
            *("--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(tokenizer)})),
            *("--data", json.dumps({"kind": "synthetic_text", **data})),
            *("--output", f"kind=json,path={result}", "--disable-console"),
            *arguments,
        ]
        _run(command, {"HF_HUB_OFFLINE": "1"}, limit_s)
        metrics: dict[str, Any] = _saved(result)["benchmarks"][0]["metrics"]
        return metrics


def lmcache_bench(
    port: int, workload: str, cache_tokens: int, arguments: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Run a workload of LMCache's ``bench engine``; return its summary's results.

    ``cache_tokens`` is the size of the cache that some workloads fill. A workload that needs a
    tokenizer takes the one of made-up words (``words.py``).

    Raises:
        LoadFailed: it is not installed, ends without a summary, or not within ``limit_s`` seconds.
    """
    if not LMCACHE.exists():
        raise LoadFailed(f"{LMCACHE} is not there: run scripts/setup peers")
    with tempfile.TemporaryDirectory() as folder:
        if workload == "long-doc-permutator":
            words.save(Path(folder) / "model")  # where it looks for a model of this name
        command = [
            *(str(LMCACHE), "bench", "engine", "--workload", workload),
            *("--engine-url", f"http://127.0.0.1:{port}", "--model", "model"),
            *("--kv-cache-volume", "1", "--tokens-per-gb-kvcache", str(cache_tokens)),
            *("--ignore-eos", "--json", "--no-csv", "--quiet", "--no-interactive"),
            *("--output-dir", folder, *arguments),
        ]
        # It ends with 1 if a request failed, which the summary counts.
        env = {"LMCACHE_DISABLE_BANNER": "1", "HF_HUB_OFFLINE": "1"}
        _run(command, env, limit_s, good=(0, 1), folder=folder)
        results: dict[str, Any] = _saved(Path(folder) / "bench_summary.json")["results"]
        return results


def _run(
    command: Sequence[str],
    env: Mapping[str, str],
    limit_s: float,
    good: Sequence[int] = (0,),
    folder: str | None = None,
) -> None:
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env},
                cwd=folder,
                timeout=limit_s,
                check=False,
            )
            problem = "" if done.returncode in good else f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s:.0f} s"
        if problem:
            output.seek(0)
            tail = output.read().decode(errors="replace")[-3000:]
            raise LoadFailed(f"{Path(command[0]).name}: {problem}\n{tail}")


def _saved(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise LoadFailed(f"no {path.name} was saved")
    saved: dict[str, Any] = json.loads(path.read_text())
    return saved
