"""Kinds of requests that clients send, and what of an answer must not depend on who serves it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

TEXT = "Say something about the sea, and about the wind. " * 12
IDS = list(range(40, 140))
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at the sea.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "sea",
        "schema": {"type": "object", "properties": {"calm": {"type": "boolean"}}},
    },
}
_PIECES = {"text", "content", "delta"}  # of a stream
_ROUNDING = 1e-3
_VOLATILE = {
    *("sequence_number", "id", "created", "created_at", "completed_at", "item_id", "request_id"),
    # Cached tokens: those that were handed over count.
    *("prompt_tokens_details", "input_tokens_details"),
    *("cache_creation_input_tokens", "cache_read_input_tokens"),
}
"""Fields that differ from answer to answer of one engine."""


class Kind(NamedTuple):
    """A request; ``body`` lacks the model."""

    path: str
    body: dict[str, Any]

    def asked(self, name: str) -> bytes:
        """Return the body, with a prompt that no cache has yet."""
        text = json.dumps({"model": "model", **self.body})
        return text.replace(TEXT, f"{name}. {TEXT}").encode()


def _completion(**fields: Any) -> Kind:
    return Kind("/v1/completions", {"prompt": TEXT, "max_tokens": 8, "temperature": 0, **fields})


def _chat(**fields: Any) -> Kind:
    body = {"messages": CHAT, "max_tokens": 8, "temperature": 0, **fields}
    return Kind("/v1/chat/completions", body)


def _responses(**fields: Any) -> Kind:
    body = {"input": TEXT, "max_output_tokens": 8, "temperature": 0, "store": False, **fields}
    return Kind("/v1/responses", body)


def _messages(**fields: Any) -> Kind:
    body = {"messages": CHAT[1:], "max_tokens": 8, "temperature": 0, **fields}
    return Kind("/v1/messages", body)


_SAMPLED = {"temperature": 1.0, "seed": 7}
KINDS = {
    "completion": _completion(),
    "token ids": _completion(prompt=IDS),
    "stream": _completion(stream=True),
    "stream with usage": _completion(stream=True, stream_options={"include_usage": True}),
    "usage with each event": _completion(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "seed": _completion(**_SAMPLED),
    "two choices": _completion(n=2, **_SAMPLED),
    "two choices in a stream": _completion(n=2, stream=True, **_SAMPLED),
    "logprobs": _completion(logprobs=2),
    "logprobs in a stream": _completion(logprobs=2, stream=True),
    "logprobs of the prompt": _completion(prompt_logprobs=1),
    "echo": _completion(echo=True),
    "echo with logprobs": _completion(echo=True, logprobs=1),
    "a stop string": _completion(stop=["e"], max_tokens=60),
    "a stop string in a stream": _completion(stop=["e"], max_tokens=60, stream=True),
    "a stop string that is shown": _completion(
        stop=["e"], max_tokens=60, include_stop_str_in_output=True
    ),
    "stop ids": _completion(stop_token_ids=list(range(0, 400, 2)), max_tokens=60),
    "fewest tokens": _completion(min_tokens=6, stop_token_ids=list(range(0, 400, 2))),
    "no end of text": _completion(ignore_eos=True),
    "a bias": _completion(logit_bias={"50": 100}),
    "presence": _completion(presence_penalty=1.5),
    "frequency": _completion(frequency_penalty=1.5),
    "repetition": _completion(repetition_penalty=1.3),
    "nucleus": _completion(top_p=0.7, top_k=20, min_p=0.01, **_SAMPLED),
    "allowed tokens": _completion(allowed_token_ids=[50, 51, 52]),
    "bad words": _completion(bad_words=["the", "a"]),
    "two prompts": _completion(prompt=[TEXT, "Another one. " * 20]),
    "two prompts of ids": _completion(prompt=[IDS, IDS[::-1]]),
    "a cut prompt": _completion(truncate_prompt_tokens=50),
    "special tokens are shown": _completion(skip_special_tokens=False),
    "a choice of texts": _completion(structured_outputs={"choice": ["calm", "wild"]}),
    "a pattern": _completion(structured_outputs={"regex": "[ab]{4}"}),
    "ids of the answer": _completion(return_token_ids=True),
    "one token": _completion(max_tokens=1),
    "chat": _chat(),
    "chat in a stream": _chat(stream=True),
    "chat with usage": _chat(stream=True, stream_options={"include_usage": True}),
    "chat with logprobs": _chat(logprobs=True, top_logprobs=2),
    "chat with two choices": _chat(n=2, **_SAMPLED),
    "the newer limit": _chat(max_tokens=None, max_completion_tokens=5),
    "JSON": _chat(response_format=SCHEMA, max_tokens=30),
    "tools that are not used": _chat(tools=[TOOL], tool_choice="none"),
    "a turn to be continued": _chat(
        messages=[*CHAT, {"role": "assistant", "content": "The sea"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "the prompt's text": _chat(return_prompt_text=True),
    "another template's values": _chat(chat_template_kwargs={"enable_thinking": False}),
    "a name of the user": _chat(user="somebody"),
    "responses": _responses(),
    "responses in a stream": _responses(stream=True),
    "responses with instructions": _responses(instructions="Be brief."),
    "messages": _messages(),
    "messages in a stream": _messages(stream=True),
    "messages with a system": _messages(system="Be brief."),
    "a role that is not known": _chat(messages=[{"role": "nobody", "content": TEXT}]),
    "no prompt": Kind("/v1/completions", {"max_tokens": 8}),
    "an empty prompt": _completion(prompt=""),
    "too long a prompt": _completion(prompt=[5] * 5000),
    "a wrong type": _completion(max_tokens="many"),
    "a value that is too low": _completion(temperature=-1),
    "no messages": _chat(messages=[]),
}


def comparable(answer: str) -> Any:
    """Return an answer without what differs each time; of a stream, what its events add up to: an
    engine puts tokens into one event if its clients are slow."""
    if answer.startswith("{"):
        return _steady(json.loads(answer))
    data = [line[5:].strip() for line in answer.splitlines() if line.startswith("data:")]
    sums: dict[str, Any] = {}
    for text in data:
        event = {} if text == "[DONE]" else _steady(json.loads(text))
        kind = event.get("type", "")
        if not kind and event.get("choices"):
            kind = f"choice {event['choices'][0]['index']}"
            event = {**event, "choices": event["choices"][0]}
        elif not kind.endswith("delta"):
            kind = f"{kind or text[:9]} {len(sums)}"
        sums[kind] = _added(sums[kind], event) if kind in sums else event
    return sorted(sums.items())


def _added(one: Any, more: Any, name: str = "") -> Any:
    if isinstance(one, dict) and isinstance(more, dict):
        return {key: _added(one.get(key), more.get(key), key) for key in {**one, **more}}
    joined = (isinstance(one, list) and isinstance(more, list)) or name in _PIECES
    if one is None or more is None or not joined:
        return one if more is None else more
    return one + more


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return where two comparable answers differ. Numbers may by what rounding makes of batches of
    other sizes."""
    if isinstance(one, float) and isinstance(other, float):
        return [] if abs(one - other) < _ROUNDING else [f"{where}: {one} and {other}"]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [each for key in one for each in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for n, (a, b) in pairs for each in differences(a, b, f"{where}[{n}]")]
    return [] if one == other else [f"{where}: {one!r} and {other!r}"]


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _steady(found) for key, found in value.items() if key not in _VOLATILE}
    if isinstance(value, list):
        return [_steady(one) for one in value]
    return value
