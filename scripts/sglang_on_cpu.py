"""Stands in for what SGLang imports, and never calls, on a machine without a GPU.

``scripts/setup`` copies this into SGLang's environment, with a ``.pth`` file that starts it:

- torchvision's ordinary wheel is linked with CUDA. Its Python half describes two operators that its
  library, which cannot load beside a CPU torch, would have declared. They are declared when it is
  imported.
- Rotary embeddings take the name of a CUDA kernel from vLLM; computing on the CPU, they do not use
  it.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys

_SIGNATURE = "{}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_KERNELS = "vllm._custom_ops"
_kept = []  # a declaration lasts as long as its library


class _Declares(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators, and lets others find it."""

    def find_spec(self, name, *_):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library(name, "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(_SIGNATURE.format(operator))
            _kept.append(library)
        return None


class _HasNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``vllm._custom_ops`` where there is no vLLM."""

    def find_spec(self, name, *_):
        if name not in ("vllm", _KERNELS):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name == "vllm")

    def exec_module(self, module):
        if module.__name__ == _KERNELS:
            module.rotary_embedding = _no_kernel


def _no_kernel(*_):
    raise NotImplementedError("a CUDA kernel was called in an environment without a GPU")


if not importlib.metadata.version("torchvision").endswith("+cpu"):
    sys.meta_path.insert(0, _Declares())
sys.meta_path.append(_HasNames())
