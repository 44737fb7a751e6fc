"""An engine in this process that sleeps and wakes: ``python -m tests.gpu.sleeping``. Prints one
line of JSON: what the tiers had of a prompt, before and after each level.

Tokens are not compared: after level 2 the weights are undefined, since dummies cannot be loaded
again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from tests.gpu.engine import PROMPT, settings


def hit(llm: LLM) -> int:
    """Serve the prompt with nothing in the device's own cache; return how many of its tokens were
    not computed."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("blocks are still held")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    asked: Any = {"prompt_token_ids": PROMPT}
    (output,) = llm.generate(asked, params, use_tqdm=False)
    return output.num_cached_tokens or 0


def main() -> dict[str, list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = settings(Path(folder))
        extra = arguments["kv_transfer_config"]["kv_connector_extra_config"]
        extra["disk"] = {"path": str(Path(folder) / "disk"), "capacity": "256MiB", "min_free": 0}
        llm = LLM(**arguments, enable_sleep_mode=True)
        found = {"before": [hit(llm), hit(llm)]}
        for level in (0, 1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            found[f"level {level}"] = [hit(llm), hit(llm)]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")
