"""Negotiates layers, heads, wire blocks and their order between two workers, before pages move.

Both sides call :func:`negotiate` with the same two greetings and get the same result, so only the
greetings are sent. If the caches do not match, the error names the field, both values and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnect.errors import Misuse, Refused
from kvconnect.protocol.codec import common_protocol
from kvconnect.protocol.hello import REFUSAL_FIELDS
from kvconnect.protocol.identity import MIX, other_weights
from kvconnect.protocol.messages import GroupHello, HandoffHello, Order
from kvconnect.protocol.topology import head_range, served_heads

_NAMES = ("on the decode side", "on the prefill side")
_SAME_CACHE = "serve the same model with the same KV-cache type on both"
_MOST_NAMED = 3  # layers named in an error message


@dataclass(frozen=True)
class GroupAgreement:
    """How one KV-cache group moves between two workers.

    Attributes:
        wire_tokens: tokens per wire block, the smaller of both page sizes.
        reader_ratio, source_ratio: wire blocks per block of that side's block table.
        layers: names of the layers to move, in wire order; empty if this pair moves none.
        heads: (first, end) of the model's KV heads to move; (0, 0) without layers.
        order: order of heads and tokens within one layer of a wire block.
    """

    wire_tokens: int
    reader_ratio: int
    source_ratio: int
    layers: tuple[str, ...]
    heads: tuple[int, int]
    order: Order


@dataclass(frozen=True)
class Agreement:
    """Result of a negotiation. ``units[u]`` is unit u's group and its index in the group's
    ``layers``, or None for all layers of the group. ``mixed_weights``: which weights both sides
    have if they mix other ones on purpose; else empty."""

    protocol: int
    features: frozenset[str]
    groups: tuple[GroupAgreement, ...]
    mixed_weights: str = ""
    units: tuple[tuple[int, int | None], ...] = field(init=False)
    _numbers: dict[tuple[int, int | None], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        units = tuple(
            (number, layer)
            for number, group in enumerate(self.groups)
            if group.layers
            for layer in (None, *range(len(group.layers)))
        )
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "_numbers", {unit: n for n, unit in enumerate(units)})

    def unit(self, group: int, layer: int | None = None) -> int:
        """Return the unit of one layer (index in ``layers``) of a group, or of all its layers.

        Raises:
            Misuse: that group or layer does not move.
        """
        number = self._numbers.get((group, layer))
        if number is None:
            raise Misuse(f"no unit for layer {layer} of group {group}")
        return number


def negotiate(reader: HandoffHello, source: HandoffHello) -> Agreement:
    """Return the agreement between the worker that reads and the worker that it reads from.

    Software versions, and features that one side does not know, never cause a refusal. If several
    source ranks hold a head, the one that ``topology.sources_for`` picks serves it.

    A group without layers is served by other workers of the source. That may be so for all groups:
    stages of two pipelines may share no layer, and a replica that serves other readers may be told
    which transfers it need not wait for.

    Raises:
        Refused: ``field`` names the mismatch, one of ``REFUSAL_FIELDS``.
    """
    protocol = common_protocol(reader.protocol, source.protocol, _NAMES)
    _match_formats(reader, source)
    mixed = _match_weights(reader, source)
    _match("groups", len(reader.groups), len(source.groups), "use the same model configuration")
    groups = tuple(_match_group(n, reader, source) for n in range(len(reader.groups)))
    _check_something_moves(reader, source, groups)
    features = frozenset(reader.features) & frozenset(source.features)
    return Agreement(protocol, features, groups, mixed)


def _match(what: str, ours: object, theirs: object, fix: str, where: str = "") -> None:
    """Raise :class:`Refused` for the field ``what`` unless both values are equal."""
    if ours != theirs:
        raise _mismatch(what, ours, theirs, fix, where)


def _mismatch(what: str, ours: object, theirs: object, fix: str, where: str = "") -> Refused:
    values = f"{ours!r} {_NAMES[0]}, {theirs!r} {_NAMES[1]}"
    return Refused(
        what if what in REFUSAL_FIELDS else "format", f"{where}{what} is {values}: {fix}"
    )


def _match_formats(reader: HandoffHello, source: HandoffHello) -> None:
    for key in sorted(reader.format.keys() | source.format.keys()):
        fix = f"start both engines with the same {key}"
        _match(key, reader.format.get(key), source.format.get(key), fix)  # None: not sent


def _match_weights(reader: HandoffHello, source: HandoffHello) -> str:
    """Return both sides' weights if they are others and both mean to mix them, else "".

    Raises:
        Refused: the weights are others, or cannot be compared.
    """
    ours, theirs = reader.identity, source.identity
    found = other_weights(ours, theirs, same_part=reader.rank == source.rank)
    if found is None:
        return ""
    if ours.mixes_weights and theirs.mixes_weights:
        return f"{found[0]!r} {_NAMES[0]}, {found[1]!r} {_NAMES[1]}"
    fix = (
        "serve the same files on both, or declare the same weight version after an update; "
        f"to mix weights on purpose, set {MIX} on both"
    )
    ours_are, theirs_are = found
    raise _mismatch("weights", ours_are, theirs_are, fix)


def _match_group(number: int, reader: HandoffHello, source: HandoffHello) -> GroupAgreement:
    ours, theirs = reader.groups[number], source.groups[number]
    where = f"group {number}: "
    for name in ("window", "chunk", "kv_heads"):
        _match(name, getattr(ours, name), getattr(theirs, name), _SAME_CACHE, where)
    _match_rows(where, ours, theirs)
    for side, group in ((reader, ours), (source, theirs)):
        _check_heads(where, side, group)
    wire_tokens = _wire_tokens(where, ours, theirs)
    heads = served_heads(reader.rank, source.rank, ours.kv_heads)
    order: Order = "NHC" if ours.order == theirs.order == "NHC" else "HNC"
    layers = _common_layers(where, reader, source, number) if heads != (0, 0) else ()
    for group in (ours, theirs) if layers else ():
        _check_cut(where, group, wire_tokens, heads, order)
    return GroupAgreement(
        wire_tokens=wire_tokens,
        reader_ratio=ours.block_tokens // wire_tokens,
        source_ratio=theirs.block_tokens // wire_tokens,
        layers=layers,
        heads=heads if layers else (0, 0),
        order=order,
    )


def _match_rows(where: str, ours: GroupHello, theirs: GroupHello) -> None:
    """Refuse layers whose rows differ in size. Stages of a pipeline may have different layers, so
    only those that both sides have are compared."""
    if not (ours.layer_row_bytes or theirs.layer_row_bytes):
        _match("row_bytes", ours.row_bytes, theirs.row_bytes, _SAME_CACHE, where)
        return
    rows, other = _rows(where, ours), _rows(where, theirs)
    for layer in sorted(rows.keys() & other.keys()):
        there = f"{where}layer {layer}: "
        _match("row_bytes", rows[layer], other[layer], _SAME_CACHE, there)


def _rows(where: str, group: GroupHello) -> dict[str, int]:
    """Return the bytes of a row by layer."""
    sizes = group.layer_row_bytes or [group.row_bytes] * len(group.layers)
    if len(sizes) != len(group.layers):
        raise Refused("row_bytes", f"{where}{len(sizes)} sizes for {len(group.layers)} layers")
    return dict(zip(group.layers, sizes, strict=True))


def _check_heads(where: str, side: HandoffHello, group: GroupHello) -> None:
    """Refuse a rank without its tensor parallel share of heads, as with context parallelism."""
    first, end = head_range(side.rank.tp_rank, side.rank.tp, group.kv_heads)
    if group.heads != end - first:
        raise Refused(
            "heads",
            f"{where}engine {side.engine_id!r} has {group.heads} KV heads on one of {side.rank.tp} "
            f"ranks, {end - first} are expected: use tensor and pipeline parallelism only",
        )


def _wire_tokens(where: str, ours: GroupHello, theirs: GroupHello) -> int:
    for name in ("block_tokens", "page_tokens"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if max(here, there) % min(here, there):
            raise _mismatch(
                name, here, there, "choose block sizes of which one divides the other", where
            )
    return min(ours.page_tokens, theirs.page_tokens)


def _check_cut(
    where: str, group: GroupHello, wire_tokens: int, heads: tuple[int, int], order: Order
) -> None:
    """Refuse pages that have to be split between tokens but are not splittable."""
    some_heads = group.order == "NHC" and heads[1] - heads[0] < group.heads
    reordered = group.order != order and group.heads > 1
    if group.splittable or not (wire_tokens < group.page_tokens or some_heads or reordered):
        return
    raise Refused(
        "splittable",
        f"{where}pages of {group.page_tokens} tokens (order {group.order}) would have to be cut "
        f"into pieces of {wire_tokens} (order {order}), and this attention backend packs a page "
        "as a whole: use the same block size, layout and tensor_parallel_size on both",
    )


def _common_layers(
    where: str, reader: HandoffHello, source: HandoffHello, number: int
) -> tuple[str, ...]:
    """Return the layers both workers have, in the source's order.

    A reader's layer that no worker of the source has would keep its old contents. It is refused
    where that is certain: here if the source has one stage, and in :func:`_check_something_moves`
    if no layer matches.
    """
    ours, theirs = reader.groups[number].layers, source.groups[number].layers
    missing = sorted(set(ours) - set(theirs))
    if missing and source.rank.pp == 1:
        raise _mismatch("layers", _some(missing), "none of them", "serve the same layers", where)
    wanted = set(ours)
    return tuple(name for name in theirs if name in wanted)


def _check_something_moves(
    reader: HandoffHello, source: HandoffHello, groups: Sequence[GroupAgreement]
) -> None:
    if all(served_heads(reader.rank, source.rank, g.kv_heads) == (0, 0) for g in reader.groups):
        if any(source.rank.tp > g.kv_heads for g in reader.groups):
            return
        raise Refused(
            "heads",
            f"{source.rank} has no KV head for {reader.rank}: another worker of engine "
            f"{source.engine_id!r} serves it",
        )
    if any(group.layers for group in groups) or (reader.rank.pp > 1 and source.rank.pp > 1):
        return
    layers = [[name for group in side.groups for name in group.layers] for side in (reader, source)]
    raise _mismatch("layers", _some(layers[0]), _some(layers[1]), "serve the same model on both")


def _some(layers: Sequence[str]) -> str:
    """Return the first names, for an error message."""
    more = f" and {len(layers) - _MOST_NAMED} more" if len(layers) > _MOST_NAMED else ""
    return ", ".join(layers[:_MOST_NAMED]) + more
