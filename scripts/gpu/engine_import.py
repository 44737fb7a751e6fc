"""Says which parts of vLLM load with this torch: python -m scripts.gpu.engine_import [--dry]

It imports what a dense model needs, then looks up each name of torch that the loaded modules
mention. With ``--dry`` and vLLM's CUDA build, a driver and a platform are pretended, and a model is
made without its weights' memory. An engine for CPUs has none of the device's parts.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

PARTS = (
    *("vllm", "kvconnect.engines.vllm.connector", "kvconnect.engines.vllm.tracing"),
    *("vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.core.sched.async_scheduler"),
    "vllm.v1.executor.uniproc_executor",
)
DEVICE_PARTS = (
    *("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._custom_ops"),
    *("vllm.v1.attention.backends.triton_attn", "vllm.v1.attention.backends.flash_attn"),
    "vllm.vllm_flash_attn._vllm_fa3_C",
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"),
    *("vllm.v1.worker.gpu.model_runner", "vllm.compilation.backends"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.models.qwen3"),
    "vllm.model_executor.model_loader.dummy_loader",
)
GUARDED = {
    "torch.accelerator.empty_host_cache": "called in a try",
    "torch._guards._TLS.tracing_context": "set by torch while it compiles",
    "torch.classes.xielu.XIELU": "a package of its own",
}
"""Names that vLLM does without."""


def attempt(act: Callable[[], object]) -> str:
    """Return "loads", or why something does not."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - whatever it is, the report has it
        return f"{type(error).__name__}: {error}"
    return "loads"


def missing_names() -> dict[str, str]:
    """Return the names of torch that loaded modules of vLLM mention and that are not there, with
    one place each."""
    missing: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if name.partition(".")[0] == "vllm" and path.endswith(".py"):
            for text, line in names_of_torch(Path(path).read_text()):
                if text not in missing and text not in GUARDED and not is_there(text):
                    missing[text] = f"{name}:{line}"
    return missing


def names_of_torch(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            is_name = all(part.isidentifier() for part in text.split("."))
            if is_name and text.startswith("torch.") and not text.startswith("torch.ops."):
                yield text, node.lineno


def is_there(text: str) -> bool:
    found: object = sys.modules["torch"]
    for part in text.split(".")[1:]:
        try:
            found = getattr(found, part)
        except (AttributeError, ImportError, RuntimeError):
            return False
    return True


def make_model() -> None:
    """Make the configuration and the model of ``tests.gpu.engine`` on torch's device "meta"."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from tests.gpu.engine import settings

    with tempfile.TemporaryDirectory() as folder:
        config = EngineArgs(**settings(Path(folder))).create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, backend="gloo")
            initialize_model_parallel(1)
            with torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
                initialize_model(config)
            for layer in config.compilation_config.static_forward_context.values():
                layer.get_kv_cache_spec(config)


def has_device_parts(folder: Path) -> bool:
    return any(folder.glob("_C_stable_libtorch*.so"))


def main() -> int:
    dry = "--dry" in sys.argv[1:]
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    folder = Path(spec.origin).parent
    cuda = not dry or has_device_parts(folder)
    found = {}
    if dry and cuda:
        from scripts.gpu.without_device import pretend_device

        found["stand-ins"] = attempt(lambda: pretend_device(folder))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    for name in (*PARTS, *DEVICE_PARTS) if cuda else PARTS:
        found[name] = attempt(lambda name=name: load(name))
    if dry and cuda:
        found["a model without weights"] = attempt(make_model)
    missing = missing_names()
    print(json.dumps({**found, "names_missing_in_torch": missing}), flush=True)
    return int(set(found.values()) != {"loads"} or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
