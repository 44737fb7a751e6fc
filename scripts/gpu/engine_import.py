"""Says which parts of vLLM load with this torch: python -m scripts.gpu.engine_import [--dry]

With ``--dry``, it is enough that vLLM and KVConnect's part in it load: an engine for CPUs has none
of the other parts.
"""

from __future__ import annotations

import importlib
import json
import sys

PARTS = ("vllm", "kvconnect.engines.vllm.connector", "vllm.v1.engine.llm_engine")
DEVICE_PARTS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


def load(name: str) -> str:
    """Return "loads", or why a module does not."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever it is, the report has it
        return f"{type(error).__name__}: {error}"
    return "loads"


def main() -> int:
    parts = PARTS if "--dry" in sys.argv[1:] else (*PARTS, *DEVICE_PARTS)
    found = {name: load(name) for name in parts}
    print(json.dumps(found), flush=True)
    return int(set(found.values()) != {"loads"})


if __name__ == "__main__":
    sys.exit(main())
