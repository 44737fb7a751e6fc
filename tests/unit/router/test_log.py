"""What a router's process logs: how it starts, what it misses, how it stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.servers import free_port

LIMIT_S = 60.0


def logged(*flags: str, until: str) -> list[dict[str, str]]:
    """Start a router, stop it once it has said ``until``, and return all that it logged."""
    command = [sys.executable, "-m", "kvconnect.cli", "router", "--port", "0", *flags]
    asked = [*command, "--log-format", "json", "--drain-timeout", "5"]
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(json.loads(line))
                if until in line:
                    break
            process.send_signal(signal.SIGTERM)
            rest = process.communicate(timeout=LIMIT_S)[1]
            assert process.returncode == 0
        finally:
            process.kill()
    return [*lines, *map(json.loads, rest.splitlines())]


def messages(lines: list[dict[str, str]], level: str) -> str:
    return "\n".join(line["message"] for line in lines if line["level"] == level)


@pytest.mark.timeout(LIMIT_S)
def test_a_router_says_what_it_misses_and_when_it_stops() -> None:
    engine = f"http://127.0.0.1:{free_port()}"
    lines = logged("--unified", "--decode", engine, "--host", "0.0.0.0", until="not up yet")
    warnings, told = messages(lines, "warning"), messages(lines, "info")
    assert f"decode engine {engine} is not up yet: " in warnings
    assert "whoever reaches 0.0.0.0 may use all engines" in warnings
    assert told.splitlines()[0].startswith("router on http://0.0.0.0:")
    assert told.splitlines()[-2:] == ["stopping; open requests have 5 s to end", "stopped"]


@pytest.mark.timeout(LIMIT_S)
def test_the_control_a_router_on_loopback_needs_no_keys() -> None:
    engine = f"http://127.0.0.1:{free_port()}"
    lines = logged("--unified", "--decode", engine, "--log-level", "warning", until="not up yet")
    assert [line["level"] for line in lines] == ["warning"], "and told is what is asked for"


@pytest.mark.timeout(LIMIT_S)
def test_a_wrong_flag_is_one_line() -> None:
    command = [sys.executable, "-m", "kvconnect.cli", "router", "--queue", "many"]
    done = subprocess.run(command, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "--queue" in line and "'many'" in line
