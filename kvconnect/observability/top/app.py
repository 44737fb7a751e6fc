"""The loop of ``kvconnect top``: scrape, compute rates, show, record, wait."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec
from rich.console import Console
from rich.live import Live

from kvconnect.errors import ConfigError
from kvconnect.observability.metrics import rates
from kvconnect.observability.metrics.rates import Scrape, Snapshot
from kvconnect.observability.top import screen
from kvconnect.observability.top.scrape import metrics_url, scrape_all

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
                endpoints=tuple(
                    rates.endpoint(before.get(endpoint.url), endpoint) for endpoint in after
                ),
            )
            if options.once:
                return
        first = False
        before = {endpoint.url: endpoint for endpoint in after}
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
