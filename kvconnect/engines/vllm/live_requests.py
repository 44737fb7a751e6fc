"""Live requests, and which of them may reuse KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconnect.engines.vllm.adapters import Adapters
from kvconnect.engines.vllm.prompt_settings import prompt_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class LiveRequests(dict[str, "Request"]):
    """The engine's live requests by id, and their adapters. Owned by the scheduler's thread."""

    def __init__(self, config: VllmConfig) -> None:
        self.adapters = Adapters(prompt_settings(config))

    def may_reuse(self, request: Request) -> bool:
        """Return whether a request may share KV with all requests that have its hashes."""
        lora = request.lora_request
        return lora is None or self.adapters.trusted(lora)
