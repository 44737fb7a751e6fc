"""Checks a request's prompt and token ids against the model, which SGLang does not do.

Its scheduler does not survive an id that the vocabulary lacks, nor an empty prompt. The checks run
where requests are tokenized, before a scheduler sees them: SGLang answers with 400. Importing this
module imports neither SGLang nor torch.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from math import dist
from typing import Any

_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
VALIDATE = f"{_TOKENIZER}.TokenizerManager._validate_one_request"
_MOST_LENGTH = 65_504.0  # of an embedding: the largest number of 16 bits


def watch() -> None:
    """Register the hook if requests may be tokenized in this process. The plugin calls this when
    loaded."""
    # A server's first process has not imported it yet. Its schedulers never do.
    if multiprocessing.parent_process() is not None and _TOKENIZER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(VALIDATE, before_validate, HookType.BEFORE)


def before_validate(
    manager: Any, request: Any, input_ids: Sequence[int] | None = None, *_: Any, **__: Any
) -> None:
    """Hook before ``TokenizerManager._validate_one_request``. ``input_ids``: the prompt's tokens;
    None: it has embeddings instead.

    Raises:
        ValueError: the prompt is empty, or its embeddings are not of the model's width; the
            vocabulary does not have an id, or so many tokens.
    """
    size: int = manager.model_config.vocab_size
    # Processors of media replace the ids, and SGLang takes others for the nearest in the
    # vocabulary, because models may have none for an image.
    if not (manager.mm_processor is not None and request.contains_mm_input()):
        # The history of a session may be the whole prompt.
        history = getattr(request, "session_params", None)
        if input_ids is not None and len(input_ids) == 0 and not history:
            raise _refusal("prompt", "one token or more")
        _check("input_ids", request.input_ids, size)
    embeds = getattr(request, "input_embeds", None)
    if embeds is not None:
        if input_ids is None and not hasattr(request, "stream"):  # its scheduler gets no prompt
            raise _refusal("input_embeds", "text or ids where a prompt is embedded")
        _check_embeds(embeds, manager.model_config.hidden_size)
    stops = request.sampling_params.get("stop_token_ids") or ()
    _check("stop_token_ids", [int(each) for each in stops if each is not None], size)
    most = getattr(request, "top_logprobs_num", None) or 0
    if most > size:
        raise _refusal("top_logprobs_num", f"{size} or less, as the model's vocabulary")


def _check(name: str, ids: list[int] | None, size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < size):
        raise _refusal(name, f"ids from 0 to {size - 1}, as the model's vocabulary")


def _check_embeds(rows: Any, width: int) -> None:
    origin = (0.0,) * width
    try:  # a length is NaN, or infinite, if a number is
        right = all(dist(row, origin) <= _MOST_LENGTH for row in rows)
    except (TypeError, ValueError, OverflowError):  # it has another width, or no numbers
        right = False
    if not right or not rows:
        raise _refusal("input_embeds", f"one vector or more, each of {width} numbers")


def _refusal(name: str, fix: str) -> ValueError:
    # It begins as pydantic's do: over gRPC, the router knows a client's fault by its words only.
    return ValueError(f"1 validation error for {name}: use {fix}")
