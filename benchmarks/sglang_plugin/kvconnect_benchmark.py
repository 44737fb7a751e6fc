"""An SGLang plugin: its built-in transfer backends as they are, but for what a CPU needs.

NIXL: the KV cache is host memory here, though SGLang registers it as a GPU's; and the agent sleeps
between polls, as in ``benchmarks/nixl.py``, where the reason stands. Mooncake: the sender takes
page numbers from page-locked memory, which needs CUDA.
"""

from __future__ import annotations

import contextlib
from typing import Any

POLL_US = 1000


def register() -> None:
    _patch_nixl()
    with contextlib.suppress(ImportError):
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        MooncakeKVSender.supports_host_tensor_indices = False


def _patch_nixl() -> None:
    from nixl._api import nixl_agent
    from nixl._bindings import nixlAgentConfig

    delay, init = nixlAgentConfig.pthrDelay, nixl_agent.__init__

    def set_delay(config: Any, _: int) -> None:
        delay.fset(config, POLL_US)

    def host_memory(agent: Any, *args: Any, **named: Any) -> None:
        init(agent, *args, **named)
        agent.nixl_mems["VRAM"] = agent.nixl_mems["cuda"] = agent.nixl_mems["DRAM"]

    nixlAgentConfig.pthrDelay = property(delay.fget, set_delay)
    nixl_agent.__init__ = host_memory
