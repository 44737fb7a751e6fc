"""Names of blocks in the secondary tiers, made from tokens so that other engines find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.keys import scope_of, seed_of, tenant_of
from kvconnect.cache.record_format import page_names
from kvconnect.engines.vllm.adapters import Adapters
from kvconnect.engines.vllm.translate import is_of_tokens
from kvconnect.errors import ConfigError
from kvconnect.settings import Settings
from kvconnect.tiers import LookupRequest
from kvconnect.tiers.peers.pages import pages_per_block

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NONE: Mapping[bytes, bytes] = MappingProxyType({})


def named_by_tokens(groups: Sequence[CacheGroup]) -> bool:
    """Return whether blocks are named by their tokens: if there is one full-attention group. Other
    blocks, and those of prompts with images or embeddings, are named by vLLM's hashes."""
    return len(groups) == 1 and groups[0].is_full


def shared_pages(settings: Settings, groups: Sequence[CacheGroup]) -> int:
    """Return in how many pages peers read a block.

    Raises:
        ConfigError: ``page_tokens`` does not divide the block, or its parts have no names.
    """
    if settings.cache_peers is None:
        return 1
    asked = settings.cache_peers.page_tokens
    if asked and not named_by_tokens(groups):
        fix = "remove it: only blocks of one full-attention group can be shared by pages"
        raise ConfigError("page_tokens", asked, fix)
    return pages_per_block(asked, groups[0].block_tokens)


class BlockNames:
    """Names of the blocks of live requests, and of the ``pages`` pages of each block if there are
    several. Owned by the scheduler's thread."""

    def __init__(self, groups: Sequence[CacheGroup], adapters: Adapters, pages: int = 1) -> None:
        self._adapters = adapters
        self._tokens = groups[0].block_tokens if named_by_tokens(groups) else 0
        self._pages = pages
        self._prefixes: dict[str, tuple[bool, bytes]] = {}  # with whether it is one with media
        self._names: dict[str, dict[bytes, bytes]] = {}
        self._page_names: dict[str, dict[bytes, Sequence[bytes]]] = {}
        self._generation = b""

    def wanted(
        self, request: Request, hashes: Sequence[Sequence[bytes]], start: int, end: int
    ) -> LookupRequest:
        """Return the lookup of a request's tokens [start, end)."""
        names = self._chain(request, hashes[0])
        wanted = LookupRequest(hashes, start, end, self._prefix(request), names)
        if self._pages == 1:
            return wanted
        return wanted._replace(page_names=self._page_names.get(request.request_id, {}))

    def forget(self, req_id: str) -> None:
        """Drop the names of a finished request."""
        self._prefixes.pop(req_id, None)
        self._names.pop(req_id, None)
        self._page_names.pop(req_id, None)

    def reset(self, generation: bytes) -> None:
        """Use another ``generation`` of weights in all keys from now on."""
        self._generation = generation
        self._prefixes.clear()

    def _prefix(self, request: Request) -> bytes:
        """Return a request's tenant and scope, the start of its keys."""
        has_media = bool(request.mm_features)  # a session may get some later
        known = self._prefixes.get(request.request_id)
        if known is None or known[0] != has_media:
            lora = request.lora_request
            adapter = self._adapters.scope(lora) if lora else b""
            media = self._adapters.settings.media if has_media else b""
            scope = scope_of(adapter, self._generation, media)
            known = has_media, tenant_of(request.cache_salt or "") + scope
            self._prefixes[request.request_id] = known
        return known[1]

    def _chain(self, request: Request, hashes: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return the names of a request's full blocks, by vLLM's hash; empty to use the hashes."""
        if not self._tokens or request.mm_features or not is_of_tokens(request):
            return _NONE
        known = self._names.setdefault(request.request_id, {})
        done = len(known)
        if done < len(hashes):
            if done and hashes[done - 1] not in known:  # the tokens have changed
                known.clear()
                done = 0
            seed = seed_of(request.cache_salt or "")
            parent = known[hashes[done - 1]] if done else seed
            tokens = request.all_token_ids[done * self._tokens : len(hashes) * self._tokens]
            known.update(zip(hashes[done:], page_names(tokens, self._tokens, parent), strict=True))
            if self._pages > 1:
                pages = self._page_names.setdefault(request.request_id, {})
                parent = pages[hashes[done - 1]][-1] if done else seed
                names = page_names(tokens, self._tokens // self._pages, parent)
                blocks = zip(*[iter(names)] * self._pages, strict=True)
                pages.update(zip(hashes[done:], blocks, strict=True))
        return known
