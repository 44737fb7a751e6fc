"""The HTTP API that clients see: each path, and how the router serves it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.request_ids import RESPONSE_ID, RID

_ALL = frozenset(EngineKind)
_VLLM_ONLY = _ALL - {EngineKind.SGLANG}


class Api(NamedTuple):
    """One path of the API.

    Attributes:
        decode_only: one decode engine serves it alone, without a hand-off.
        kinds: of engines that can serve it.
        salted: it computes KV, so the router adds the tenant's cache salt to the body.
        one_token: fields that make a prefill engine compute the prompt only.
        named_events: its server-sent events have names.
        takes_token_ids: vLLM's decode engine takes the prompt's token ids with the ticket, and does
            not tokenize again.
        cached_details: SGLang says on request where the prompt's cached tokens were.
        sglang_id: field with the request's id for SGLang; empty: it has none.
        method: HTTP method.
    """

    path: str
    decode_only: bool = True
    kinds: frozenset[EngineKind] = _ALL
    salted: bool = False
    one_token: Mapping[str, Any] = engine_bodies.ONE_TOKEN
    named_events: bool = False
    takes_token_ids: bool = False
    cached_details: bool = False
    sglang_id: str = ""
    method: str = "POST"


def _generates(path: str, **options: Any) -> Api:
    return Api(path, decode_only=False, salted=True, **{"sglang_id": RID, **options})


_RESPONSES = {"max_output_tokens": 1, "store": False}
_EMBEDDING = ("/v1/embeddings", "/classify")
_POOLING = ("/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
_OTHERS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_GETS = ("/version", "/ping", "/load", "/v1/load")

COMPLETIONS = _generates("/v1/completions", cached_details=True)
APIS: tuple[Api, ...] = (
    COMPLETIONS,
    _generates("/v1/chat/completions", takes_token_ids=True, cached_details=True),
    _generates("/v1/responses", one_token=_RESPONSES, named_events=True, sglang_id=RESPONSE_ID),
    # SGLang's /v1/messages takes no bootstrap room.
    _generates("/v1/messages", kinds=_VLLM_ONLY, named_events=True),
    _generates(engine_bodies.SGLANG_GENERATE, kinds=frozenset({EngineKind.SGLANG})),
    *(Api(path, salted=True, sglang_id=RID) for path in _EMBEDDING),
    *(Api(path, salted=True) for path in _POOLING),
    *(Api(path) for path in _OTHERS),
    *(Api(path, method="GET") for path in _GETS),
)
