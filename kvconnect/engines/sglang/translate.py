"""Translates SGLang's buffer lists into the groups of the hand-off protocol.

Facts that hold for one SGLang version belong in this file. SGLang lists three kinds of buffers:
the KV of each layer, with K apart from V; ``aux``, one row per request with what else decode needs
(the first token, counters); and, for some models, state components such as Mamba states or the
pages of sliding-window layers. The KV, the rows and each state component become one group each,
whose blocks are pages, rows or state slots. So one protocol moves them all.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

from kvconnect import engine_versions
from kvconnect.cache.pages import LayerPages
from kvconnect.disaggregation.agent import WorkerCache
from kvconnect.disaggregation.piecewise_memory import PiecewiseMemory
from kvconnect.disaggregation.sessions import GroupPages
from kvconnect.errors import Incompatible
from kvconnect.protocol.identity import Identity
from kvconnect.protocol.messages import GroupHello, HandoffHello
from kvconnect.protocol.topology import head_range
from kvconnect.transport.base import MemoryRegion
from kvconnect.types import Rank

KV, AUX, FIRST_STATE = 0, 1, 2
"""Group numbers: the KV of all layers, the aux rows, the first of the state components."""

_TAIL, _STATE = "dsa_tail", "mamba"
_MINIMAX = ("minimax_index_k", "minimax_dense_kv")
STATES = (
    *(_STATE, "qsa_pending", "qsa_compressed", "swa", "dsa", _TAIL, *_MINIMAX),
    *("swa_ring", "c128_state", "request_row", "block_scale", "block_scale_swa"),
)
"""State components whose indices are known to be numbers of items, or, of the tail, a row."""

_MOST_FIELD = 1024  # bytes of a format field


@dataclass(frozen=True)
class Model:
    """Facts that SGLang's transfer arguments lack.

    Attributes:
        kv_heads: over all ranks, 1 for MLA.
        layers: of this pipeline stage, [first, end).
        device: -1 for the CPU.
        architecture: digest of the configuration.
        quantization: as weights are loaded, if the checkpoint does not say it.
        scales: digest of the file with those of an 8-bit cache.
        state_dtypes: of recurrent layers' states.
    """

    name: str
    dtype: str
    rank: Rank
    kv_heads: int
    layers: tuple[int, int]
    is_mla: bool
    device: int
    architecture: str = ""
    quantization: str = ""
    scales: str = ""
    state_dtypes: str = ""


class Buffer(NamedTuple):
    """A contiguous tensor of items of equal size: pages, rows or state slots."""

    name: str
    address: int
    nbytes: int
    item_bytes: int


def describe(args: Any, model: Model, identity: Identity) -> WorkerCache:
    """Return the cache that SGLang's ``KVArgs`` describe, for the hand-off agent. ``identity``: the
    weights that the rank has.

    Raises:
        Incompatible: a buffer is not whole pages, the KV buffers are too few or too many, or what
            they list is not all of the cache.
    """
    _check(args)
    kv = tuple(_kv_buffers(args, model))
    aux = tuple(_aux_buffers(args, model.rank))
    states = [tuple(_state_buffers(args, number)) for number in range(len(args.state_types))]
    kinds = (kv, aux, *states)
    places = [[_area(buffer, model, kind is aux) for buffer in kind] for kind in kinds]
    regions = PiecewiseMemory([area for areas in places for area in areas])
    offsets = [[regions.offset(area) for area in areas] for areas in places]

    heads = _heads(model)
    # DeepSeek V4 has pages of fewer rows than tokens: they are never cut.
    whole = model.is_mla and any(buffer.item_bytes % args.page_size for buffer in kv)
    tokens = 1 if whole else args.page_size
    pages: list[GroupPages] = [_pages(kv, offsets[KV], heads, tokens)]
    pages.append(_pages(aux, offsets[AUX], 1, 1))
    groups = [_group(pages[KV], tokens, model.kv_heads, heads), _group(pages[AUX], 1, 1, 1)]
    shares = [_shares(args, number, model.rank.tp) for number in range(len(states))]
    for number, count in enumerate(shares):
        own, at = max(1, count // model.rank.tp), offsets[FIRST_STATE + number]
        if count > 1:
            pages.append(_share_pages(args, number, states[number], at, own, model.rank.tp))
        else:
            pages.append(_pages(states[number], at, 1, 1))
        groups.append(_group(pages[-1], 1, count, own))
    hello = HandoffHello(
        software=f"kvconnect {engine_versions.installed('kvconnect')}",
        engine_id=f"sglang-{secrets.token_hex(8)}",
        epoch=0,
        rank=model.rank,
        identity=identity,
        format=_format(args, model, pages, (aux, *states), shares),
        groups=groups,
    )
    return WorkerCache(hello, pages, regions, regions.device)


def items(state: str, indices: array[int]) -> array[int]:
    """Return the items of a state component that SGLang's ``indices`` name.

    Those of the tail are a row, two runs of its tokens, and its length. The whole row is sent: it
    is the request's own, and the rest of it is not read.
    """
    return indices[:1] if state == _TAIL else indices


class LayerNames(NamedTuple):
    """Names in the hand-off by layer id, without draft layers: of layers' KV, and of their parts of
    a request's state, in group ``state_group``."""

    kv: Mapping[int, Sequence[str]]
    states: Mapping[int, Sequence[str]]
    state_group: int


def layer_names(cache: WorkerCache, args: Any) -> LayerNames:
    """Return the names of layers in the hand-off. States are left out where SGLang does not say of
    which layers they are."""
    groups = cache.hello.groups
    kv = {int(name): (name,) for name in groups[KV].layers if name.isdecimal()}
    states: dict[int, tuple[str, ...]] = {}
    kinds = [kind.value for kind in args.state_types]
    number = kinds.index(_STATE) if _STATE in kinds else 0
    if _STATE in kinds and args.state_layer_ids[number]:
        for name in groups[FIRST_STATE + number].layers:
            layer = int(name.split(".")[1])
            states[layer] = (*states.get(layer, ()), name)
    return LayerNames(kv, states, FIRST_STATE + number)


def _check(args: Any) -> None:
    """Refuse a cache of which SGLang's lists do not say all, or something that is not known."""
    for kind in args.state_types:
        if kind.value not in STATES:
            raise Incompatible(
                f"state component {kind.value!r} of this model's cache is not known to KVConnect: "
                "use one of SGLang's own transfer backends"
            )
    if "fp4" in args.kv_cache_dtype_str and not _has_minimax(args):
        raise Incompatible(
            f"--kv-cache-dtype {args.kv_cache_dtype_str}: SGLang keeps its scales beside the pages "
            "and does not list them for a hand-off: use fp8_e4m3 or mxfp8"
        )


def _kv_buffers(args: Any, model: Model) -> Iterator[Buffer]:
    draft = getattr(args, "num_draft_entries", 0)
    own = len(args.kv_data_ptrs) - draft
    if not args.kv_layer_ids and _is_sorted_by_kind(args):
        if model.rank.pp > 1:
            raise Incompatible("this model's cache is handed off from one pipeline stage only")
        names = [f"kv.{number}" for number in range(own)]
    else:
        ids = list(args.kv_layer_ids)[:own] or _layer_ids(own, model)
        names = [str(layer) for layer in ids]  # MHA has each twice: K, then V
    names += [f"draft.{number}" for number in range(draft)]
    buffers = zip(names, args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True)
    return (Buffer(name, address, nbytes, item) for name, address, nbytes, item in buffers)


def _is_sorted_by_kind(args: Any) -> bool:
    """Whether SGLang lists KV buffers without saying of which layers: DeepSeek V4's are sorted by
    compression; MiniMax's are those of sparse layers, and with sliding windows, of the others."""
    windows = any(kind.value == "swa" for kind in args.state_types)
    return windows or bool(getattr(args, "mla_compression_ratios", None)) or _has_minimax(args)


def _has_minimax(args: Any) -> bool:
    return any(kind.value in _MINIMAX for kind in args.state_types)


def _layer_ids(count: int, model: Model) -> list[int]:
    """Return the layer of each KV buffer where SGLang does not say: all K, then all V (MLA: one
    buffer per layer)."""
    first, end = model.layers
    per_layer = 1 if model.is_mla else 2
    if count != per_layer * (end - first):
        raise Incompatible(
            f"this model's cache has {count} KV buffers for layers {first} to {end}, "
            f"{per_layer} per layer are expected"
        )
    return list(range(first, end)) * per_layer


def _aux_buffers(args: Any, rank: Rank) -> Iterator[Buffer]:
    # Only the last stage knows the first token. Rows of other stages serve only the same stage, so
    # their names include it.
    stage = "" if rank.pp_rank == rank.pp - 1 else f"@{rank.pp_rank}"
    rows = zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)
    for number, (address, nbytes, item_bytes) in enumerate(rows):
        yield Buffer(f"aux.{number}{stage}", address, nbytes, item_bytes)


def _state_buffers(args: Any, number: int) -> Iterator[Buffer]:
    lists = (args.state_data_ptrs, args.state_data_lens, args.state_item_lens)
    ids = args.state_layer_ids[number] if args.state_layer_ids else ()
    kind, seen = args.state_types[number].value, Counter[int]()
    rows = zip(*(each[number] for each in lists), strict=True)
    for place, (address, nbytes, item_bytes) in enumerate(rows):
        layer = ids[place] if ids else place
        if item_bytes:  # SGLang lists layers that share another one's index with empty items
            yield Buffer(f"{kind}.{layer}.{seen[layer]}", address, nbytes, item_bytes)
        seen[layer] += 1


def _shares(args: Any, number: int, tp: int) -> int:
    """Return into how many equal shares a state component can be cut so that each rank of any size
    has whole ones; 1 if SGLang does not say where its parts are, as of Mamba 2."""
    groups = (getattr(args, "state_conv_shard_groups", None) or {number: ()})[number]
    if args.state_types[number].value != _STATE or not any(groups):
        return 1
    sizes: list[int] = []
    for dim, parts in zip(args.state_dim_per_tensor[number], groups, strict=True):
        if not dim or (parts and sum(parts) != dim * tp):
            return 1
        sizes += parts or [dim * tp]
    shares = gcd(*sizes)
    return shares if shares % tp == 0 else 1


def _share_pages(
    args: Any,
    number: int,
    buffers: Sequence[Buffer],
    offsets: Sequence[int],
    shares: int,
    tp: int,
) -> GroupPages:
    """Return where this rank's ``shares`` of a state component are: in each row of each part."""
    dims, outers = args.state_dim_per_tensor[number], args.state_slice_outer_counts[number]
    groups = args.state_conv_shard_groups[number]
    found = []
    for buffer, start, dim, outer, parts in zip(
        buffers, offsets, dims, outers, groups, strict=True
    ):
        step = buffer.item_bytes // (dim * outer)
        offset = start
        for part in [whole // tp for whole in parts or [dim * tp]] * outer:
            row = part * step // shares
            found.append(
                LayerPages(buffer.name, offset, buffer.item_bytes, row, row, shares, 1, row)
            )
            offset += part * step
    return tuple(found)


def _area(buffer: Buffer, model: Model, is_aux: bool) -> MemoryRegion:
    return MemoryRegion(buffer.address, buffer.nbytes, -1 if is_aux else model.device)


def _heads(model: Model) -> int:
    first, end = head_range(model.rank.tp_rank, model.rank.tp, model.kv_heads)
    return end - first


def _pages(
    buffers: Sequence[Buffer], offsets: Sequence[int], heads: int, tokens: int
) -> GroupPages:
    return tuple(
        _layer(buffer, offset, heads, tokens)
        for buffer, offset in zip(buffers, offsets, strict=True)
    )


def _layer(buffer: Buffer, offset: int, heads: int, tokens: int) -> LayerPages:
    """Return a buffer's pages, laid out as [page, token, head]."""
    row, rest = divmod(buffer.item_bytes, heads * tokens)
    if rest or not row or (tokens > 1 and buffer.nbytes % buffer.item_bytes):
        raise Incompatible(
            f"buffer {buffer.name}: {buffer.nbytes} bytes in items of {buffer.item_bytes} are not "
            f"pages of {tokens} tokens with {heads} KV heads each"
        )
    return LayerPages(buffer.name, offset, buffer.item_bytes, row, heads * row, heads, tokens, row)


def _group(pages: GroupPages, tokens: int, kv_heads: int, heads: int) -> GroupHello:
    return GroupHello(
        block_tokens=tokens,
        page_tokens=tokens,
        layers=list(dict.fromkeys(page.name for page in pages)),
        kv_heads=kv_heads,
        heads=heads,
        row_bytes=max((page.row_bytes for page in pages), default=1),
        order="NHC",
        splittable=True,
    )


def _format(
    args: Any,
    model: Model,
    pages: Sequence[GroupPages],
    rows: Sequence[Sequence[Buffer]],
    shares: Sequence[int],
) -> dict[str, str | int]:
    """Return the format fields that must be equal on both sides."""
    sizes = [",".join(str(buffer.item_bytes) for buffer in kind) for kind in rows]
    found: dict[str, str | int] = {
        "model": model.name.rstrip("/").rpartition("/")[2],
        "architecture": model.architecture,
        "dtype": model.dtype,
        "cache_dtype": args.kv_cache_dtype_str,
        "packing": f"sglang {getattr(args, 'kv_layout', None) or 'plain'}",
        "aux_bytes": sizes[0],
    }
    if model.quantization:
        found["quantization"] = _short(model.quantization)
    if model.scales and args.kv_cache_dtype_str.startswith("fp8"):
        found["scales"] = model.scales
    if any(kind.value == _STATE for kind in args.state_types):
        found["state_dtypes"] = model.state_dtypes
    # Rows of layers that are matched by their place alone.
    placed = [page.row_bytes for page in pages[KV] if not page.name.isdecimal()]
    if placed:
        found["placed_rows"] = _short(",".join(map(str, placed)))
    if args.state_types:
        for number, count in enumerate(shares):
            if count > 1:  # layers are matched by name, and their shares do not depend on ranks
                kinds = {page.row_bytes for page in pages[FIRST_STATE + number]}
                sizes[1 + number] = f"{count}x{'/'.join(map(str, sorted(kinds)))}"
        names = (kind.value for kind in args.state_types)
        found["state_bytes"] = _short(";".join(map(":".join, zip(names, sizes[1:], strict=True))))
    if (_is_sorted_by_kind(args) or 1 in shares) and not model.is_mla:
        found["state_tp"] = model.rank.tp  # ranks divide a state, and its parts cannot be divided
    return found


def _short(field: str) -> str:
    """Return a field, or if it is too long for a Hello its beginning and a digest of all of it."""
    if len(field) <= _MOST_FIELD:
        return field
    digest = hashlib.sha256(field.encode()).hexdigest()
    return f"{field[: _MOST_FIELD - len(digest) - 1]} {digest}"
