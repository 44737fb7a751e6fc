"""What the router asks engines of vLLM beside completions is what their own types take."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from kvconnect.router.api_keys import ApiKey
from kvconnect.router.http.tenants import Tenants
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.apis import APIS
from kvconnect.router.requests.body import SALT, read_body

ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 9, "stream": True}),
    "/v1/messages": (
        AnthropicMessagesRequest,
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 2000,
            "stream": True,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
}


@pytest.mark.parametrize("path", ASKED)
def test_transfers_and_salts_are_fields_of_responses_and_messages(path: str) -> None:
    kind, asked = ASKED[path]
    api = next(api for api in APIS if api.path == path)
    body = read_body(json.dumps({"model": "m", **asked}).encode())
    tenant = Tenants((ApiKey("key"),), isolate=True).find("key", "")
    assert tenant is not None
    body[SALT] = tenant.salt(b"")
    prefill = kind.model_validate_json(
        engine_bodies.encoded(engine_bodies.prefill_body(body, "x", api.one_token))
    )
    decode = kind.model_validate_json(
        engine_bodies.encoded(engine_bodies.push_body(body, "x", "standing"))
    )
    bound = next(name for name, value in api.one_token.items() if value == 1)
    assert getattr(prefill, bound) == 1 and not prefill.stream
    assert getattr(decode, bound) == asked[bound] and decode.stream
    assert prefill.kv_transfer_params["do_remote_decode"]
    assert decode.kv_transfer_params["do_remote_prefill"]
    assert prefill.cache_salt == decode.cache_salt == body[SALT]
    assert not (prefill.model_extra or decode.model_extra), "every field is one of theirs"
