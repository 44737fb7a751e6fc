"""KVConnect for SGLang: a plugin that SGLang loads by itself; see the README.

Nothing here imports SGLang or torch before :func:`register` is called.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from kvconnect import engine_versions
from kvconnect.engines.sglang import memory_release, token_checks, weights
from kvconnect.engines.sglang.plugin import LAYERWISE, NAME, check, is_layerwise, takes_over

logger = logging.getLogger(__name__)

TESTED = engine_versions.TESTED_SGLANG
_PICK = "sglang.srt.disaggregation.utils.get_kv_class"
_VALIDATE = "sglang.srt.arg_groups.validation_hook.check_server_args"


def register() -> None:
    """Register the transfer backend with SGLang; the ``sglang.srt.plugins`` entry point.

    SGLang calls this in every process it starts, possibly more than once; only the first call
    counts. An error is logged in one line, not raised: SGLang would swallow it.
    """
    try:
        _register()
    # SGLang's internals are not stable: any name or signature may have changed.
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        logger.error(
            "kvconnect is not available: SGLang %s was found, %s is supported (%s: %s)",
            engine_versions.installed("sglang"),
            TESTED,
            type(error).__name__,
            error,
        )


@functools.cache
def _register() -> None:
    from sglang.srt.arg_groups.choices import (
        DISAGG_TRANSFER_BACKEND_CHOICES,
        add_disagg_transfer_backend_choices,
    )
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvconnect.engines.sglang import hooks  # imports torch

    found = engine_versions.installed("sglang")
    if found != TESTED:
        logger.warning("kvconnect was tested with SGLang %s, this is %s", TESTED, found)
    HookRegistry.register(_VALIDATE, check, HookType.BEFORE)  # first: the rest may raise
    if NAME not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([NAME])
    _add_member(TransferBackend, NAME)
    HookRegistry.register(_PICK, _pick, HookType.AROUND)
    weights.watch()
    memory_release.watch()
    token_checks.watch()
    hooks.watch()
    if is_layerwise():
        from kvconnect.engines.sglang import layerwise

        HookRegistry.register(layerwise.RUN_BATCH, layerwise.around_run_batch, HookType.AROUND)
        for attention in layerwise.ATTENTION:
            HookRegistry.register(attention, layerwise.around_attention, HookType.AROUND)
    logger.info(
        "kvconnect %s: transfer backend %r is available, layer-wise push is %s",
        engine_versions.installed("kvconnect"),
        NAME,
        "on" if is_layerwise() else f"off ({LAYERWISE}=1 turns it on)",
    )


def _add_member(kinds: Any, name: str) -> None:
    """Add a member to SGLang's enum of transfer backends, for which SGLang has no function."""
    if name in kinds._value2member_map_:
        return
    label = name.upper()
    member = object.__new__(kinds)
    member._name_, member._value_, member.__objclass__ = label, name, kinds
    member._sort_order_ = len(kinds._member_names_)
    kinds._member_map_[label] = member
    kinds._member_names_.append(label)
    kinds._value2member_map_[name] = member
    type.__setattr__(kinds, label, member)
    if kinds(name) is not member:
        raise TypeError(f"{kinds.__name__} takes no further members")


def _pick(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Hook around SGLang's choice of classes: KVConnect's for its name or a ``nixl`` taken over."""
    if transfer_backend.value != NAME and not (transfer_backend.value == "nixl" and takes_over()):
        return original(transfer_backend, class_type)
    from kvconnect.engines.sglang.backend import CLASSES

    return CLASSES.get(class_type.name) or original(transfer_backend, class_type)
