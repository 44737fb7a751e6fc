"""Messages of SGLang's gRPC API, built when they are first needed.

They are described here, so that no generated code depends on a version of protobuf. Left out: what
the router does not use, which protobuf skips. A map is, on the wire, a list of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

_PACKAGE = "sglang.runtime.v1"
_MESSAGES: Mapping[str, tuple[str, ...]] = {
    "Pair": ("key=1 string", "value=2 string"),
    "OpenAIRequest": ("json_body=1 bytes", "trace_headers=2 Pair*"),
    "OpenAIStreamChunk": ("json_chunk=1 bytes", "finished=2 bool"),
    "OpenAIResponse": ("json_body=1 bytes", "status_code=2 int32"),
    "DisaggregatedParams": (
        *("bootstrap_host=1 string", "bootstrap_port=2 int32", "bootstrap_room=3 int64"),
    ),
    "SamplingParams": (
        *("temperature=1 float?", "top_p=2 float?", "top_k=3 int32?", "min_p=4 float?"),
        *("frequency_penalty=5 float?", "presence_penalty=6 float?"),
        *("repetition_penalty=7 float?", "max_new_tokens=8 int32?", "min_new_tokens=9 int32?"),
        *("stop=10 string*", "stop_token_ids=11 int32*", "ignore_eos=12 bool?", "n=13 int32?"),
        *("json_schema=14 string?", "regex=15 string?"),
    ),
    "TextGenerateRequest": (
        *("text=1 string", "sampling_params=2 SamplingParams", "stream=3 bool?"),
        *("return_logprob=4 bool?", "top_logprobs_num=5 int32?", "logprob_start_len=6 int32?"),
        *("return_text_in_logprobs=7 bool?", "rid=8 string?", "lora_path=9 string?"),
        *("routed_dp_rank=11 int32?", "trace_headers=12 Pair*"),
        *("disaggregated_params=14 DisaggregatedParams", "priority=15 int32?"),
        *("require_reasoning=16 bool?", "max_thinking_tokens=17 int32?"),
    ),
    "TextGenerateResponse": ("text=1 string", "meta_info=2 Pair*", "finished=3 bool"),
    "GenerateRequest": (
        *("input_ids=1 int32*", "sampling_params=2 SamplingParams", "stream=3 bool?"),
        *("return_logprob=4 bool?", "top_logprobs_num=5 int32?", "logprob_start_len=6 int32?"),
        *("rid=7 string?", "lora_path=8 string?", "routed_dp_rank=10 int32?"),
        *("trace_headers=11 Pair*", "disaggregated_params=13 DisaggregatedParams"),
        *("priority=14 int32?", "require_reasoning=15 bool?", "max_thinking_tokens=16 int32?"),
    ),
    "GenerateResponse": ("output_ids=1 int32*", "meta_info=2 Pair*", "finished=3 bool"),
    "HealthCheckResponse": ("healthy=1 bool",),
    "GetLoadResponse": ("json_info=1 string",),
    "ModelCard": ("id=1 string", "root=2 string", "parent=3 string?", "max_model_len=4 int32?"),
    "ListModelsResponse": ("models=1 ModelCard*",),
}
"""Name -> fields: name, number and type; ``?``: it may be missing, ``*``: a list."""


@cache
def message(name: str) -> type[Message]:
    """Return the class of a message."""
    return _classes()[f"{_PACKAGE}.{name}"]


@cache
def _classes() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name=_PACKAGE, package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field in fields:
            _describe(described, *field.split(" "))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made: dict[str, type[Message]] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return made


def _describe(described: descriptor_pb2.DescriptorProto, place: str, kind: str) -> None:
    name, _, number = place.partition("=")
    made, base = descriptor_pb2.FieldDescriptorProto, kind.rstrip("?*")
    label = "LABEL_REPEATED" if kind.endswith("*") else "LABEL_OPTIONAL"
    field = described.field.add(name=name, number=int(number), label=made.Label.Value(label))
    if base in _MESSAGES:
        field.type, field.type_name = made.TYPE_MESSAGE, f".{_PACKAGE}.{base}"
        return
    field.type = made.Type.Value(f"TYPE_{base.upper()}")
    if kind.endswith("?"):  # proto3 puts it into a oneof of its own
        field.proto3_optional, field.oneof_index = True, len(described.oneof_decl)
        described.oneof_decl.add(name=f"_{name}")
