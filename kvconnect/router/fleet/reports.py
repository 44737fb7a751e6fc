"""Readers of engines' reports: models, version, load. Pure.

Numbers are passed on unchecked; :class:`~kvconnect.router.policy.loads.Loads` validates them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw

from kvconnect.errors import Refused
from kvconnect.router.policy.loads import MOST_RANKS
from kvconnect.router.requests.engine_bodies import json_object

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)\{(.*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]++|\\.)*+)"')
_LINE = 8192  # longest sample line that is read
_VLLM_USAGE = "vllm:kv_cache_usage_perc"
_REFUSED = tuple(f"{engine}:kvconnect_handoff_refused_total" for engine in ("vllm", "sglang"))
_VLLM_TOKENS = "vllm:prompt_tokens_by_source_total"
_VLLM_CACHE = "vllm:cache_config_info"
_SGLANG_TOKENS = "sglang:num_used_tokens"
VLLM_LOAD = f"/metrics/?name%5B%5D={_VLLM_USAGE}&name%5B%5D={_VLLM_CACHE}"
"""What of vLLM's ``/metrics`` its load is read from; only its path with a slash selects."""
_MOST_MODELS = 4096  # limit of models of one engine, adapters included
_RANK_DIGITS = len(str(MOST_RANKS))

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)
"""Errors of decoding invalid bytes."""

_T = TypeVar("_T")
_Name = Annotated[str, Meta(max_length=1024)]
_Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
_Tokens = Annotated[int, Meta(ge=-(2**53), le=2**53)]


class _Models(msgspec.Struct):
    data: list[Raw]


class _Model(msgspec.Struct):
    id: _Name


class _Version(msgspec.Struct):
    version: _Name


class _Registered(msgspec.Struct):
    engine_id: _Name


class _SglangLoad(msgspec.Struct):
    dp_rank: _Rank
    num_used_tokens: _Tokens
    num_total_tokens: _Tokens | msgspec.UnsetType = msgspec.UNSET
    num_waiting_uncached_tokens: _Tokens = 0


class _SglangLoads(msgspec.Struct):
    loads: Annotated[list[_SglangLoad], Meta(max_length=MOST_RANKS)]


def models_of(answer: bytes) -> dict[str, Any]:
    """Return name -> entry of the models in a response to ``/v1/models``. Invalid entries are
    skipped.

    Raises:
        Refused: there is no valid entry.
    """
    named: dict[str, Any] = {}
    for item in _read(answer, _Models).data[:_MOST_MODELS]:
        try:
            named[msgspec.json.decode(item, type=_Model).id] = json_object(bytes(item))
        except (*_UNREADABLE, Refused):
            continue
    if not named:
        raise Refused("answer", "it lists no model")
    return named


def version_of(answer: bytes) -> str:
    """Return the version in a response to ``/version`` (vLLM) or ``/server_info`` (SGLang).

    Raises:
        Refused: there is none.
    """
    return _read(answer, _Version).version


def engine_ids_of(answer: bytes) -> dict[int, str]:
    """Return the engine id of each data-parallel rank from a MooncakeConnector's bootstrap server
    (``/query``).

    Raises:
        Refused: there is none.
    """
    found = {}
    for rank, entry in _read(answer, dict[str, Raw]).items():
        number = _rank(rank)
        if number is not None:
            try:
                found[number] = msgspec.json.decode(entry, type=_Registered).engine_id
            except _UNREADABLE:
                continue
    if not found:
        raise Refused("answer", "no engine is registered there")
    return found


def _read(answer: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except _UNREADABLE as error:
        raise Refused("answer", f"it has an unknown format: {error}") from error


def _rank(text: str) -> int | None:
    """Return the rank in ``text``, None if it is not a rank."""
    good = text.isascii() and text.isdecimal() and len(text) <= _RANK_DIGITS
    return int(text) if good and int(text) < MOST_RANKS else None


def vllm_tokens(text: str) -> dict[int, float]:
    """Return the tokens in each rank's KV cache, from vLLM's ``/metrics``.

    Ranks there may start at another number than 0; the result is numbered from 0, as in requests.

    Raises:
        Refused: a sample has no rank.
    """
    used: dict[int, float] = {}
    caches: dict[int, dict[str, str]] = {}
    for name, labels, value in samples(text, (_VLLM_USAGE, _VLLM_CACHE)):
        rank = _rank(labels.get("engine", ""))
        if rank is None:
            raise Refused("answer", f"a sample of {name} has no engine's number")
        if name == _VLLM_USAGE:
            used[rank] = value
        else:
            caches[rank] = labels
    capacity = {rank: _capacity(labels, len(caches)) for rank, labels in caches.items()}
    if used.keys() != capacity.keys() or min(capacity.values(), default=0) <= 0:
        return {}
    return {index: used[rank] * capacity[rank] for index, rank in enumerate(sorted(capacity))}


def _capacity(cache: Mapping[str, str], ranks: int) -> float:
    """Return the capacity of a rank's KV cache in tokens.

    Older vLLM versions report only blocks, summed over all ``ranks``; that is inexact for hybrid
    models and context parallelism.
    """
    tokens = _number(cache.get("kv_cache_size_tokens", ""))
    if tokens > 0:
        return tokens
    blocks, size = cache.get("num_gpu_blocks", ""), cache.get("block_size", "")
    return _number(blocks) * _number(size) / ranks


def vllm_received(text: str) -> float | None:
    """Return the tokens whose KV an engine has received from others, from vLLM's ``/metrics``;
    None if it does not report them."""
    found = [
        value
        for _, labels, value in samples(text, (_VLLM_TOKENS,))
        if labels.get("source") == "external_kv_transfer"
    ]
    return sum(found) if found else None


def refused_handoffs(text: str) -> dict[str, float]:
    """Return how many hand-offs an engine has refused, by the field that did not match, from its
    ``/metrics``."""
    found: dict[str, float] = {}
    for _, labels, value in samples(text, _REFUSED):
        field = labels.get("field", "")
        found[field] = found.get(field, 0.0) + value
    return found


def sglang_tokens(answer: bytes) -> dict[int, float]:
    """Return the tokens of each rank, from SGLang's ``/v1/loads``: cached, in transfer, or waiting
    to be computed.

    Raises:
        Refused: it has another format.
    """
    found: dict[int, float] = {}
    for load in _read(answer, _SglangLoads).loads:
        used, waiting = load.num_used_tokens, load.num_waiting_uncached_tokens
        total = used if load.num_total_tokens is msgspec.UNSET else load.num_total_tokens
        negative = min(used, total, waiting) < 0  # "unknown", in some versions
        found[load.dp_rank] = -1 if negative else max(total, used + waiting)
    return found


def sglang_metric_tokens(text: str) -> dict[int, float]:
    """Return the tokens in each rank's KV cache, from SGLang's ``/metrics``.

    Raises:
        Refused: a sample has no rank.
    """
    found: dict[int, float] = {}
    for _, labels, value in samples(text, (_SGLANG_TOKENS,)):
        rank = _rank(labels.get("dp_rank", "0"))
        if rank is None:
            raise Refused("answer", f"a sample of {_SGLANG_TOKENS} has no rank")
        found[rank] = max(found.get(rank, 0.0), value)  # maximum over tensor-parallel ranks
    return found


def samples(text: str, names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of the samples of the metrics ``names``."""
    for line in text.splitlines():
        if line.startswith(names) and len(line) <= _LINE:
            found = _SAMPLE.match(line)
            if found is not None and found[1] in names:
                yield found[1], dict(_LABEL.findall(found[2])), _number(found[3])


def _number(text: str) -> float:
    """Return a finite number; -1 if there is none."""
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if isfinite(number) else -1.0
