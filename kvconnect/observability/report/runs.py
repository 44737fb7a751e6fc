"""Runs of a report, read: benchmark results, or recordings of ``kvconnect top``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.observability.metrics.rates import EndpointFrame, Snapshot

_MOST_BYTES = 256 << 20
Points = list[tuple[float, float]]
"""(seconds since the run began, value), in time order."""


@dataclass(frozen=True)
class Section:
    """One benchmark, or one endpoint of a history.

    ``about`` describes the source of the figures; ``series`` is empty for a benchmark.
    """

    name: str
    about: Mapping[str, str]
    figures: Mapping[str, float | str]
    series: Mapping[str, Points] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedRun:
    """A file, or a folder of results; sections by name."""

    path: str
    sections: Mapping[str, Section]


class _Result(msgspec.Struct):
    """A file of ``benchmarks/results``."""

    benchmark: str
    machine: dict[str, Any]
    figures: dict[str, Any]


def read(path: str) -> RecordedRun:
    """Read a run.

    Raises:
        ConfigError: the path is empty, unreadable or of neither kind.
    """
    place = Path(path)
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    sections = [section for file in files for section in _sections(file)]
    if not sections:
        raise ConfigError("run", path, "name a run that has results")
    return RecordedRun(path, {section.name: section for section in sections})


def _sections(file: Path) -> Iterator[Section]:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError("run", str(file), f"it has more than {_MOST_BYTES >> 20} MiB")
        data = file.read_bytes()
        if b'"endpoints"' in data.partition(b"\n")[0]:
            frames = [msgspec.json.decode(line, type=Snapshot) for line in data.splitlines()]
            yield from _history(frames)
        else:
            yield _benchmark(msgspec.json.decode(data, type=_Result))
    except (OSError, msgspec.MsgspecError) as error:
        fix = f"name a benchmark's result, a folder of them, or a recording of top: {error}"
        raise ConfigError("run", str(file), fix) from error


def _benchmark(result: _Result) -> Section:
    about = {name: str(value) for name, value in result.machine.items() if value is not None}
    figures = {name: _figure(value) for name, value in result.figures.items()}
    return Section(result.benchmark, about, figures)


def _figure(value: Any) -> float | str:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return str(value)


def _history(frames: list[Snapshot]) -> Iterator[Section]:
    """Yield a section per endpoint. The nth of a kind is compared with the nth of the other run."""
    began = min(frame.at for frame in frames)
    series: dict[str, dict[str, Points]] = defaultdict(lambda: defaultdict(list))
    kinds: dict[str, str] = {}
    for frame in sorted(frames, key=lambda each: each.at):
        for endpoint in frame.endpoints:
            kinds[endpoint.url] = endpoint.kind or kinds.get(endpoint.url, "")
            for name, value in _values(endpoint):
                if value is not None and math.isfinite(value):
                    series[endpoint.url][name].append((frame.at - began, value))
    counts: dict[str, int] = defaultdict(int)
    for url, kind in kinds.items():
        counts[kind] += 1
        moving = {name: points for name, points in series[url].items() if any(v for _, v in points)}
        name = f"{kind or 'endpoint'} {counts[kind]}"
        about = {"url": url, "looks": str(len(frames)), "seconds": f"{_length(series[url]):.0f}"}
        yield Section(name, about, _means(moving), moving)


def _values(endpoint: EndpointFrame) -> Iterator[tuple[str, float | None]]:
    """Yield the figures that are drawn over time. A name ends in a comma and the unit."""
    yield "up, 1 or 0", float(endpoint.up)
    if endpoint.lookups:
        yield "hit share, ratio", endpoint.lookups.hit_share
    for transfer in endpoint.transfers:
        yield f"{transfer.transfer_type}, bytes/s", transfer.bytes_per_s
        yield f"{transfer.transfer_type} copy speed, bytes/s", transfer.copy_bytes_per_s
    for tier in endpoint.tiers:
        yield f"hits {tier.tier}, tokens/s", tier.hit_tokens_per_s
        yield f"used {tier.tier}, bytes", tier.used_bytes
    for peer in endpoint.peers:
        yield f"peer {peer.peer}, bytes/s", peer.bytes_per_s
    for phase in endpoint.phases:
        yield f"mean {phase.name}, s", phase.mean_s
    if endpoint.ledger:
        yield "held, blocks", sum(endpoint.ledger.held_blocks.values())
    for failure in endpoint.failures:
        yield f"{failure.name} {failure.label}".strip() + ", per s", failure.per_s
    if endpoint.router and endpoint.router.requests_per_s:
        for outcome, rate in endpoint.router.requests_per_s.items():
            yield f"requests {outcome}, per s", rate


def _means(series: Mapping[str, Points]) -> dict[str, float | str]:
    return {
        name: sum(value for _, value in points) / len(points) for name, points in series.items()
    }


def _length(series: Mapping[str, Points]) -> float:
    return max((points[-1][0] - points[0][0] for points in series.values()), default=0.0)
