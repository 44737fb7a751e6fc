"""``kvconnect cache pin`` and the like: asks a running router to control its engines' caches."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigError
from kvconnect.protocol.cache_hints import CacheHint

COMMANDS = {
    "prewarm": "have a prompt computed and stored",
    CacheHint.PIN.value: "keep a prompt's blocks in host memory for some seconds",
    CacheHint.RETAIN.value: "evict a prompt's blocks after all others for some seconds",
    CacheHint.DEMOTE.value: "evict a prompt's blocks before all others",
    CacheHint.DROP.value: "remove a prompt's blocks from host memory",
    CacheHint.PREFETCH.value: "bring a prompt's blocks from secondary tiers to host memory",
}
"""Command -> its help."""
_TIMEOUT_S = 900.0  # engines answer within the router's own limit


def add_commands(what: Any) -> list[argparse.ArgumentParser]:
    """Add one command for each hint to the parsers of ``kvconnect cache``; return them."""
    added = []
    for name, text in COMMANDS.items():
        parser: argparse.ArgumentParser = what.add_parser(name, help=f"{text}, through a router")
        add = parser.add_argument
        add("router", metavar="URL", help="of the router's admin API")
        add("--admin-token-file", required=True, metavar="PATH", help="the router's admin token")
        add("--model", required=True, metavar="NAME", help="model that the prompt is for")
        prompt = parser.add_mutually_exclusive_group(required=True)
        prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
        path = "file with a request's fields as JSON, such as messages and tools"
        prompt.add_argument("--request", metavar="PATH", help=path)
        if name in (CacheHint.PIN.value, CacheHint.RETAIN.value):
            add("--seconds", type=float, required=True, metavar="S", help="for how long")
        if name != "prewarm":
            add("--tokens", type=int, metavar="N", help="only the prompt's first tokens")
        add("--api-key-file", default="", metavar="PATH", help="API key of the client")
        add("--engine", default="", metavar="URL", help="only this engine (default: all)")
        added.append(parser)
    return added


def ask_router(arguments: argparse.Namespace) -> tuple[int, str]:
    """Ask a router; return the exit code and its answer as JSON. 1: an engine has failed.

    Raises:
        ConfigError: a file cannot be read, or the router refuses.
    """
    body = json.dumps(_body(arguments)).encode()
    token = _text("admin-token-file", arguments.admin_token_file)
    url = f"{arguments.router.rstrip('/')}/cache"
    if not url.startswith(("http://", "https://")):
        raise ConfigError("URL", arguments.router, "use a URL such as http://127.0.0.1:8001")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)  # checked above
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as error:
        raise ConfigError("URL", url, error.read().decode(errors="replace")) from error
    except (OSError, ValueError) as error:
        raise ConfigError("URL", url, f"the router does not answer: {error}") from error
    failed = any("error" in engine for engine in said["engines"])
    return int(failed), json.dumps(said, indent=2)


def _body(arguments: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"prompt": arguments.prompt}
    if arguments.request:
        try:
            fields = json.loads(_text("request", arguments.request))
        except ValueError as error:
            raise ConfigError("request", arguments.request, f"use JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError("request", arguments.request, "use a JSON object")
    fields |= {"model": arguments.model, "hint": arguments.what}
    if arguments.api_key_file:
        fields["api_key"] = _text("api-key-file", arguments.api_key_file)
    more = {"seconds": "seconds", "tokens": "tokens", "url": "engine"}
    given = {field: getattr(arguments, name, None) for field, name in more.items()}
    return {**fields, **{field: value for field, value in given.items() if value}}


def _text(field: str, path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field, path, f"name a file that can be read: {error}") from error
