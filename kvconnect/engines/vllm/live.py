"""The requests of an engine that live, and what they may use again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

MOST_RELOADED = 1024


class LiveRequests(dict[str, "Request"]):
    """By their ids. Owned by the scheduler's thread.

    An adapter that is loaded again in place has new weights under the hashes of the old ones, and a
    request does not tell which. So from the first one on that says so (``load_inplace``), what
    goes by such an adapter's name and path is neither stored nor loaded.
    """

    def __init__(self) -> None:
        self._reloaded: set[tuple[str, str]] = set()

    def may_reuse(self, request: Request) -> bool:
        """Whether KV of a request is that of all who have its hashes."""
        lora = request.lora_request
        if lora is None:
            return True
        adapter = lora.lora_name, lora.lora_path
        if lora.load_inplace and len(self._reloaded) < MOST_RELOADED:
            self._reloaded.add(adapter)
        # Where too many were reloaded to know them, no adapter is trusted.
        return adapter not in self._reloaded and len(self._reloaded) < MOST_RELOADED
