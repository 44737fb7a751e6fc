"""Scrapes of metrics endpoints: an endpoint that fails is down, and bounded in time and bytes."""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvconnect.direct_http import answer_of, whole
from kvconnect.errors import ConfigError
from kvconnect.observability.metrics.rates import Labels, Samples, Scrape

_TIMEOUT_S = 5.0  # limit of a whole answer
_MOST_BYTES = 64 << 20
_AT_ONCE = 16  # scrapes in parallel


def metrics_url(text: str) -> str:
    """Return the URL to scrape. The default scheme is http, the default path ``/metrics``.

    Raises:
        ConfigError: neither http nor https, or no host.
    """
    url = text if "://" in text else f"http://{text}"
    fix = "use http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ConfigError("url", text, f"{fix}: {error}") from error
    if not good or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError("url", text, fix)
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/metrics"


def scrape_all(urls: Sequence[str]) -> list[Scrape]:
    """Scrape all URLs in parallel."""
    with ThreadPoolExecutor(min(len(urls), _AT_ONCE)) as pool:
        return list(pool.map(scrape, urls))


def scrape(url: str) -> Scrape:
    """Scrape one URL. If the endpoint fails, the result has the error; nothing is raised."""
    try:
        with answer_of(url, _TIMEOUT_S) as answer:
            if answer.status // 100 != 2:
                raise OSError(f"{answer.status} {answer.reason}")
            body = whole(answer, _MOST_BYTES)
        return Scrape(url, time.monotonic(), parse(body.decode()))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Scrape(url, time.monotonic(), {}, str(error) or type(error).__name__)


def parse(text: str) -> Samples:
    """Return KVConnect's samples in the text of a scrape.

    Raises:
        ValueError: malformed Prometheus text.
    """
    ours = "\n".join(line for line in text.splitlines() if "kvconnect_" in line)
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(ours):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples
