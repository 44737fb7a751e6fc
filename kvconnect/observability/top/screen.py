"""Draws a snapshot with rich.

Control characters in names are replaced, because names come from other machines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvconnect.observability.metrics.rates import (
    EndpointFrame,
    LedgerCounts,
    Lookups,
    Router,
    Snapshot,
    TierUse,
)
from kvconnect.terminal import plain

_MOST_PHASES = 8
_MOST_PEERS = 10


def draw(frame: Snapshot) -> RenderableType:
    """Return the screen for a snapshot."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(frame.at))
    down = sum(not endpoint.up for endpoint in frame.endpoints)
    state = f"{len(frame.endpoints)} endpoints, {down} down" if down else "all up"
    head = Text(f"kvconnect top  {when}  {state}", style="bold")
    # Endpoints that are down come first: a terminal may be too short for all.
    return Group(head, *map(_endpoint, sorted(frame.endpoints, key=lambda each: each.up)))


def _endpoint(endpoint: EndpointFrame) -> Panel:
    title = Text(f"{endpoint.kind} {plain(endpoint.url)}".strip(), style="bold")
    if not endpoint.up:
        why = Text(f"DOWN  {plain(endpoint.error)}", style="bold red")
        return Panel(why, title=title, title_align="left")
    tables = _router(endpoint.router) if endpoint.router else _engine(endpoint)
    tables += [table for table in (_phases(endpoint), _failures(endpoint)) if table.row_count]
    return Panel(Columns(tables, padding=(0, 3)), title=title, title_align="left")


def _engine(endpoint: EndpointFrame) -> list[Table]:
    tables = [_lookups(endpoint.lookups)] if endpoint.lookups else []
    tables += [_transfers(endpoint), _tiers(endpoint.tiers), _peers(endpoint)]
    tables += [_ledger(endpoint.ledger)] if endpoint.ledger else []
    return [table for table in tables if table.row_count]


def _lookups(lookups: Lookups) -> Table:
    share = "-" if lookups.hit_share is None else f"{lookups.hit_share:.1%}"
    rows = [("queried", f"{count(lookups.query_tokens_per_s)} tokens/s"), ("hits", share)]
    return _table("lookups", (), rows)


def _transfers(endpoint: EndpointFrame) -> Table:
    columns = ("", "rate", "per op", "copy speed", "total")
    rows = (
        (
            each.transfer_type,
            speed(each.bytes_per_s),
            duration(each.seconds_per_operation),
            speed(each.copy_bytes_per_s),
            size(each.bytes_total),
        )
        for each in endpoint.transfers
        if each.bytes_total
    )
    return _table("transfers", columns, rows)


def _tiers(tiers: Iterable[TierUse]) -> Table:
    columns = ("", "hit tokens/s", "hit total", "evicted/s", "used", "of", "")
    rows = (
        (
            each.tier,
            count(each.hit_tokens_per_s),
            count(each.hit_tokens_total),
            count(each.evicted_blocks_per_s),
            size(each.used_bytes),
            size(each.capacity_bytes) if each.capacity_bytes else "-",
            {None: "", True: "", False: "unavailable"}[each.available],
        )
        for each in tiers
        if each.hit_tokens_total or each.used_bytes or each.capacity_bytes or each.available
    )
    return _table("tiers", columns, rows)


def _peers(endpoint: EndpointFrame) -> Table:
    active = sorted(
        (each for each in endpoint.peers if each.bytes_total or each.failures_total),
        key=lambda peer: -peer.bytes_total,
    )
    columns = ("", "rate", "wire speed", "total", "failures")
    rows = (
        (
            each.peer,
            speed(each.bytes_per_s),
            speed(each.copy_bytes_per_s),
            size(each.bytes_total),
            count(each.failures_total),
        )
        for each in active[:_MOST_PEERS]
    )
    return _table("peers", columns, rows)


def _ledger(ledger: LedgerCounts) -> Table:
    rows = [
        *((f"held by {owner}", f"{held:g} blocks") for owner, held in ledger.held_blocks.items()),
        ("oldest hold", duration(ledger.oldest_hold_s)),
        ("jobs in flight", f"{sum(ledger.jobs_in_flight.values()):g}"),
    ]
    return _table("ledger", (), rows)


def _phases(endpoint: EndpointFrame) -> Table:
    rows = (
        (
            each.name,
            duration(each.mean_s),
            f"<= {duration(each.p99_s)}" if each.p99_s else "longer",
            count(each.per_s),
        )
        for each in endpoint.phases[:_MOST_PHASES]
    )
    return _table("slowest phases", ("", "mean", "p99", "per s"), rows)


def _failures(endpoint: EndpointFrame) -> Table:
    rows = (
        (f"{each.name} {each.label}", count(each.per_s), count(each.total))
        for each in endpoint.failures
    )
    return _table("failures", ("", "per s", "total"), rows)


def _router(router: Router) -> list[Table]:
    rows = [("waiting", count(router.queue))]
    rows += [(f"{name}/s", count(rate)) for name, rate in (router.requests_per_s or {}).items()]
    rows += [(f"imbalance {role}", f"{value:.2f}") for role, value in router.imbalance.items()]
    engines = (
        (each.role, each.url, "up" if each.up else "DOWN", count(each.in_flight),
         count(each.tokens))
        for each in router.upstreams
    )  # fmt: skip
    columns = ("", "engine", "", "open", "tokens")
    return [_table("requests", (), rows), _table("engines", columns, engines)]


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(
        title=title,
        title_style="bold cyan",
        title_justify="left",
        box=None,
        show_header=bool(columns),
        padding=(0, 1, 0, 0),
    )
    for number, name in enumerate(columns or ("", "")):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        style = "bold red" if "DOWN" in row else ""
        table.add_row(*(Text(plain(cell)) for cell in row), style=style)
    return table


def size(nbytes: float | None) -> str:
    """Return a number of bytes such as ``1.5 GB``, in powers of 1000; ``-`` for None."""
    return "-" if nbytes is None else "{:.3g} {}B".format(*_scaled(nbytes))


def speed(nbytes: float | None) -> str:
    """Return a rate such as ``1.5 GB/s``; ``-`` for None."""
    return "-" if nbytes is None else f"{size(nbytes)}/s"


def count(number: float | None) -> str:
    """Return a number such as ``1.5k``; ``-`` for None."""
    return "-" if number is None else "{:.3g}{}".format(*_scaled(number))


def duration(seconds: float | None) -> str:
    """Return a duration such as ``1.5 ms``; ``-`` for None."""
    if seconds is None:
        return "-"
    units = (("s", 1.0), ("ms", 1e3))
    unit, factor = next((each for each in units if seconds * each[1] >= 1), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}" if seconds else "0 s"


def _scaled(number: float) -> tuple[float, str]:
    for unit in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return number, unit
        number /= 1000
    return number, "P"
