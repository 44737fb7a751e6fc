"""The loop of ``kvconnect top``: scrape, work out rates, show, record, wait."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec
from rich.console import Console
from rich.live import Live

from kvconnect.errors import ConfigError
from kvconnect.metrics import rates
from kvconnect.metrics.frame import Frame
from kvconnect.metrics.rates import Scrape
from kvconnect.top import fetch, screen

Show = Callable[[Frame], None]


class Options(NamedTuple):
    """What to look at and how. ``record``: file that frames are appended to, "" for none."""

    urls: tuple[str, ...]
    interval_s: float
    once: bool
    json: bool
    record: str


def options_of(arguments: argparse.Namespace) -> Options:
    """Return the options that parsed flags stand for.

    Raises:
        ConfigError: names the URL and the fix.
    """
    urls = tuple(dict.fromkeys(fetch.metrics_url(url) for url in arguments.urls))
    return Options(urls, arguments.interval, arguments.once, arguments.json, arguments.record)


def run(options: Options, out: TextIO) -> bool:
    """Show frames on ``out`` until interrupted, or one; return whether all of the last were up.

    Raises:
        ConfigError: the file to record to cannot be written.
        OSError: ``out`` cannot.
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


def frames(options: Options) -> Iterator[Frame]:
    """Yield a frame per interval, without an end; with ``once``, the first that has rates."""
    before: dict[str, Scrape] = {}
    due = time.monotonic()
    first = True
    while True:
        after = fetch.scrape_all(options.urls)
        if not (first and options.once):
            yield Frame(
                at=time.time(),
                endpoints=tuple(rates.endpoint(before.get(one.url), one) for one in after),
            )
            if options.once:
                return
        first = False
        before = {one.url: one for one in after}
        due = max(due + options.interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _shown_as(options: Options, out: TextIO, stack: contextlib.ExitStack) -> Show:
    if options.json:
        return lambda frame: _write(out, msgspec.json.encode(frame).decode())
    console = Console(file=out)
    if options.once or not console.is_terminal:
        return lambda frame: console.print(screen.draw(frame))
    live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
    return lambda frame: live.update(screen.draw(frame), refresh=True)


def _append(path: str, frame: Frame) -> None:
    try:
        with Path(path).open("ab") as file:
            file.write(msgspec.json.encode(frame) + b"\n")
    except OSError as error:
        raise ConfigError("record", path, f"name a file that can be written: {error}") from error


def _write(out: TextIO, line: str) -> None:
    out.write(f"{line}\n")
    out.flush()
