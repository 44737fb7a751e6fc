"""What engines say about themselves: load, models, version. Pure functions over their answers.

Numbers are passed on as they came: :class:`~kvconnect.router.loads.Loads` judges them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvconnect.errors import Refused

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)\{(.*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_VLLM_USAGE = "vllm:kv_cache_usage_perc"
_VLLM_TOKENS = "vllm:prompt_tokens_by_source_total"
_VLLM_CACHE = "vllm:cache_config_info"
_SGLANG_TOKENS = "sglang:num_used_tokens"


def json_object(answer: bytes) -> dict[str, Any]:
    """Return an answer's JSON object.

    Raises:
        Refused: it is none.
    """
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise Refused("answer", f"it is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise Refused("answer", "it is not a JSON object")
    return said


def models_of(answer: bytes) -> dict[str, Any]:
    """Return name -> entry of the models that an answer to ``/v1/models`` lists.

    Raises:
        Refused: it lists none.
    """
    listed = json_object(answer).get("data")
    entries = (
        [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    )
    named = {item["id"]: item for item in entries if isinstance(item.get("id"), str)}
    if not named:
        raise Refused("answer", "it lists no model")
    return named


def version_of(answer: bytes) -> str:
    """Return the version in an answer to ``/version`` (vLLM) or ``/server_info`` (SGLang).

    Raises:
        Refused: it has none.
    """
    version = json_object(answer).get("version")
    if not isinstance(version, str):
        raise Refused("answer", "it has no version")
    return version


def engine_ids_of(answer: bytes) -> dict[int, str]:
    """Return the engine id of each data-parallel rank, in what a MooncakeConnector's bootstrap
    server answers to ``/query``.

    Raises:
        Refused: it has none.
    """
    found = {
        int(rank): entry["engine_id"]
        for rank, entry in json_object(answer).items()
        if rank.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("engine_id"), str)
    }
    if not found:
        raise Refused("answer", "no engine is registered there")
    return found


def vllm_tokens(text: str) -> dict[int, float]:
    """Return the tokens that lie in each rank's KV cache, from vLLM's ``/metrics``.

    Ranks may be numbered from another number than 0 there, but not where a request asks for one.
    """
    used: dict[int, float] = {}
    caches: dict[int, dict[str, str]] = {}
    for name, labels, value in _samples(text, (_VLLM_USAGE, _VLLM_CACHE)):
        rank = int(_number(labels.get("engine", "")))
        if name == _VLLM_USAGE:
            used[rank] = value
        else:
            caches[rank] = labels
    room = {rank: _room(labels, len(caches)) for rank, labels in caches.items()}
    if used.keys() != room.keys() or min(room.values(), default=0) <= 0:
        return {}
    return {place: used[rank] * room[rank] for place, rank in enumerate(sorted(room))}


def _room(cache: Mapping[str, str], ranks: int) -> float:
    """Return how many tokens a rank's KV cache holds, of the ``ranks`` of its vLLM server.

    Blocks do not tell it where layers share them in groups, or ranks in a context; older vLLMs tell
    nothing else, and for every rank the sum over all.
    """
    tokens = _number(cache.get("kv_cache_size_tokens", ""))
    if tokens > 0:
        return tokens
    blocks, size = cache.get("num_gpu_blocks", ""), cache.get("block_size", "")
    return _number(blocks) * _number(size) / ranks


def vllm_received(text: str) -> float | None:
    """Return how many tokens' KV an engine has been given by others, from vLLM's ``/metrics``;
    None if it does not tell."""
    found = [
        value
        for _, labels, value in _samples(text, (_VLLM_TOKENS,))
        if labels.get("source") == "external_kv_transfer"
    ]
    return sum(found) if found else None


def sglang_tokens(answer: bytes) -> dict[int, float]:
    """Return the tokens of each rank, from SGLang's ``/v1/loads``: those in its KV cache, those
    on their way there, and those that wait to be computed.

    Raises:
        Refused: it is not of that form.
    """
    loads = json_object(answer).get("loads")
    if not isinstance(loads, list):
        raise Refused("answer", "it has no loads")
    found: dict[int, float] = {}
    for load in loads:
        match load:
            case {"dp_rank": int(rank), "num_used_tokens": int(used)}:
                total = load.get("num_total_tokens", used)
                waiting = load.get("num_waiting_uncached_tokens", 0)
                negative = min(used, total, waiting) < 0  # "unknown", in some versions
                found[rank] = -1 if negative else max(total, used + waiting)
            case _:
                raise Refused("answer", "a load has no dp_rank or no num_used_tokens")
    return found


def sglang_metric_tokens(text: str) -> dict[int, float]:
    """Return the tokens in each rank's KV cache, from SGLang's ``/metrics``."""
    found: dict[int, float] = {}
    for _, labels, value in _samples(text, (_SGLANG_TOKENS,)):
        rank = int(_number(labels.get("dp_rank", "0")))
        if rank >= 0:
            found[rank] = max(found.get(rank, 0.0), value)  # of its tensor-parallel ranks
    return found


def _samples(text: str, names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of the samples of some metrics."""
    for line in text.splitlines():
        if line.startswith(names):
            found = _SAMPLE.match(line)
            if found is not None and found[1] in names:
                yield found[1], dict(_LABEL.findall(found[2])), _number(found[3])


def _number(text: str) -> float:
    """Return a number; -1 where there is none."""
    try:
        return float(text)
    except ValueError:
        return -1.0
