"""Empties the device's cache of prompts, so that only KVConnect still has them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

from kvconnect.trial.counters import Counters
from kvconnect.trial.engine_api import EngineClient, EngineName
from kvconnect.trial.http_client import TrialFailed
from kvconnect.trial.plain_words import PromptMaker

RESET = "POST /reset_prefix_cache"
_RESET = (
    "/reset_prefix_cache"  # of vLLM's development mode; SGLang's /flush_cache empties all tiers
)
_RESET_S = 10.0
_RESET_PAUSE_S = 0.2
_AT_ONCE = 4  # prompts that fill the cache in parallel
_LONGEST_FILL = 16_384  # tokens of one of them
_MARGIN = 1.25  # blocks are filled in part, and some are shared
_UNKNOWN = 262_144  # tokens that fill a cache of unknown size
_FILL_S = 600.0


def evict(client: EngineClient, maker: PromptMaker, counters: Counters, longest: int) -> str:
    """Evict all prompts from the device, and leave what KVConnect has; return how, for people.

    Args:
        counters: of the engine, for the size of its cache.
        longest: tokens of the longest prompt that the engine takes.

    Raises:
        TrialFailed: the engine fails, or its cache cannot be filled in time.
    """
    if client.info.name is EngineName.VLLM and _reset(client):
        return RESET
    wanted = int((counters.device_tokens or _UNKNOWN) * _MARGIN)
    each = min(longest, _LONGEST_FILL, max(64, wanted // 4))
    prompts = [maker.new(each) for _ in range(max(4, -(-wanted // each)))]
    deadline = time.monotonic() + _FILL_S

    def fill(prompt: str) -> int:
        if time.monotonic() > deadline:
            raise TrialFailed(
                f"the device's cache was not full of other prompts after {_FILL_S:.0f} s: try an "
                "idle engine, or start vLLM with VLLM_SERVER_DEV_MODE=1"
            )
        return client.ask(prompt, new_tokens=1).prompt_tokens

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sent = list(pool.map(fill, prompts))
    size = "" if counters.device_tokens else " (the size of its cache is unknown)"
    return f"{len(sent)} other prompts with {sum(sent):,} tokens{size}"


def _reset(client: EngineClient) -> bool:
    """Have vLLM empty the device's cache. False: it has no such request, or blocks stay in use."""
    deadline = time.monotonic() + _RESET_S
    while True:
        try:
            answer = json.loads(client.http.post(_RESET, {}))
        except TrialFailed as error:
            if error.status:
                return False
            raise
        except ValueError:
            return False
        if isinstance(answer, dict) and answer.get("success") is True:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_RESET_PAUSE_S)
