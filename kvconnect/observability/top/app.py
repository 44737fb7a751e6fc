"""The loop of ``kvconnect top``: scrape, compute rates, show, record, wait."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TextIO
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live

from kvconnect.errors import ConfigError
from kvconnect.observability.metrics import rates
from kvconnect.observability.metrics.rates import Labels, Samples, Scrape, Snapshot
from kvconnect.observability.top import screen

Show = Callable[[Snapshot], None]


class TopOptions(NamedTuple):
    """Options of the command. ``record``: file to append snapshots to, "" for none."""

    urls: tuple[str, ...]
    interval_s: float
    once: bool
    json: bool
    record: str


def options_of(arguments: argparse.Namespace) -> TopOptions:
    """Return the options of parsed flags.

    Raises:
        ConfigError: names the URL and the fix.
    """
    urls = tuple(dict.fromkeys(metrics_url(url) for url in arguments.urls))
    return TopOptions(urls, arguments.interval, arguments.once, arguments.json, arguments.record)


def run(options: TopOptions, out: TextIO) -> bool:
    """Show snapshots until interrupted, or one; return whether all endpoints were up in the last.

    Raises:
        ConfigError: the recording cannot be written.
        OSError: ``out`` cannot be written.
    """
    all_up = False
    with contextlib.ExitStack() as stack:
        show = _shown_as(options, out, stack)
        for frame in frames(options):
            show(frame)
            if options.record:
                _append(options.record, frame)
            all_up = all(endpoint.up for endpoint in frame.endpoints)
    return all_up


def frames(options: TopOptions) -> Iterator[Snapshot]:
    """Yield a snapshot per interval, without end; with ``once``, only the first with rates."""
    before: dict[str, Scrape] = {}
    due = time.monotonic()
    first = True
    while True:
        after = scrape_all(options.urls)
        if not (first and options.once):
            yield Snapshot(
                at=time.time(),
                endpoints=tuple(rates.endpoint(before.get(one.url), one) for one in after),
            )
            if options.once:
                return
        first = False
        before = {one.url: one for one in after}
        due = max(due + options.interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _shown_as(options: TopOptions, out: TextIO, stack: contextlib.ExitStack) -> Show:
    if options.json:
        line = json.JSONEncoder(separators=(",", ":")).encode  # in ASCII, unlike msgspec's
        return lambda frame: _write(out, line(msgspec.to_builtins(frame)))
    console = Console(file=out)
    if options.once or not console.is_terminal:
        return lambda frame: console.print(screen.draw(frame))
    live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
    return lambda frame: live.update(screen.draw(frame), refresh=True)


def _append(path: str, frame: Snapshot) -> None:
    try:
        with Path(path).open("ab") as file:
            file.write(msgspec.json.encode(frame) + b"\n")
    except OSError as error:
        raise ConfigError("record", path, f"name a writable file: {error}") from error


def _write(out: TextIO, line: str) -> None:
    out.write(f"{line}\n")
    out.flush()


# Scraping ---------------------------------------------------------------------------------------

_TIMEOUT_S = 5.0  # limit of one socket operation
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
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            body = reply.read(_MOST_BYTES + 1)
        if len(body) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
        return Scrape(url, time.monotonic(), parse(body.decode()))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Scrape(url, time.monotonic(), {}, _reason(error))


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


def _reason(error: Exception) -> str:
    why = getattr(error, "reason", None) or error
    return str(why) or type(error).__name__
