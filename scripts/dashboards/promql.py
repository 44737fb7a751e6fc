"""PromQL of the dashboards. Metrics are named as in the catalogue; unknown names are errors.

One dashboard serves both engines: the variable ``engine`` matches the prefix of the metric name.
SGLang's names reach Prometheus with ``sglang:`` or ``sglang_``, depending on its client library and
Prometheus (https://github.com/prometheus/client_python/issues/1177).
"""

from __future__ import annotations

from kvconnect.observability.metrics.catalog import ALIKE, CATALOG, RANK_LABELS
from scripts.dashboards import helps

PREFIXES = {"vLLM": "vllm:", "SGLang": "sglang:|sglang_"}
"""Prefixes of an engine's metric names, as a regular expression."""

ENGINE = "(${engine:pipe})"
"""Prefixes of the selected engines."""

_SELECTED = 'model_name=~"$model", job=~"$role", instance=~"$instance"'
_EXPOSED = {row.name: row.name for row in CATALOG if row.kind == "gauge"}
_EXPOSED |= {row.name: f"{row.name}_total" for row in CATALOG if row.kind == "counter"}
_EXPOSED |= {
    f"{row.name}_{part}": f"{row.name}_{part}"
    for row in CATALOG
    if row.kind == "histogram"
    for part in ("bucket", "sum", "count")
}
_HELPS = helps()


def series(name: str, *more: str) -> str:
    """Return the selector of a row of the engines' catalogue. A histogram's name needs its part
    (``_sum``, ``_count``, ``_bucket``); ``more`` are further matchers."""
    assert name in _EXPOSED, f"{name} is not in the catalogue"
    return f'{{__name__=~"{ENGINE}kvconnect_{_EXPOSED[name]}", {", ".join((_SELECTED, *more))}}}'


def own(*names: str, more: tuple[str, ...] = ()) -> str:
    """Return the selector of a metric that the engines publish under their own ``names``."""
    any_of = "|".join(names).replace("sglang:", "sglang[:_]")
    matchers = (f'__name__=~"{ENGINE}.+"', f'__name__=~"{any_of}"', _SELECTED, *more)
    return f"{{{', '.join(matchers)}}}"


def router(name: str, *more: str) -> str:
    """Return the selector of a router's metric, its suffix included."""
    row = f"kvconnect_router_{name}"
    stems = (row, row.removesuffix("_total"), row.rpartition("_")[0])
    assert any(stem in _HELPS for stem in stems), f"{name} is not in the router's catalogue"
    matchers = ('job=~"$role"', 'instance=~"$instance"', *more)
    return f"{row}{{{', '.join(matchers)}}}"


def rate(selector: str, by: str = "") -> str:
    """Return the rate per second, summed over all labels but ``by``."""
    return _sum(_of_engines(selector, f"rate({selector}[$__rate_interval])"), by)


def during(selector: str, by: str = "") -> str:
    """Return a counter's rise in the whole time range."""
    return _sum(_of_engines(selector, f"increase({selector}[$__range])"), by)


def now(selector: str, by: str = "") -> str:
    """Return a gauge's value, summed over all labels but ``by``."""
    return _sum(selector, by)


def most(selector: str, by: str) -> str:
    """Return a gauge's largest value, for gauges that do not add up."""
    return f"max by ({by}) ({selector})"


def share(part: str, whole: str, by: str = "") -> str:
    """Return part over whole; ``by`` names labels that only the part has."""
    return f"{part} / ignoring ({by}) group_left {whole}" if by else f"{part} / {whole}"


def quantile(q: float, buckets: str, by: str = "") -> str:
    """Return a histogram's quantile, from the selector of its buckets."""
    return f"histogram_quantile({q}, {rate(buckets, ', '.join(filter(None, ('le', by))))})"


def _of_engines(selector: str, vector: str) -> str:
    """Return one series an engine, where all of its ranks count alike."""
    if not any(f'kvconnect_{name}"' in selector for name in ALIKE):
        return vector
    return f"max without ({', '.join(RANK_LABELS)}) ({vector})"


def _sum(vector: str, by: str) -> str:
    return f"sum by ({by}) ({vector})" if by else f"sum({vector})"
