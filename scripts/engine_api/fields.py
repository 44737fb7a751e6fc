"""Fields of an engine's request types, from its sources, as text: a line each, ``path: fields``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.engine_api.sources import Sources

_VLLM = "vllm.entrypoints"
_POOLING = f"{_VLLM}.pooling"
VLLM_TYPES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "/v1/completions": ((f"{_VLLM}.openai.completion.protocol", "CompletionRequest"),),
    "/v1/chat/completions": (
        (f"{_VLLM}.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ),
    "/v1/responses": ((f"{_VLLM}.openai.responses.protocol", "ResponsesRequest"),),
    "/v1/messages": ((f"{_VLLM}.anthropic.protocol", "AnthropicMessagesRequest"),),
    "/v1/messages/count_tokens": ((f"{_VLLM}.anthropic.protocol", "AnthropicCountTokensRequest"),),
    "/v1/embeddings": tuple(
        (f"{_POOLING}.embed.protocol", f"Embedding{name}Request")
        for name in ("Completion", "Chat", "BatchChat", "ChatInput", "BatchChatInput")
    ),
    "/pooling": (
        (f"{_POOLING}.pooling.protocol", "PoolingCompletionRequest"),
        (f"{_POOLING}.pooling.protocol", "PoolingChatRequest"),
        (f"{_POOLING}.pooling.protocol", "IOProcessorRequest"),
    ),
    "/classify": (
        (f"{_POOLING}.classify.protocol", "ClassificationCompletionRequest"),
        (f"{_POOLING}.classify.protocol", "ClassificationChatRequest"),
    ),
    "/score": tuple(
        (f"{_POOLING}.scoring.protocol", f"Score{name}Request")
        for name in ("Data", "QueriesDocuments", "QueriesItems", "Text")
    ),
    "/rerank": ((f"{_POOLING}.scoring.protocol", "RerankRequest"),),
    "/tokenize": (
        (f"{_VLLM}.serve.tokenize.protocol", "TokenizeCompletionRequest"),
        (f"{_VLLM}.serve.tokenize.protocol", "TokenizeChatRequest"),
    ),
    "/detokenize": ((f"{_VLLM}.serve.tokenize.protocol", "DetokenizeRequest"),),
}
"""Path of an API -> the types that its body may have: module and name."""

_OPENAI, _IO = "sglang.srt.entrypoints.openai.protocol", "sglang.srt.managers.io_struct"
_ANTHROPIC = "sglang.srt.entrypoints.anthropic.protocol"
SGLANG_TYPES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "/v1/completions": ((_OPENAI, "CompletionRequest"),),
    "/v1/chat/completions": ((_OPENAI, "ChatCompletionRequest"),),
    "/v1/responses": ((_OPENAI, "ResponsesRequest"),),
    "/v1/messages/count_tokens": ((_ANTHROPIC, "AnthropicCountTokensRequest"),),
    "/generate": ((_IO, "GenerateReqInput"),),
    "/v1/embeddings": ((_OPENAI, "EmbeddingRequest"),),
    "/classify": ((_IO, "EmbeddingReqInput"),),
    "/score": ((_OPENAI, "ScoringRequest"),),
    "/rerank": ((_OPENAI, "V1RerankReqInput"),),
    "/tokenize": ((_OPENAI, "TokenizeRequest"),),
    "/detokenize": ((_OPENAI, "DetokenizeRequest"),),
}


def request_fields(where: Path, package: str) -> dict[str, frozenset[str]]:
    """Return the fields of each API's body: path -> names.

    Raises:
        KeyError: the engine has no such type any more.
    """
    sources = Sources(where, package)
    types = VLLM_TYPES if package == "vllm" else SGLANG_TYPES
    return {
        path: frozenset(name for type_ in named for name in _fields(sources, *type_))
        for path, named in types.items()
    }


def request_text(where: Path, package: str) -> str:
    """Return :func:`request_fields` as lines: path, colon, names in order."""
    found = request_fields(where, package)
    return "".join(f"{path}: {' '.join(sorted(names))}\n" for path, names in found.items())


def read_text(text: str) -> dict[str, frozenset[str]]:
    """Return what :func:`request_text` wrote."""
    lines = (line.partition(": ") for line in text.splitlines())
    return {path: frozenset(names.split()) for path, _, names in lines}


def _fields(sources: Sources, module: str, name: str) -> Iterator[str]:
    """Yield the annotated fields of a class and of its bases in the same package."""
    found = sources.find(module, name)
    if found is None:
        raise KeyError(f"{module}.{name}")
    home, name = found
    for node in home.defined[name]:
        if not isinstance(node, ast.ClassDef):
            continue
        for child in node.body:
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                yield from _field(child.target.id, child.annotation)
        for base in node.bases:
            if isinstance(base, ast.Name) and sources.find(home.name, base.id) is not None:
                yield from _fields(sources, home.name, base.id)


def _field(name: str, annotation: ast.expr) -> Iterator[str]:
    private = name.startswith("_") or name == "model_config"
    if not private and "ClassVar" not in ast.unparse(annotation):
        yield name
