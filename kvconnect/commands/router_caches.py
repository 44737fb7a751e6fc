"""``kvconnect cache pin`` and the like: asks a running router to control its engines' caches, or
what they hold."""

from __future__ import annotations

import argparse
import json
import urllib.parse
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from kvconnect.commands.cache_lines import lines_of_engine, lines_of_prompt
from kvconnect.direct_http import answer_of, whole
from kvconnect.errors import ConfigError
from kvconnect.protocol.cache_hints import CacheHint
from kvconnect.router.api_keys import parse_api_keys
from kvconnect.secret_files import read_secret_text

COMMANDS = {
    "prewarm": "have a prompt computed and stored",
    CacheHint.PIN.value: "keep a prompt's blocks in host memory for some seconds",
    CacheHint.RETAIN.value: "evict a prompt's blocks after all others for some seconds",
    CacheHint.DEMOTE.value: "evict a prompt's blocks before all others",
    CacheHint.DROP.value: "remove a prompt's blocks from host memory",
    CacheHint.PREFETCH.value: "bring a prompt's blocks from secondary tiers to host memory",
}
"""Command -> its help."""
OF_ROUTER = ("admin_token_file", "engine", "prompt", "request", "tokens", "api_key_file")
"""Arguments of ``kvconnect cache stats`` that only a router takes."""
_TOKENS_HELP = "only the prompt's first tokens"
_TIMEOUT_S = 900.0  # engines answer within the router's own limit
_MOST_BYTES, _MOST_ERROR = 64 << 20, 1 << 16
_URL = ("http://", "https://")


def add_commands(what: Any) -> list[argparse.ArgumentParser]:
    """Add one command for each hint to the parsers of ``kvconnect cache``; return them."""
    added = []
    for name, text in COMMANDS.items():
        parser: argparse.ArgumentParser = what.add_parser(name, help=f"{text}, through a router")
        add = parser.add_argument
        add("router", metavar="URL", help="of the router's admin API")
        add("--admin-token-file", required=True, metavar="PATH", help="the router's admin token")
        add("--model", required=True, metavar="NAME", help="model that the prompt is for")
        _add_prompt_flags(parser, required=True)
        if name in (CacheHint.PIN.value, CacheHint.RETAIN.value):
            add("--seconds", type=float, required=True, metavar="S", help="for how long")
        if name != "prewarm":
            add("--tokens", type=int, metavar="N", help=_TOKENS_HELP)
        added.append(parser)
    return added


def add_stats_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``kvconnect cache stats`` that concern a router: ``OF_ROUTER``."""
    add = parser.add_argument
    add("--admin-token-file", default="", metavar="PATH", help="the router's admin token")
    _add_prompt_flags(parser, required=False)
    add("--tokens", type=int, metavar="N", help=_TOKENS_HELP)


def _add_prompt_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    prompt = parser.add_mutually_exclusive_group(required=required)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    path = "file with a request's fields as JSON, such as messages and tools"
    prompt.add_argument("--request", metavar="PATH", help=path)
    add = parser.add_argument
    add("--api-key-file", default="", metavar="PATH", help="API key of the client")
    add("--engine", default="", metavar="URL", help="only this engine of a router (default: all)")


class RouterAnswer(NamedTuple):
    """The exit code, 1 if an engine has failed, and the text to show."""

    code: int
    text: str


def ask_router(arguments: argparse.Namespace) -> RouterAnswer:
    """Ask a router; return its answer as JSON.

    Raises:
        ConfigError: a file cannot be read, or the router refuses.
    """
    body = json.dumps({**_body(arguments), "hint": arguments.what}).encode()
    engines = _engines_of(f"{arguments.router.rstrip('/')}/cache", arguments, body)
    failed = any("error" in engine for engine in engines)
    return RouterAnswer(int(failed), json.dumps({"engines": engines}, indent=2))


def is_router(place: str) -> bool:
    """Return whether a place is a router's URL, not a folder."""
    return place.startswith(_URL)


def router_stats(arguments: argparse.Namespace) -> RouterAnswer:
    """Ask the router ``arguments.folder`` what caches hold, of a prompt if one is given.

    The exit code is 1 if an engine does not say it.

    Raises:
        ConfigError: a file cannot be read, or the router refuses.
    """
    if not arguments.admin_token_file:
        raise ConfigError("admin-token-file", "", "name the file of the router's admin token")
    url, lines = f"{arguments.folder.rstrip('/')}/cache", lines_of_engine
    if arguments.prompt is not None or arguments.request:
        body = json.dumps(_body(arguments)).encode()
        engines, lines = _engines_of(f"{url}/stats", arguments, body), lines_of_prompt
    elif arguments.api_key_file or arguments.tokens is not None:
        raise ConfigError("prompt", "", "--api-key-file and --tokens need --prompt or --request")
    else:
        asked = {"model": arguments.model or "", "url": arguments.engine}
        query = urllib.parse.urlencode({name: value for name, value in asked.items() if value})
        engines = _engines_of(f"{url}?{query}", arguments)
    failed = any("error" in engine for engine in engines)
    if arguments.json:
        return RouterAnswer(int(failed), json.dumps({"engines": engines}, indent=2))
    text = "\n".join(line for engine in engines for line in lines(engine))
    return RouterAnswer(int(failed), text)


def _engines_of(
    url: str, arguments: argparse.Namespace, body: bytes | None = None
) -> list[dict[str, Any]]:
    """Return what a router's admin API answers of each engine.

    Raises:
        ConfigError: the token cannot be read, or the router refuses or does not answer.
    """
    token = read_secret_text("admin-token-file", arguments.admin_token_file)
    if not is_router(url):
        raise ConfigError("URL", url, "use a URL such as http://127.0.0.1:8001")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    method = "GET" if body is None else "POST"
    asked = answer_of(url, _TIMEOUT_S, method=method, body=body, headers=headers)
    try:
        with asked as answer:
            good = answer.status // 100 == 2
            said = whole(answer, _MOST_BYTES) if good else answer.read(_MOST_ERROR)
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError("URL", url, f"the router does not answer: {error}") from error
    if not good:
        why = said.decode(errors="replace") or f"it answers {answer.status} {answer.reason}"
        raise ConfigError("URL", url, why)
    return _engines_in(url, said)


def _engines_in(url: str, said: bytes) -> list[dict[str, Any]]:
    fix = "name the admin API of a router"
    try:
        found = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise ConfigError("URL", url, f"{fix}: {error}") from error
    engines = found.get("engines") if isinstance(found, dict) else None
    if not isinstance(engines, list) or not all(isinstance(each, dict) for each in engines):
        raise ConfigError("URL", url, fix)
    return engines


def _body(arguments: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"prompt": arguments.prompt}
    if arguments.request:
        try:
            fields = json.loads(_text("request", arguments.request))
        except ValueError as error:
            raise ConfigError("request", arguments.request, f"use JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError("request", arguments.request, "use a JSON object")
    fields["model"] = arguments.model or fields.get("model", "")
    if arguments.api_key_file:
        fields["api_key"] = _api_key(arguments.api_key_file)
    more = {"seconds": "seconds", "tokens": "tokens", "url": "engine"}
    given = {field: getattr(arguments, name, None) for field, name in more.items()}
    return {**fields, **{f: value for f, value in given.items() if value not in (None, "")}}


def _api_key(path: str) -> str:
    field = "api-key-file"
    keys = parse_api_keys(field, path, read_secret_text(field, path))
    if len(keys) > 1:
        raise ConfigError(field, path, "name a file with one key, the client's")
    return keys[0].key


def _text(field: str, path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field, path, f"name a file that can be read: {error}") from error
