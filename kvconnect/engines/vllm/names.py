"""What vLLM's blocks are called below the host tier: by their tokens, so that others find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvconnect.format import page_names
from kvconnect.plan.below import Wanted
from kvconnect.plan.groups import CacheGroup
from kvconnect.plan.keys import scope_of, seed_of, tenant_of
from kvconnect.weights import weights_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NONE: Mapping[bytes, bytes] = MappingProxyType({})


def named_by_tokens(groups: Sequence[CacheGroup]) -> bool:
    """Whether blocks go by their tokens: where there is one size of them. Others, and prompts with
    images, go by vLLM's hashes."""
    return len(groups) == 1 and groups[0].is_full


class Names:
    """Names of live requests' blocks. Owned by the scheduler's thread."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._tokens = groups[0].block_tokens if named_by_tokens(groups) else 0
        self._prefixes: dict[str, bytes] = {}
        self._names: dict[str, dict[bytes, bytes]] = {}
        self._adapters: dict[str, bytes] = {}  # what tells them apart, by path
        self._generation = b""

    def wanted(
        self, request: Request, hashes: Sequence[Sequence[bytes]], tokens: tuple[int, int]
    ) -> Wanted:
        """Return what a request could use of its tokens [start, end)."""
        return Wanted(hashes, *tokens, self._prefix(request), self._chain(request, hashes[0]))

    def forget(self, req_id: str) -> None:
        """The request is over."""
        self._prefixes.pop(req_id, None)
        self._names.pop(req_id, None)

    def reset(self, generation: bytes) -> None:
        """Blocks have names of another ``generation`` from now on."""
        self._generation = generation
        self._prefixes.clear()

    def _prefix(self, request: Request) -> bytes:
        """Return tenant and scope of a request, which its keys begin with."""
        known = self._prefixes.get(request.request_id)
        if known is None:
            lora = request.lora_request
            adapter = self._adapter(lora.lora_name, lora.lora_path) if lora else b""
            known = tenant_of(request.cache_salt or "") + scope_of(adapter, self._generation)
            self._prefixes[request.request_id] = known
        return known

    def _adapter(self, name: str, path: str) -> bytes:
        """Return what tells an adapter from others: its weights, where they are files here."""
        known = self._adapters.get(path)
        if known is None:
            known = (weights_digest(Path(path)) or f"{name} {path}").encode()
            self._adapters[path] = known
        return known

    def _chain(self, request: Request, hashes: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return the names of a request's full blocks, by vLLM's hash."""
        if not self._tokens or request.mm_features or request.prompt_token_ids is None:
            return _NONE
        known = self._names.setdefault(request.request_id, {})
        done = len(known)
        if done < len(hashes):
            if done and hashes[done - 1] not in known:  # it has other tokens now
                known.clear()
                done = 0
            parent = known[hashes[done - 1]] if done else seed_of(request.cache_salt or "")
            tokens = request.all_token_ids[done * self._tokens : len(hashes) * self._tokens]
            known.update(zip(hashes[done:], page_names(tokens, self._tokens, parent), strict=True))
        return known
