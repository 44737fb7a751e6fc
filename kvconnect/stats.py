"""Statistics of one interval: mergeable, and bounded in size.

Workers and the scheduler send them to the process that logs and serves ``/metrics``. All numbers
but gauges are *deltas* since the last :meth:`~OffloadingConnectorStats.take`; only Prometheus adds
them up to cumulative values. There are no means or rates, which cannot be summed over ranks and
intervals.

The payload ``OffloadingConnectorStats.data`` has three sections, each keyed by metric name and
then by label value (``""`` for a metric without label)::

    {"counters":   {"hit_tokens": {"host": 4096}},
     "gauges":     {"host_blocks_used": {"": 120}},
     "histograms": {"transfer_size_bytes": {"GPU_to_CPU": [sum, n0, n1, ..., n_inf]}}}

Keys are ``str`` and values are Python numbers, so pickle and msgpack keep the payload unchanged.
Histograms have one count per fixed bucket, and a counter has at most ``MOST_LABELS`` label values
and ``other``. So the size does not depend on the number of operations or peers. The metric names
are the rows of :mod:`kvconnect.observability.metrics.catalog`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from kvconnect.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

COUNTERS = "counters"
GAUGES = "gauges"
HISTOGRAMS = "histograms"

TRANSFER_SIZE = "transfer_size_bytes"
"""Histogram of bytes per operation, by transfer type."""

TRANSFER_WIRE = "transfer_wire_seconds"
"""Histogram of seconds from first to last byte of an operation, by transfer type. The sum is the
type's busy time."""

MOST_LABELS = 32
"""Most label values per counter. Peers come and go, so their names need a bound."""

OTHER = "other"
"""Label value for all label values beyond the bound."""

# fmt: off
SIZE_BUCKETS: tuple[float, ...] = (
    4096.0, 16384.0, 65536.0, 262144.0,
    1e6, 2e6, 5e6, 1e7, 2e7, 4e7, 6e7, 8e7, 1e8, 1.5e8, 2e8, 5e8,
    1e9, 2e9, 5e9, 1e10, 2e10, 5e10, 1e11,
)
"""Upper bounds in bytes, inclusive. They include all bounds of vLLM's offload size histograms, so
that boards which select one keep working. They go further, because a long context is gigabytes."""

TIME_BUCKETS: tuple[float, ...] = (
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05,
    0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)
"""Upper bounds in seconds, inclusive: from one small copy to the timeouts of engines."""
# fmt: on


class OffloadingConnectorStats:
    """Deltas of one interval, for workers, scheduler and the logging process.

    One thread at a time may use an object. Recording methods take about a microsecond. Objects
    share no data, so aggregating one never changes another.
    """

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        """Start empty, or with a copy of another object's ``data``.

        Several loggers may get the same dict. The copy keeps their aggregations apart.

        Raises:
            Misuse: ``data`` is not such a payload; the message names the wrong part.
        """
        self.reset()
        if data is not None:
            _copy_payload(data, self.data)

    def record_transfer(self, kind: str, nbytes: int, seconds: float) -> None:
        """Record one finished operation.

        Args:
            kind: transfer type, for example ``GPU_to_CPU``.
            nbytes: bytes of the operation.
            seconds: from the first to the last byte of this operation alone.

        Raises:
            Misuse: a number is negative or NaN.
        """
        if not (nbytes >= 0 and seconds >= 0):
            raise Misuse(f"record_transfer({kind!r}, nbytes={nbytes!r}, seconds={seconds!r})")
        # Both histograms get each operation, so bytes and seconds always cover the same work.
        self._bucket(TRANSFER_SIZE, kind, int(nbytes), SIZE_BUCKETS)
        self._bucket(TRANSFER_WIRE, kind, float(seconds), TIME_BUCKETS)

    def count(self, name: str, n: float = 1, label: str | None = None) -> None:
        """Add ``n`` (a count or seconds) to counter ``name``. 0 leaves an empty object empty.

        Label values after the first ``MOST_LABELS`` are counted as ``OTHER``.

        Raises:
            Misuse: ``n`` is negative or NaN.
        """
        if n == 0:
            return
        if not n > 0:
            raise Misuse(f"count({name!r}, n={n!r}): a counter only grows")
        _add(self.data[COUNTERS].setdefault(name, {}), _plain(label), _python(n))

    def gauge(self, name: str, value: float, label: str | None = None) -> None:
        """Set gauge ``name``. The last value of an interval is reported."""
        self.data[GAUGES].setdefault(name, {})[_plain(label)] = _python(value)

    def observe(self, name: str, seconds: float, label: str | None = None) -> None:
        """Add one duration to the time histogram ``name``.

        Raises:
            Misuse: ``seconds`` is negative or NaN.
        """
        if not seconds >= 0:
            raise Misuse(f"observe({name!r}, seconds={seconds!r})")
        self._bucket(name, "" if label is None else label, float(seconds), TIME_BUCKETS)

    def aggregate(self, other: OffloadingConnectorStats) -> Self:
        """Add ``other`` to this object and return this object; ``other`` does not change.

        Counters and buckets are summed, over ranks too. ``other``'s gauges replace this object's:
        they are newer, because one place sets each gauge, the scheduler or the first worker.
        """
        for name, theirs in other.data[COUNTERS].items():
            mine = self.data[COUNTERS].setdefault(name, {})
            for label, n in theirs.items():
                _add(mine, label, n)
        for name, theirs in other.data[GAUGES].items():
            self.data[GAUGES].setdefault(name, {}).update(theirs)
        for name, theirs in other.data[HISTOGRAMS].items():
            mine = self.data[HISTOGRAMS].setdefault(name, {})
            for label, cells in theirs.items():
                own = mine.get(label)
                mine[label] = (
                    list(cells) if own is None else [a + b for a, b in zip(own, cells, strict=True)]
                )
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the interval as a flat dict of numbers for a log line.

        Keys per transfer type: ``<type>_total_bytes``, ``<type>_total_time`` (seconds) and
        ``<type>_operations``. Counters and gauges are ``<name>`` or ``<name>_<label>``.
        """
        flat: dict[str, int | float] = {}
        for kind, (nbytes, *counts) in self.data[HISTOGRAMS].get(TRANSFER_SIZE, {}).items():
            flat[f"{kind}_total_bytes"] = nbytes
            flat[f"{kind}_operations"] = sum(counts)
        for kind, cells in self.data[HISTOGRAMS].get(TRANSFER_WIRE, {}).items():
            flat[f"{kind}_total_time"] = cells[0]
        for section in (COUNTERS, GAUGES):
            for name, values in self.data[section].items():
                for label, value in values.items():
                    flat[f"{name}_{label}" if label else name] = value
        return flat

    def is_empty(self) -> bool:
        """Return whether nothing was recorded. An interval with only failures is not empty."""
        return not any(self.data.values())

    def reset(self) -> None:
        """Drop everything recorded."""
        self.data = {COUNTERS: {}, GAUGES: {}, HISTOGRAMS: {}}

    def take(self) -> Self | None:
        """Return an object with the recorded numbers, without copying, and start a new interval.

        None if nothing was recorded, so that an idle interval sends nothing.
        """
        if self.is_empty():
            return None
        taken = type(self)()
        taken.data, self.data = self.data, taken.data
        return taken

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffloadingConnectorStats) and self.data == other.data

    # Not hashable: mutable, and compared by content.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reduce()})"

    def _bucket(self, name: str, label: str, value: int | float, bounds: tuple[float, ...]) -> None:
        by_name = self.data[HISTOGRAMS]
        try:
            cells = by_name[name][label]
        except KeyError:
            cells = by_name.setdefault(name, {})[_plain(label)] = [0] * _cells(bounds)
        cells[0] += value
        cells[1 + bisect_left(bounds, value)] += 1


def _cells(bounds: tuple[float, ...]) -> int:
    return len(bounds) + 2  # the sum, one count per bound, the count above the last bound


def _add(values: dict[str, int | float], label: str, n: int | float) -> None:
    if label not in values and len(values) - (OTHER in values) >= MOST_LABELS:
        label = OTHER
    values[label] = values.get(label, 0) + n


def _python(number: float) -> int | float:
    # NumPy's scalars are numbers, but no encoder takes them.
    return number if type(number) in (int, float) else float(number)


def _plain(label: str | None) -> str:
    # A member of a StrEnum pickles as the Enum. str.__str__ returns the plain text of a str and of
    # a member.
    return "" if label is None else str.__str__(label)


def _copy_payload(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Copy the three sections of ``source`` into ``target``.

    Other keys come from a newer sender and are ignored. A known key with the wrong shape raises
    :class:`Misuse`.
    """
    sections = _mapping(source, "data")
    for section, copied in target.items():
        for name, values in _mapping(sections.get(section, {}), section).items():
            path = f"{section}.{name}"
            copied[name] = {
                label: _value(section, name, value, f"{path}.{label}")
                for label, value in _mapping(values, path).items()
            }


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return value
    raise Misuse(f"stats payload: {path} must map str to values, got {value!r}")


def _value(section: str, name: str, value: Any, path: str) -> Any:
    if section == HISTOGRAMS:
        expected = _cells(SIZE_BUCKETS if name == TRANSFER_SIZE else TIME_BUCKETS)
        if not isinstance(value, list) or len(value) != expected:
            raise Misuse(f"stats payload: {path} must be a list of {expected}, got {value!r}")
        return [_number(section, number, path) for number in value]
    return _number(section, value, path)


def _number(section: str, value: Any, path: str) -> int | float:
    # Unlike isinstance, type() refuses bool and NumPy scalars, which the encoder cannot send.
    if type(value) is not int and type(value) is not float:
        raise Misuse(f"stats payload: {path} must hold Python numbers, got {value!r}")
    if section != GAUGES and not value >= 0:
        raise Misuse(f"stats payload: {path} only grows, got {value!r}")
    return value
