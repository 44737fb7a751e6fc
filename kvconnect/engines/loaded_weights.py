"""What a worker knows of its model's weights, from the start on and after each update."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from hashlib import blake2b

import msgspec
import torch

from kvconnect.protocol.identity import Weights

logger = logging.getLogger(__name__)

_SAMPLE_BYTES = 4096
_SAMPLES = 4096  # over all parameters: 16 MiB, in which a change of 1 % of the weights shows

Parameters = Callable[[], Iterable[torch.Tensor] | None]
"""Returns a model's parameters, always in the same order; None while their memory is gone, and no
parameters if the engine moves them about, so that they cannot be compared."""


class LoadedWeights:
    """One model's weights on one worker. Owned by the thread that runs the model.

    ``start``: what is known of the weights that the engine starts with. The methods read a sample
    of the parameters, which takes tens of milliseconds.
    """

    def __init__(self, start: Weights, parameters: Parameters) -> None:
        self.known = start
        self._parameters = parameters
        self._started = False
        self._declared = ""  # the version of the weights, by who updated them

    def start(self) -> None:
        """Read the parameters that the engine starts with. Idempotent."""
        if not self._started:
            self._started = True
            self.known = msgspec.structs.replace(self.known, parameters=self._digest() or "")

    def look(self, version: str = "") -> None:
        """The weights may have changed; ``version``: they are declared to have it. What is known of
        them stays if the parameters are the same. If these cannot be compared, only declared
        versions count."""
        found, before = self._digest(), self.known
        if found is not None and not (found and found == before.parameters):
            if found and before.parameters:  # the weights are others
                self._declared = ""
            self.known = Weights(version=self._declared, parameters=found)
        if version:
            self._declared = version
            self.known = msgspec.structs.replace(self.known, version=version)
        if self.known == Weights() != before:
            logger.warning(
                "the model's parameters cannot be compared with former ones, so its weights are "
                "unknown from this reset on: declare their version on all engines, to hand off and "
                "to find stored blocks again"
            )

    def updating(self) -> None:
        """Parts of the weights are replaced: nothing is known of them."""
        self.known, self._declared = Weights(), ""

    def updated(self, *, files: str = "", version: str = "") -> None:
        """All weights have been replaced, by those of files or of a declared version."""
        parameters, self._declared = self._digest() or "", version
        self.known = Weights(files=files, version=version, parameters=parameters)

    def _digest(self) -> str | None:
        try:
            parameters = self._parameters()
            return None if parameters is None else parameters_digest(parameters)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            logger.warning("the model's parameters cannot be read (%s)", error)
            return ""


def generation_of(start: Weights, now: Weights) -> bytes:
    """Return what separates blocks of an engine's present weights from those of others in secondary
    tiers: empty for the weights that it started with. Unknown weights are like no others."""
    names = ("files", "parameters") if not now.files else ("files",)
    if any(getattr(now, name) and getattr(now, name) == getattr(start, name) for name in names):
        return b""
    known = now.files or now.version or now.parameters
    return blake2b(known.encode(), digest_size=16).digest() if known else os.urandom(16)


def parameters_digest(parameters: Iterable[torch.Tensor]) -> str:
    """Return a digest of the types, shapes and evenly spaced bytes of parameters; "" if there are
    none. Their names do not count, since adapters change them."""
    tensors = [tensor for tensor in parameters if tensor.numel()]
    if not tensors:
        return ""
    found = blake2b(digest_size=16)
    areas = [_bytes(tensor.detach()) for tensor in tensors]
    step = max(_SAMPLE_BYTES, sum(area.numel() for area in areas) // _SAMPLES)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    for device in dict.fromkeys(area.device for area in areas):
        samples = [_samples(area, step) for area in areas if area.device == device]
        found.update(torch.cat(samples).cpu().numpy().data)  # one copy from the device
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that a tensor spans as uint8 ``[bytes]``, without copying."""
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    area = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    first, size = tensor.storage_offset() * tensor.element_size(), tensor.element_size()
    return area.set_(tensor.untyped_storage(), first, (span * size,), (1,))


def _samples(area: torch.Tensor, step: int) -> torch.Tensor:
    """Return the first bytes of every ``step`` bytes."""
    whole = area[: area.numel() // step * step].view(-1, step)[:, :_SAMPLE_BYTES].reshape(-1)
    return torch.cat((whole, area[area.numel() // step * step :][:_SAMPLE_BYTES]))
