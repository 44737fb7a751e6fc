"""What an operator types, against real engines: ``kvconnect top``, the documentation's commands."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pyte
import pytest
from vllm import envs
from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvconnect.observability.metrics.rates import EndpointFrame, Snapshot
from tests.documents import PAGES, Command, commands, commands_of
from tests.engines.models import BLOCK_SIZE
from tests.engines.pd import decode_config, prefill_config, side_by_side
from tests.engines.scenario import COUNT, NEW, PROMPT, block_bytes, prompts
from tests.engines.server import Router, Server
from tests.servers import free_port

MODEL = "Qwen/Qwen3-8B"  # the documentation's
TOKEN = "a token of the admin API"
BYTES = COUNT * -(-(PROMPT - 1) // BLOCK_SIZE) * block_bytes("llama")
COLUMNS, LINES = 150, 90


class Fleet(NamedTuple):
    router: Router
    prefill: Server
    decode: Server
    admin: int

    @property
    def urls(self) -> list[str]:
        return [self.router.url, self.prefill.url, self.decode.url]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    token = tmp_path_factory.mktemp("operator") / "token"
    token.write_text(TOKEN.replace(" ", "-"))
    names = ("--served-model-name", "model", MODEL)
    p = Server("llama", prefill_config(), args=names)
    d = Server("llama", decode_config(), args=names)
    admin = free_port()
    with side_by_side(p, d):
        flags = ("--admin-token-file", str(token), "--admin-port", str(admin))
        with Router([p], [d], args=flags) as router:
            yield Fleet(router, p, d, admin)


def top(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvconnect.cli", "top", *words]


def frame(*words: str) -> Snapshot:
    done = subprocess.run(
        top(*words, "--once", "--json"), capture_output=True, check=True, timeout=60
    )
    return msgspec.json.decode(done.stdout, type=Snapshot)


def transfer(one: EndpointFrame, kind: str) -> Any:
    (found,) = [each for each in one.transfers if each.transfer_type == kind]
    return found


class TestTop:
    """The order matters: the first test moves what the others see."""

    def test_rates_are_of_what_was_moved(self, fleet: Fleet) -> None:
        before = frame(*fleet.urls, "--interval", "0.1")
        assert [one.kind for one in before.endpoints] == ["router", "vllm", "vllm"]
        assert all(transfer(one, "SEND").bytes_total == 0 for one in before.endpoints[1:])
        watching = subprocess.Popen(
            top(*fleet.urls, "--json", "--interval", "0.5"), stdout=subprocess.PIPE
        )
        try:
            frames = self.watch(watching, fleet)
        finally:
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=30)
        moved = [
            sum(
                transfer(seen.endpoints[number], kind).bytes_per_s * seen.endpoints[number].seconds
                for seen in frames
            )
            for number, kind in ((1, "SEND"), (2, "RECV"))
        ]
        assert moved == [pytest.approx(BYTES), pytest.approx(BYTES)]
        router, p, d = frames[-1].endpoints
        assert transfer(p, "SEND").bytes_total == transfer(d, "RECV").bytes_total == BYTES
        asked = sum(seen.endpoints[0].router.requests_per_s["ok"] * seen.endpoints[0].seconds
                    for seen in frames)  # fmt: skip
        assert asked == pytest.approx(COUNT)
        assert [upstream.up for upstream in router.router.upstreams] == [True, True]
        (peer,) = [each for each in d.peers if each.bytes_total]
        assert (peer.bytes_total, peer.failures_total) == (BYTES, 0)
        phases = {phase.name for seen in frames for phase in seen.endpoints[2].phases}
        assert {"handoff_wire recv", "handoff_latency", "handoff_exposed"} <= phases
        assert not any(d.ledger.held_blocks.values())
        assert p.failures == d.failures == ()

    def watch(self, watching: subprocess.Popen[bytes], fleet: Fleet) -> list[Snapshot]:
        """The looks from the requests until the engines are quiet; one before has no rates."""
        assert watching.stdout is not None
        assert b'"seconds":null' in watching.stdout.readline()
        for prompt in prompts():
            fleet.router.complete(prompt, NEW)
        fleet.prefill.settle()
        fleet.decode.settle()
        quiet = time.time() + 1.0  # counted on the way to /metrics by now
        frames: list[Snapshot] = []
        while not frames or frames[-1].at < quiet:
            frames.append(msgspec.json.decode(watching.stdout.readline(), type=Snapshot))
        return frames

    def test_a_terminal_shows_it(self, fleet: Fleet) -> None:
        nobody = f"127.0.0.1:{free_port()}"
        shown = "\n".join(seen_on_a_terminal(top(*fleet.urls, nobody, "--interval", "1")))
        for wanted in (f"vllm {fleet.decode.url}/metrics", f"router {fleet.router.url}/metrics",
                       "RECV", "SEND", "peers", "ledger", "held by recv", "4 endpoints, 1 down",
                       f"http://{nobody}/metrics", "DOWN", "Connection refused",
                       "engine", fleet.prefill.url):  # fmt: skip
            assert wanted in shown, shown
        assert f"{BYTES / 1e6:.3g} MB" in shown
        assert "Traceback" not in shown


def seen_on_a_terminal(argv: list[str]) -> list[str]:
    """Run a program on a terminal, wait until it has drawn rates, end it with Ctrl-C."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if not pid:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        os.execve(argv[0], argv, {"PATH": os.environ["PATH"], "TERM": "xterm-256color"})
    deadline = time.monotonic() + 60
    shown: list[str] = []
    try:
        while time.monotonic() < deadline and "0 B/s" not in "\n".join(shown):
            if select.select([terminal], [], [], 0.2)[0]:
                stream.feed(os.read(terminal, 65536))
            else:  # nothing more comes for now: a whole picture
                shown = list(screen.display)
        os.write(terminal, b"\x03")
        while True:  # until it has ended, and its side of the terminal with it
            try:
                if not os.read(terminal, 65536):
                    break
            except OSError:
                break
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    return shown


# The documentation's commands -------------------------------------------------------------------

COMMANDS = commands()


def run_curl(command: Command, fleet: Fleet) -> str:
    """Run it, with the fleet in the place of the addresses."""
    places = {
        "127.0.0.1:8000": f"127.0.0.1:{fleet.router.port}",
        "127.0.0.1:8001": f"127.0.0.1:{fleet.admin}",
        "127.0.0.1:30000": f"127.0.0.1:{fleet.decode.port}",
        "$AUTH": f"Authorization: Bearer {TOKEN.replace(' ', '-')}",
    }
    words = list(command.words)
    for written, real in places.items():
        words = [word.replace(written, real) for word in words]
    done = subprocess.run(
        [words[0], "--fail", "--silent", "--show-error", *words[1:]],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_is_answered(fleet: Fleet) -> None:
    """In the order of the pages: an engine is added before it is drained, and then removed."""
    asked = [command for command in COMMANDS if command.words[:1] == ("curl",)]
    assert len(asked) >= 7
    for command in asked:
        if command.line.endswith("/workers/switch"):  # this one is drained, and nobody is there
            with pytest.raises(AssertionError, match="409"):
                run_curl(command, fleet)
        elif command.line.endswith("/metrics"):
            assert "kvconnect_" in run_curl(command, fleet)
        else:
            json.loads(run_curl(command, fleet))
    with pytest.raises(AssertionError):
        run_curl(next(commands_of("curl http://127.0.0.1:8000/v1/completion", "")), fleet)


def parse_as_vllm(command: Command) -> Any:
    """What vLLM makes of its command line; raises what it refuses it with."""
    assert command.words[1] == "serve"
    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(list(command.words[2:]))
    validate_parsed_serve_args(arguments)
    return arguments


SERVE = [command for command in COMMANDS if command.words[:1] == ("vllm",)]


def test_vllm_takes_its_flags() -> None:
    assert len(SERVE) > 15
    connectors = {
        arguments.kv_transfer_config.kv_connector
        for command in SERVE
        if (arguments := parse_as_vllm(command)).kv_transfer_config
    }
    assert connectors >= {"KVConnect", "NixlConnector", "OffloadingConnector", "MooncakeConnector"}


def test_vllm_has_the_variables_that_are_named() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"\bVLLM_[A-Z0-9_]+\b", page.read_text())
    }
    assert len(named) > 4
    assert named - set(envs.environment_variables) == set()


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve MODEL --kv-transfer-confg '{}'",
        """vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVConnect", "kv_rol": "x"}'""",
        """vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVConnect", "kv_role": "x"}'""",
        "vllm serve MODEL --port eighty",
    ],
)
def test_vllm_refuses_what_is_wrong(text: str) -> None:
    with pytest.raises((SystemExit, ValueError)):
        parse_as_vllm(next(commands_of(text, "")))
