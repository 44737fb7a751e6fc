"""Checks a request's token ids against the model's vocabulary, which SGLang does not do.

Its scheduler does not survive an id that the vocabulary lacks. The check runs where requests are
tokenized, before a scheduler sees them: SGLang answers with 400. Importing this module imports
neither SGLang nor torch.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
VALIDATE = f"{_TOKENIZER}.TokenizerManager._validate_one_request"


def watch() -> None:
    """Register the hook if requests may be tokenized in this process. The plugin calls this when
    loaded."""
    # A server's first process has not imported it yet. Its schedulers never do.
    if multiprocessing.parent_process() is not None and _TOKENIZER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(VALIDATE, before_validate, HookType.BEFORE)


def before_validate(manager: Any, request: Any, *_: Any, **__: Any) -> None:
    """Hook before ``TokenizerManager._validate_one_request``.

    Raises:
        ValueError: the vocabulary does not have an id, or so many tokens.
    """
    size: int = manager.model_config.vocab_size
    # Processors of media replace the ids, and SGLang takes others for the nearest in the
    # vocabulary, because models may have none for an image.
    if not (manager.mm_processor is not None and request.contains_mm_input()):
        _check("input_ids", request.input_ids, size)
    stops = request.sampling_params.get("stop_token_ids") or ()
    _check("stop_token_ids", [int(each) for each in stops if each is not None], size)
    most = getattr(request, "top_logprobs_num", None) or 0
    if most > size:
        raise _refusal("top_logprobs_num", f"{size} or less")


def _check(name: str, ids: list[int] | None, size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < size):
        raise _refusal(name, f"ids from 0 to {size - 1}")


def _refusal(name: str, fix: str) -> ValueError:
    # It begins as pydantic's do: over gRPC, the router knows a client's fault by its words only.
    return ValueError(f"1 validation error for {name}: use {fix}, as the model's vocabulary")
