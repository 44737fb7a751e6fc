"""Which fields of a client's body reach an engine. Pure.

A field passes because a list names it: the lists below, or ``--pass-field``. Tests compare the
lists with the request types of the engines, so a field that a new version adds needs a decision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from kvconnect.errors import ConfigError, Refused
from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.body import SALT, Body, raw_of
from kvconnect.router.requests.json_parts import check_parts

PRIORITY = "priority"
_SAMPLING_PARAMS = "sampling_params"
_SHOWN = 64  # characters of a field's name that an error repeats
_EMPTY = (b"null", b"[]")  # as if the field were missing; SGLang's own client sends an empty list


class Permissions(NamedTuple):
    """What a client's requests may contain.

    Attributes:
        listed_only: a field that no list names is refused; else it passes.
        named: fields that the operator lets pass.
        priority: ``priority`` passes.
    """

    listed_only: bool = False
    named: frozenset[str] = frozenset()
    priority: bool = True


class Permitted(NamedTuple):
    """A body for an engine, and the names of the fields that were dropped from it."""

    body: Body
    dropped: tuple[str, ...] = ()


def permitted(kind: EngineKind, path: str, body: Body, permissions: Permissions) -> Permitted:
    """Return the part of a client's body that may reach an engine of a kind.

    Raises:
        Refused: a field may not pass, and the answer would be another one without it.
    """
    decisions = DECISIONS[kind]
    passed = decisions.passed.get(_ALIASES.get(path, path), _NONE)
    dropped: tuple[str, ...] = ()
    if not body.keys() <= passed:
        listed = passed | permissions.named
        others = {name for name in body if name not in listed}
        kept = {name for name in others if _passes(decisions, name, body, permissions)}
        dropped = tuple(sorted((others - kept) & decisions.dropped))
        body = {name: value for name, value in body.items() if name in kept or name not in others}
    if decisions is _SGLANG and _SAMPLING_PARAMS in body:
        sampling = _client_sampling(body[_SAMPLING_PARAMS], permissions)
        body = {**body, _SAMPLING_PARAMS: sampling}
    return Permitted(body, dropped)


def _passes(decisions: Decisions, name: str, body: Body, permissions: Permissions) -> bool:
    """Return whether a field passes that neither the list of its path nor the operator names."""
    if name in decisions.own or (name in decisions.refused and raw_of(body, name) in _EMPTY):
        return False
    if name == PRIORITY:
        return permissions.priority
    if name in decisions.dropped:
        return False
    if name == SALT and decisions is _SGLANG and permissions.listed_only:
        return False  # the router's own, at a path of SGLang's that takes none
    if name in decisions.refused or permissions.listed_only:
        raise _refused(name)
    return True


def _refused(name: str) -> Refused:
    shown = name[:_SHOWN]
    fix = f"leave it out, or have the router started with --pass-field {shown}"
    return Refused(shown, f"this router does not pass the field on: {fix}")


def check_named(names: Collection[str]) -> frozenset[str]:
    """Return the names of ``--pass-field`` as a set.

    Raises:
        ConfigError: the router sets one of them itself.
    """
    own = _VLLM.own | _SGLANG.own
    for name in names:
        if name in own:
            raise ConfigError("pass-field", name, f"leave {name} out: only the router may set it")
    return frozenset(names)


def _client_sampling(value: Any, permissions: Permissions) -> Any:
    """Return SGLang's sampling parameters without its internal fields.

    Raises:
        Refused: they are neither an object nor a list of objects, have too many parts, or one may
            not pass.
    """
    raw = bytes(value) if isinstance(value, Raw) else msgspec.json.encode(value)
    # An escape may hide a name.
    names = INTERNAL_SAMPLING | REFUSED_SAMPLING
    if b"\\" not in raw and not any(name.encode() in raw for name in names):
        return value
    check_parts(_SAMPLING_PARAMS, raw, "ask about fewer prompts at a time")
    try:
        if raw[:1] == b"[":
            found = msgspec.json.decode(raw, type=list[dict[str, Raw] | None])
            return [each and _without_internal(each, permissions) for each in found]
        return _without_internal(msgspec.json.decode(raw, type=dict[str, Raw]), permissions)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refused(_SAMPLING_PARAMS, "use an object, or a list of objects") from error


def _without_internal(params: Mapping[str, Raw], permissions: Permissions) -> dict[str, Raw]:
    for name in REFUSED_SAMPLING - permissions.named:
        if bytes(params.get(name, b"null")) not in _EMPTY:
            raise _refused(name)
    return {name: value for name, value in params.items() if name not in INTERNAL_SAMPLING}


class Decisions(NamedTuple):
    """The decisions about one kind of engine.

    Attributes:
        passed: path -> fields that pass.
        dropped: fields that pass nowhere; without them the answer is the same.
        refused: fields that pass nowhere; without them the answer would be another one.
        own: fields that only the router sets.
        keyless: fields that pass as those of no list do: where no client has a key.
    """

    passed: Mapping[str, frozenset[str]]
    dropped: frozenset[str]
    refused: frozenset[str]
    own: frozenset[str]
    keyless: frozenset[str] = frozenset()

    def decided(self, path: str) -> frozenset[str]:
        """Return the fields that a list names for a path."""
        everywhere = self.dropped | self.refused | self.own | self.keyless | {PRIORITY}
        return self.passed[path] | everywhere


def _of(*groups: str) -> frozenset[str]:
    return frozenset(" ".join(groups).split())


_NONE: frozenset[str] = frozenset()
_ALIASES = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"}

OPENAI = """
    audio best_of conversation function_call functions logit_bias logprobs max_completion_tokens
    max_tokens max_tool_calls metadata modalities model moderation n parallel_tool_calls prediction
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning reasoning_effort
    response_format safety_identifier seed service_tier stop store stream stream_options suffix
    temperature text tool_choice tools top_logprobs top_p truncation user verbosity
    web_search_options"""
"""Fields of OpenAI's API: libraries send them, and engines ignore those that they do not know."""

ANTHROPIC = """
    betas cache_control container context_management inference_geo mcp_servers metadata model
    output_config output_format service_tier speed stop_sequences system thinking tool_choice tools
    top_k top_p"""
"""Fields of Anthropic's API, as :data:`OPENAI`."""

_COHERE = "max_chunks_per_doc max_tokens_per_doc model return_documents top_n"

# vLLM

_VLLM_SAMPLING = """
    cache_salt frequency_penalty ignore_eos include_stop_str_in_output logit_bias min_p mm_payload
    model presence_penalty repetition_penalty request_id return_mm_kwargs seed skip_special_tokens
    spaces_between_special_tokens stop stop_token_ids stream structured_outputs temperature top_k
    top_p user vllm_xargs watermarking"""
_VLLM_TEXT = """
    add_special_tokens allowed_token_ids bad_words echo length_penalty logprob_token_ids logprobs
    max_tokens min_tokens n prompt_logprobs repetition_detection response_format return_token_ids
    return_token_offsets return_tokens_as_token_ids return_weight_versions
    routed_experts_prompt_start stream_interval stream_options thinking_token_budget
    truncate_prompt_tokens truncation_side use_beam_search"""
_VLLM_TOOLS = "chat_template_kwargs parallel_tool_calls tool_choice tools top_logprobs"
_VLLM_TEMPLATE = """
    add_generation_prompt add_special_tokens chat_template chat_template_kwargs
    continue_final_message messages model"""
_VLLM_POOL = """
    cache_salt model padding request_id truncate_prompt_tokens truncation_side use_activation
    user"""
_VLLM_VECTORS = "dimensions embed_dtype encoding_format endianness"
_VLLM_SCORES = "chat_template_kwargs instruction max_tokens_per_doc max_tokens_per_query"

_VLLM = Decisions(
    passed={
        "/v1/completions": _of(OPENAI, _VLLM_SAMPLING, _VLLM_TEXT, "prompt prompt_embeds suffix"),
        "/v1/chat/completions": _of(
            OPENAI,
            _VLLM_SAMPLING,
            _VLLM_TEXT,
            _VLLM_TOOLS,
            _VLLM_TEMPLATE,
            "documents include_reasoning max_completion_tokens reasoning_effort",
            "return_prompt_text",
        ),
        "/v1/responses": _of(
            OPENAI,
            _VLLM_SAMPLING,
            _VLLM_TOOLS,
            "enable_response_messages include include_reasoning input instructions",
            "max_output_tokens max_tool_calls metadata",
            "previous_input_messages previous_response_id prompt prompt_cache_key",
            "prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier",
            "store text truncation",
        ),
        "/v1/messages": _of(
            ANTHROPIC,
            "cache_salt chat_template_kwargs max_tokens messages metadata mm_payload model",
            "output_config return_mm_kwargs stop_sequences stream system temperature thinking",
            "tool_choice tools top_k top_p vllm_xargs watermarking",
        ),
        "/v1/messages/count_tokens": _of(
            ANTHROPIC,
            "chat_template_kwargs messages model output_config system thinking tool_choice tools",
        ),
        "/v1/embeddings": _of(_VLLM_TEMPLATE, _VLLM_POOL, _VLLM_VECTORS, "input"),
        "/pooling": _of(_VLLM_TEMPLATE, _VLLM_POOL, _VLLM_VECTORS, "data input task"),
        "/classify": _of(_VLLM_TEMPLATE, _VLLM_POOL, "input"),
        "/score": _of(
            _VLLM_POOL, _VLLM_SCORES, "data_1 data_2 documents items queries text_1 text_2"
        ),
        "/rerank": _of(_VLLM_POOL, _VLLM_SCORES, _COHERE, "documents query top_n"),
        "/tokenize": _of(_VLLM_TEMPLATE, "prompt return_token_strs tools"),
        "/detokenize": _of("model tokens"),
    },
    # A background request goes on without its client. A session is any client's that names it.
    dropped=_of("background kv_hints session_id", PRIORITY),
    refused=_NONE,
    own=_of("kv_transfer_params ec_transfer_params"),
    # Sizes of images and videos: processors compute them before anything is counted.
    keyless=_of("media_io_kwargs mm_processor_kwargs"),
)

# SGLang

_SGLANG_SAMPLING = """
    cache_salt extra_key frequency_penalty min_p model presence_penalty repetition_penalty stop
    stream temperature top_k top_p user"""
_SGLANG_TEXT = """
    custom_params ebnf ignore_eos images_config logit_bias logprobs lora_path max_tokens min_tokens
    mm_processor_kwargs n no_stop_trim regex response_format return_cached_tokens_details
    return_hidden_states return_routed_experts return_spec_tokens_details return_token_ids
    routed_experts_start_len seed skip_special_tokens stop_token_ids stream_options watermark"""
_SGLANG_MEDIA = "audio_data image_data modalities video_data"
_SGLANG_EMBEDDING = "dimensions lora_path"

_SGLANG = Decisions(
    passed={
        "/v1/completions": _of(
            OPENAI, _SGLANG_SAMPLING, _SGLANG_TEXT, "best_of echo json_schema prompt suffix"
        ),
        "/v1/chat/completions": _of(
            OPENAI,
            _SGLANG_SAMPLING,
            _SGLANG_TEXT,
            "chat_template_kwargs continue_final_message input_ids max_completion_tokens",
            "max_dynamic_patch messages min_dynamic_patch parallel_tool_calls reasoning_effort",
            "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64",
            "return_input_ids_in_sglext return_meta_info return_output_ids_in_sglext",
            "return_prompt_token_ids return_sampling_mask sampling_logprobs_mode",
            "separate_reasoning stream_reasoning task thinking tool_choice tools top_logprobs",
            "use_audio_in_video video_config",
        ),
        "/v1/responses": _of(
            OPENAI,
            _SGLANG_SAMPLING,
            "chat_template_kwargs include input instructions max_output_tokens max_tool_calls",
            "metadata parallel_tool_calls previous_response_id reasoning service_tier store text",
            "tool_choice tools top_logprobs truncation",
        ),
        "/v1/messages/count_tokens": _of(
            ANTHROPIC, "betas messages model output_config system thinking tool_choice tools"
        ),
        "/generate": _of(
            _SGLANG_MEDIA,
            "cache_salt extra_key image_max_dynamic_patch images_config input_embeds input_ids",
            "logprob_start_len lora_path max_dynamic_patch max_thinking_tokens min_dynamic_patch",
            "mm_processor_kwargs model require_reasoning",
            "return_entropy return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs",
            "return_flat_raw_top_logprobs_b64 return_hidden_states return_indexer_topk",
            "return_logprob return_prompt_token_ids return_routed_experts return_sampling_mask",
            "return_text_in_logprobs routed_experts_start_len sampling_logprobs_mode",
            "sampling_params stream text token_ids_logprob top_logprobs_num use_audio_in_video",
            "video_config video_max_dynamic_patch watermark",
        ),
        "/v1/embeddings": _of(_SGLANG_EMBEDDING, "encoding_format input model user"),
        "/classify": _of(
            _SGLANG_EMBEDDING,
            _SGLANG_MEDIA,
            "input_embeds input_ids model return_pooled_hidden_states return_prompt_token_ids",
            "sampling_params text",
        ),
        "/score": _of(
            "apply_softmax item_first items label_token_ids model query",
            "return_pooled_hidden_states return_token_logprobs score_extraction_token temperature",
        ),
        "/rerank": _of(_COHERE, "documents instruct query return_documents top_n"),
        "/tokenize": _of(
            "add_generation_prompt add_special_tokens chat_template_kwargs",
            "continue_final_message messages model prompt reasoning_effort tool_choice tools",
        ),
        "/detokenize": _of("model skip_special_tokens tokens"),
    },
    dropped=_of(
        # An error about a label, or a wrong address inside the server, ends the server.
        "custom_labels http_worker_ipc external_trace_header received_time",
        # Identities that a client would choose for what others may share.
        "conversation_id lora_id mm_content_hashes mm_hashes routing_key session_id",
        # For a server that splits off image encoders: it sets them itself.
        "encoder_urls need_wait_for_mm_inputs num_items_assigned return_bytes",
        # Hints of an orchestrator; requests that outlive their client; less logs and metrics.
        "background kv_hints log_metrics no_logs",
        PRIORITY,
    ),
    # Code, other clients' sessions, and positions that the server computes itself. Vectors that are
    # not of the model's width end the server.
    refused=_of(
        "custom_logit_processor decision_layout is_cross_encoder_request session_params stop_regex",
        "multi_item_delimiter_indices positional_embed_overrides token_indices_to_pool",
        "embed_override_token_id embed_overrides item_embed_overrides query_embed_overrides",
    ),
    own=_of(
        "bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room data_parallel_rank",
        "decode_tp_size disagg_prefill_dp_rank request_id rid routed_dp_rank",
    ),
)

INTERNAL_SAMPLING = _of(
    "ebnf_full_assistant is_normalized stop_regex_max_len stop_regex_strs stop_str_max_len",
    "stop_strs",
)
"""Fields that SGLang computes from a request's sampling parameters."""
REFUSED_SAMPLING = _of("stop_regex")
"""Sampling parameters that need the operator. SGLang's scheduler tries a pattern after each token,
and some patterns take for ever."""

DECISIONS: Mapping[EngineKind, Decisions] = {
    EngineKind.VLLM: _VLLM,
    EngineKind.NIXL: _VLLM,
    EngineKind.MOONCAKE: _VLLM,
    EngineKind.SGLANG: _SGLANG,
}
DROPPED = tuple(sorted(_VLLM.dropped | _SGLANG.dropped))
"""Every name that :func:`permitted` can report as dropped."""
