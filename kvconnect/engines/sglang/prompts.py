"""The identity of an SGLang request's prompt, which both servers of a hand-off must agree on."""

from __future__ import annotations

import re
import secrets
import threading
import time
from array import array
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kvconnect.bounded import remember
from kvconnect.cache.model_identity import adapter_name
from kvconnect.protocol.prompts import PromptIdentity, identify
from kvconnect.timed_calls import TimedCalls

_MOST_ADAPTERS = 4096  # whose digests are kept; others are made again
_LOOK_AGAIN_S = 30.0  # after which files that could not be read may be there
# SGLang appends the size of an elastic expert-parallel engine to a request's extra key.
_OF_THIS_ENGINE = re.compile(r"\|?elastic_ep_size=\d+")


class _ReadAdapter(NamedTuple):
    """What was read of an adapter's files: their digest, "" if that failed; ``at``: when."""

    digest: str
    at: float


class AdapterContents:
    """What the adapters of requests contain, by SGLang's id of each load of an adapter. For the
    scheduler's thread; may block for tens of milliseconds when an adapter is new, or not known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, _ReadAdapter] = {}
        self._call = TimedCalls("kvconnect-adapters")

    def identify(self, lora_id: str, loaded: Any) -> tuple[str, str]:
        """Return an adapter's name and a digest of its files; random if these are not known, as of
        an adapter that was given as tensors, or whose disk does not answer: the other server's may
        be others, and both fail the request as soon as they compare it. ``loaded``: SGLang's
        ``LoRARef``."""
        if loaded is None:
            return "", secrets.token_hex(16)
        with self._lock:
            known = self._known.get(lora_id)
        digest = known.digest if known else ""
        again = known is None or time.monotonic() - known.at >= _LOOK_AGAIN_S
        if not digest and again:
            with suppress(TimeoutError):
                digest = self._call(partial(self._read, lora_id, str(loaded.lora_path)))
        return str(loaded.lora_name), digest or secrets.token_hex(16)

    def _read(self, lora_id: str, path: str) -> str:
        """Return the digest of an adapter's files, "" if they cannot be read now. It is remembered
        also if nobody waits for it any more: a later request must not wait as long again."""
        digest = adapter_name(path)
        found = _ReadAdapter(digest, time.monotonic())
        with self._lock:
            remember(self._known, lora_id, found, _MOST_ADAPTERS)
        return digest


def prompt_identity(
    req: Any, scheduler: Any, adapters: AdapterContents, *, compares_media: bool
) -> PromptIdentity:
    """Return what the KV of SGLang's ``Req`` depends on, except the model.

    Where media are, SGLang writes values made from their hashes into the token ids. The identity
    has these values apart, and only if ``compares_media``: the hashes are those of other servers.
    A request whose KV prefill computes once more has its answer so far in its prompt.
    """
    ids = req.origin_input_ids
    if getattr(req, "pd_rebootstrap_in_progress", False):
        ids = [*ids, *req.output_ids]
    adapter, extra_key = None, req.extra_key or ""
    if req.lora_id is not None:
        extra_key = extra_key.replace(req.lora_id, "")  # a random number in each engine
        manager = scheduler.tp_worker.model_runner.lora_manager
        loaded = manager.lora_refs.get(req.lora_id) if manager is not None else None
        adapter = adapters.identify(req.lora_id, loaded)
    media = req.multimodal_inputs.mm_items if req.multimodal_inputs is not None else ()
    # Earlier versions have the hashes in this list, so they have the same context for a text.
    kinds = ["media"] if media else []
    context = adapter, req.cache_salt, _OF_THIS_ENGINE.sub("", extra_key), kinds
    if not media:
        return identify(ids, context)
    ids, hashes = array("q", ids), str([item.hash for item in media])
    known = hashes.encode() + ids.tobytes() if compares_media else b""
    made = {value for item in media for value in item.padding_values()}
    return identify((-1 if value in made else value for value in ids), context, known)
