"""What vLLM's blocks are called below the host tier: by their tokens, so that others find them."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvconnect.engines.model_files import model_name
from kvconnect.engines.vllm.translate import is_of_tokens
from kvconnect.errors import Incompatible
from kvconnect.format import page_names
from kvconnect.plan.below import Wanted
from kvconnect.plan.groups import CacheGroup
from kvconnect.plan.keys import scope_of, seed_of, tenant_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MOST_ADAPTERS = 4096  # remembered; far more than an engine has loaded
_NONE: Mapping[bytes, bytes] = MappingProxyType({})


def named_by_tokens(groups: Sequence[CacheGroup]) -> bool:
    """Whether blocks go by their tokens: where there is one size of them. Others, and prompts with
    images or embeddings, go by vLLM's hashes."""
    return len(groups) == 1 and groups[0].is_full


class Names:
    """Names of live requests' blocks. Owned by the scheduler's thread."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._tokens = groups[0].block_tokens if named_by_tokens(groups) else 0
        self._prefixes: dict[str, bytes] = {}
        self._names: dict[str, dict[bytes, bytes]] = {}
        # What tells them apart, by name, number and path: vLLM numbers what it loads anew.
        # Only those used last. The files of one that was forgotten may be others by now than those
        # that were loaded, so from then on its blocks are for this engine alone.
        self._forgotten = 0  # the highest number of one
        self._adapters: OrderedDict[tuple[str, int, str], bytes] = OrderedDict()
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
            adapter = self._adapter(lora) if lora else b""
            known = tenant_of(request.cache_salt or "") + scope_of(adapter, self._generation)
            self._prefixes[request.request_id] = known
        return known

    def _adapter(self, lora: LoRARequest) -> bytes:
        """Return what tells an adapter from others: its files. Without any that can be read, it is
        told from all that other engines have."""
        loaded = lora.lora_name, lora.lora_int_id, lora.lora_path
        known = self._adapters.get(loaded)
        if known is None:
            try:
                if lora.lora_int_id <= self._forgotten:
                    raise Incompatible("it was not used for long")
                known = model_name(lora.lora_path, None, {}, "adapter_config.json").encode()
            except (Incompatible, OSError) as error:
                logger.warning("blocks of adapter %s are for this engine alone: %s", loaded, error)
                known = os.urandom(16)
            self._adapters[loaded] = known
            if len(self._adapters) > MOST_ADAPTERS:
                (_, number, _), _ = self._adapters.popitem(last=False)
                self._forgotten = max(self._forgotten, number)
        self._adapters.move_to_end(loaded)
        return known

    def _chain(self, request: Request, hashes: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return the names of a request's full blocks, by vLLM's hash."""
        if not self._tokens or request.mm_features or not is_of_tokens(request):
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
