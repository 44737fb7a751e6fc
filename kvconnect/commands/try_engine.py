"""``kvconnect try``: asks running engines for prompts, and says what KVConnect gains."""

from __future__ import annotations

import argparse
import json
import random
import secrets
from functools import partial
from pathlib import Path

from kvconnect.errors import ConfigError
from kvconnect.secret_files import read_secret_text
from kvconnect.terminal import Refuse, say
from kvconnect.trial import handoff_trial, offload_trial
from kvconnect.trial.engine_api import EngineClient, connect
from kvconnect.trial.http_client import HttpClient, TrialFailed
from kvconnect.trial.plain_words import PromptMaker
from kvconnect.trial.results import TrialResult

_TOKENS, _ROUNDS, _TIMEOUT_S = 2048, 3, 120.0
_EPILOG = """\
examples:
  kvconnect try http://127.0.0.1:8000
  kvconnect try --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002
  kvconnect try --router http://127.0.0.1:8000

It sends prompts of plain words and, unless the engine can be told to empty its cache, as many as
its cache holds. Exit codes: 0 it gains, 1 it does not or an engine failed, 2 the command line is
wrong.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``commands``, a result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "try",
        help="measure what a running engine gains, or say why it gains nothing",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=partial(run_trial, parser.error))
    add = parser.add_argument
    add("url", nargs="?", default="", metavar="URL", help="an engine that offloads")
    add("--prefill", default="", metavar="URL", help="an engine that hands prompts to --decode")
    add("--decode", default="", metavar="URL", help="an engine that receives them")
    add("--router", default="", metavar="URL", help="a router in front of such engines")
    add("--tokens", type=int, default=_TOKENS, metavar="N", help="of a prompt (%(default)s)")
    add("--rounds", type=int, default=_ROUNDS, metavar="N", help="prompts of a kind (%(default)s)")
    limit = "limit of one request (%(default)g)"
    add("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help=limit)
    add("--api-key-file", default="", metavar="PATH", help="file with the key of the API")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    what = "also write versions, GPU, link and figures, to send with an issue"
    add("--report", default="", metavar="FILE", help=what)


def run_trial(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Try what the flags name; return the exit code."""
    _check(refuse, arguments)
    try:
        result, host = _try(arguments)
        if arguments.report:
            _write_report(arguments.report, result.report(host))
    except ConfigError as error:
        refuse(f"{error.field} {error.value}: {error.fix}")
    except TrialFailed as error:
        problem = {"ok": False, "problem": str(error)}
        say(json.dumps(problem) if arguments.json else f"fail: {error}")
        return 1
    say(*(json.dumps(result.record()) if arguments.json else result.text()).splitlines())
    return 0 if result.problem is None else 1


def _check(refuse: Refuse, arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go together, and numbers out of range."""
    pair = arguments.prefill, arguments.decode
    ways = [bool(arguments.url), any(pair), bool(arguments.router)]
    if sum(ways) != 1 or any(pair) != all(pair):
        refuse("name one engine (URL), or --prefill and --decode, or --router")
    for name, value, most in (
        ("tokens", arguments.tokens, 2**20),
        ("rounds", arguments.rounds, 100),
        ("timeout", arguments.timeout, 3600),
    ):
        if not 1 <= value <= most:
            refuse(f"--{name} {value}: use 1 to {most}")


def _try(arguments: argparse.Namespace) -> tuple[TrialResult, str]:
    """Return the result, and the host of the engine that loads or receives."""
    maker = PromptMaker(random.Random(secrets.randbits(64)))
    tokens, rounds = arguments.tokens, arguments.rounds
    if arguments.prefill:
        prefill, decode = _engine(arguments, "prefill"), _engine(arguments, "decode")
        pair = handoff_trial.run_pair(prefill, decode, maker, tokens, rounds)
        return pair, decode.http.host
    client = _engine(arguments, "router" if arguments.router else "url")
    run = handoff_trial.run_router if arguments.router else offload_trial.run
    return run(client, maker, tokens, rounds), client.http.host


def _engine(arguments: argparse.Namespace, flag: str) -> EngineClient:
    key = ""
    if path := arguments.api_key_file:
        key = read_secret_text("--api-key-file", path)
        if not key.isascii() or not key.isprintable() or " " in key or not key:
            raise ConfigError("--api-key-file", path, "put one key in it, and nothing else")
    return connect(HttpClient(getattr(arguments, flag), key, arguments.timeout))


def _write_report(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--report", path, f"it cannot be written: {error.strerror}") from error
