"""Maps decode ranks to the prefill ranks they read from, when parallelism differs.

Tensor parallel ranks share the KV heads evenly. With more ranks than heads, ``tp / kv_heads``
neighbouring ranks hold the same head; with MLA, all ranks hold its one head. Pipeline stages share
the layers, which are matched by name, so every stage is asked.

For example with 4 heads, 2 decode ranks and 8 prefill ranks::

    heads on prefill ranks   0 0 1 1 2 2 3 3
    decode rank 0 (heads 0, 1) reads from ranks 0 and 2, decode rank 1 from ranks 4 and 6
"""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.errors import Refused
from kvconnect.types import Rank


def head_range(tp_rank: int, tp: int, kv_heads: int) -> tuple[int, int]:
    """Return (first, end) of the KV heads that a tensor parallel rank holds.

    Raises:
        Refused: field ``kv_heads``, the ranks cannot share the heads evenly.
    """
    if max(tp, kv_heads) % min(tp, kv_heads):
        raise Refused(
            "kv_heads",
            f"{kv_heads} KV heads over tensor_parallel_size {tp}: one must divide the other",
        )
    if tp > kv_heads:
        head = tp_rank * kv_heads // tp
        return head, head + 1
    per_rank = kv_heads // tp
    return tp_rank * per_rank, (tp_rank + 1) * per_rank


def serving_rank(head: int, reader: Rank, tp: int, kv_heads: int) -> int:
    """Return the tensor parallel rank, of a source with ``tp`` of them, that serves ``head`` to
    ``reader``: of those that hold it, the one whose place is nearest to the reader's own. So the
    readers spread over the replicas, and one reader meets the same source in every group.
    """
    head_range(0, tp, kv_heads)  # or there is no such rank
    if tp <= kv_heads:
        return head // (kv_heads // tp)
    replicas = tp // kv_heads
    nearest = reader.tp_rank * tp // reader.tp
    return min(max(nearest, head * replicas), (head + 1) * replicas - 1)


def served_heads(reader: Rank, source: Rank, kv_heads: int) -> tuple[int, int]:
    """Return (first, end) of the heads that ``source`` serves to ``reader``; (0, 0) if none."""
    first, end = head_range(reader.tp_rank, reader.tp, kv_heads)
    # Consecutive ones, because a later head is never served by an earlier rank.
    ranks = ((head, serving_rank(head, reader, source.tp, kv_heads)) for head in range(first, end))
    served = [head for head, rank in ranks if rank == source.tp_rank]
    return (served[0], served[-1] + 1) if served else (0, 0)


def sources_for(
    reader: Rank, tp: int, pp: int, kv_heads_per_group: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (pp_rank, tp_rank), ascending, of the workers that ``reader`` must read from.

    ``tp`` and ``pp`` are the source engine's sizes. Together the workers serve every head of
    every group to the reader exactly once per layer.

    Raises:
        Refused: field ``kv_heads``, a group's heads cannot be shared evenly on one of the sides.
    """
    tp_ranks = set[int]()
    for kv_heads in kv_heads_per_group:
        first, end = head_range(reader.tp_rank, reader.tp, kv_heads)
        tp_ranks |= {serving_rank(head, reader, tp, kv_heads) for head in range(first, end)}
    return [(pp_rank, tp_rank) for pp_rank in range(pp) for tp_rank in sorted(tp_ranks)]


def readers_for(
    source: Rank, tp: int, pp: int, kv_heads_per_group: Sequence[int]
) -> frozenset[Rank]:
    """Return the workers of a reading engine, with ``tp`` and ``pp`` of them, that must read from
    ``source``: the other direction of :func:`sources_for`. Of two pipelines of the same length
    each stage reads from its like.

    Raises:
        Refused: as :func:`sources_for`.
    """
    stages = (source.pp_rank,) if pp == source.pp else range(pp)
    place = (source.pp_rank, source.tp_rank)
    readers = (Rank(tp_rank, tp, pp_rank, pp) for pp_rank in stages for tp_rank in range(tp))
    return frozenset(
        reader
        for reader in readers
        if place in sources_for(reader, source.tp, source.pp, kv_heads_per_group)
    )
