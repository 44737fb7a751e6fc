"""What ranks do alike: those that have parts of the same pages, and those that attach storage.

SGLang's scheduler calls storage backends on all of these ranks at the same point. What is here
waits for all of them, so it is for the scheduler's thread, and for such points only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from sglang.srt.runtime_context import get_parallel

from kvconnect.errors import Incompatible, KVConnectError, contained

_T = TypeVar("_T")


def of_all_ranks(own: _T) -> list[_T]:
    """Return what each rank has passed, in the same order on all of them."""
    parallel, found = get_parallel(), [own]
    for size, group in (
        (parallel.attn_cp_size, "attn_cp_group"),
        (parallel.attn_tp_size, "attn_tp_group"),
    ):
        if size > 1:
            lists: list[list[_T]] = [[]] * size
            cpu_group = getattr(parallel, group).cpu_group
            torch.distributed.all_gather_object(lists, found, group=cpu_group)
            found = [each for some in lists for each in some]
    return found


def of_all_attaching(own: _T) -> list[_T]:
    """Return what each rank has passed that attaches storage together with this one."""
    parallel = get_parallel()
    if max(parallel.attn_cp_size, parallel.attn_tp_size, parallel.pp_size) == 1:
        # SGLang makes no groups then. Another data-parallel rank may be busy, and not attach.
        return [own]
    # SGLang makes its groups on all ranks of the world. One that comes alone waits for ever.
    world = parallel.world_group
    lists: list[_T] = [own] * world.world_size
    torch.distributed.all_gather_object(lists, own, group=world.cpu_group)
    return lists


@contextmanager
def on_all_or_none() -> Iterator[None]:
    """Raise on every rank that attaches storage if the work inside raises on one.

    Raises:
        Incompatible: it has raised on another rank; the message says what.
    """
    errors: list[Exception] = []
    with contained(errors.append):
        yield
    own = "".join(map(_line, errors))
    others = [why for why in of_all_attaching(own) if why]
    if errors:
        raise errors[0]
    if others:
        raise Incompatible(f"{others[0]} (on another rank)")


def _line(error: Exception) -> str:
    known = isinstance(error, KVConnectError) and str(error)
    return known or f"{type(error).__name__}: {error}"
