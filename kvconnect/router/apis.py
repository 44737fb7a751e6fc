"""What clients may ask for, by path, and how each is served. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvconnect.router.http import upstream_requests
from kvconnect.router.policy.loads import Engine

_ALL = frozenset(Engine)
_OF_VLLM = _ALL - {Engine.SGLANG}


class Api(NamedTuple):
    """One path.

    Attributes:
        alone: a decode engine serves it by itself: there is nothing to hand over, or no way to.
        engines: what can serve it.
        salted: it computes KV, so its body gets the client's salt.
        one_token: fields that have a prefill engine compute the prompt only.
        named_events: the events of its streams have names.
        method: of HTTP.
    """

    path: str
    decode_only: bool = True
    engines: frozenset[Engine] = _ALL
    salted: bool = False
    one_token: Mapping[str, Any] = upstream_requests.ONE_TOKEN
    named_events: bool = False
    method: str = "POST"


def _generates(path: str, **how: Any) -> Api:
    return Api(path, decode_only=False, salted=True, **how)


_RESPONSES = {"max_output_tokens": 1, "store": False}
_COMPUTING = (
    *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
)
_OTHERS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_GETS = ("/version", "/ping", "/load", "/v1/load")

COMPLETIONS = _generates("/v1/completions")
APIS: tuple[Api, ...] = (
    COMPLETIONS,
    _generates("/v1/chat/completions"),
    _generates("/v1/responses", one_token=_RESPONSES, named_events=True),
    # SGLang's does not take the room in which its servers meet.
    _generates("/v1/messages", engines=_OF_VLLM, named_events=True),
    _generates(upstream_requests.SGLANG_GENERATE, engines=frozenset({Engine.SGLANG})),
    *(Api(path, salted=True) for path in _COMPUTING),
    *(Api(path) for path in _OTHERS),
    *(Api(path, method="GET") for path in _GETS),
)
