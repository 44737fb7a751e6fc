"""Long random runs of both engines' schedulers with KVConnect: how many there were, and went wrong.

::

    python -m benchmarks.fuzz --hours 2

Each engine has that long, one after the other: vLLM as it is installed, vLLM's next version, SGLang
in its own environment. A run that failed is printed with what repeats it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable

from benchmarks import common

_NEXT_VLLM = (
    "import sys; from tests.schedulers import other_version; "
    "print(other_version.run(' '.join(sys.argv[1:])))"
)
COMMANDS = {
    "vllm": [sys.executable, "-m", "tests.schedulers.fuzz"],
    "vllm_next": [sys.executable, "-c", _NEXT_VLLM],
    "sglang": [
        "scripts/in-netns",
        ".venv-sglang/bin/python",
        *("-m", "tests.sglang.schedulers.fuzz"),
    ],
}
_SUMMARY = re.compile(r"^\w+ ?\S*: (\d+) runs in ([\d.]+) hours, (\d+) failed$", re.MULTILINE)


def figures(printed: Iterable[str]) -> dict[str, object]:
    """Add up what fuzzers have printed.

    Raises:
        ValueError: one did not come to its end.
    """
    runs, hours, failed = 0, 0.0, 0
    for text in printed:
        summary = _SUMMARY.search(text)
        if summary is None:
            raise ValueError(f"a fuzzer did not come to its end: {text[-2000:]}")
        runs += int(summary[1])
        hours += float(summary[2])
        failed += int(summary[3])
    return {"fuzz_runs": runs, "fuzz_hours": hours, "fuzz_wrong": failed}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz")
    parser.add_argument("--hours", default="0.1", help="for each engine")
    parser.add_argument("--seed", default="1", help="the first one")
    given = parser.parse_args()
    printed = []
    for name, command in COMMANDS.items():
        common.progress(f"{name}: {given.hours} hours")
        arguments = ["--hours", given.hours, "--seed", given.seed]
        done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True)
        common.progress(done.stdout)
        printed.append(done.stdout)
    common.emit("fuzz", figures(printed))


if __name__ == "__main__":
    main()
