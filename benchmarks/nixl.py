"""vLLM's ``NixlConnector``, as it is but for one thing: its agent sleeps between polls.

NIXL's Python API starts each agent with a thread that polls without pause: one core per engine,
busy or not. On a machine with cores to spare that costs no time; where the engines' own work needs
them, prefill takes longer, and a comparison would say more about the machine than about hand-off.

Engines load this with ``kv_connector_module_path``.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM does before it loads NIXL

from nixl._bindings import nixlAgentConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

__all__ = ["NixlConnector"]

POLL_US = 1000

_delay = nixlAgentConfig.pthrDelay


def _set_delay(config: Any, _: int) -> None:
    _delay.fset(config, POLL_US)


nixlAgentConfig.pthrDelay = property(_delay.fget, _set_delay)
