"""Flags of ``kvconnect doctor``."""

from __future__ import annotations

import argparse

_DISK_BYTES = "256MiB"


def add_flags(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Add the command's flags; return the parsers of its subcommands, by name."""
    as_json = "print one JSON object instead of lines"
    parser.add_argument("--json", action="store_true", help=as_json)
    of_model = "say what works with the model whose config.json is there, instead"
    parser.add_argument("--model", metavar="DIR", help=of_model)
    what = parser.add_subparsers(dest="what", metavar="WHAT")
    transport = what.add_parser("transport", help="move pages to another process or machine")
    copy = what.add_parser("copy", help="copy blocks between the KV cache and host memory")
    folder = what.add_parser("disk", help="write and read a file")
    peers = what.add_parser("peers", help="ask workers that share their host memory (cache_peers)")
    for each in (transport, copy, folder, peers):
        # No default, so that a --json before the subcommand counts too.
        each.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=as_json)
    _add_transport_flags(transport)
    copy.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the KV cache")
    folder.add_argument("folder", metavar="DIR", help="where to write")
    size = "how much (default: %(default)s)"
    folder.add_argument("--bytes", default=_DISK_BYTES, metavar="SIZE", help=size)
    peers.add_argument("ask", nargs="+", metavar="IP:PORT", help="as in cache_peers' ask")
    _add_security_flags(peers)
    return {"transport": transport, "copy": copy, "disk": folder, "peers": peers}


def _add_transport_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--peer", default="", metavar="HOST:PORT", help="the listening side")
    other.add_argument("--listen", default="", metavar="HOST:PORT", help="be the listening side")
    add("--path", choices=["tcp", "nixl", "all"], default="all", help="transports to measure")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the pages are")
    least = "fail below this per second, such as 1GB"
    add("--min-rate", default="0", metavar="SIZE", help=least)
    _add_security_flags(parser)


def _add_security_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--key-file", default="", metavar="FILE", help="key file; the same on both sides")
    add("--tls-dir", default="", metavar="DIR", help="tls.crt, tls.key and ca.crt of this side")
