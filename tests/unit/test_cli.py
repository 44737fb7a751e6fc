"""The ``kvconnect`` command: its words, its exit codes, and what it prints."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import kvconnect
from kvconnect import cli


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kvconnect {kvconnect.__version__}\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_the_command_quietly(unbuffered: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvconnect.cli", "doctor"],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line that cannot be meant is answered with."""
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["doctr"],
        ["doctor", "--jsn"],
        ["doctor", "transprt"],
        ["doctor", "disk"],
        ["doctor", "transport", "--path", "rdma"],
        ["doctor", "transport", "--peer", "127.0.0.1:1", "--listen", "127.0.0.1:2"],
    ],
)
def test_a_wrong_command_line_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = refusal(argv, capsys).splitlines()
    assert line.startswith("kvconnect") and ": error: " in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["transport", "--peer", "127.0.0.1"], "--peer 127.0.0.1: use HOST:PORT"),
        (["transport", "--peer", "127.0.0.1:70000"], "--peer 127.0.0.1:70000: use HOST:PORT"),
        (["transport", "--peer", "127.0.0.1:0"], "use the port that the listening side prints"),
        (["transport", "--peer", "no.such.host.invalid:1"], "use a host that can be resolved"),
        (["transport", "--min-rate", "1 parsec"], "--min-rate 1 parsec: unknown unit"),
        (["transport", "--listen", "0.0.0.0:0", "--path", "tcp"], "--listen 0.0.0.0"),
        (["disk", "/tmp", "--bytes", "much"], "--bytes much: write a size"),
        (["disk", "/tmp", "--bytes", "0"], "--bytes 0: use more than 0"),
    ],
)
def test_a_bad_value_is_refused_with_the_flag_and_the_fix(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(["doctor", *argv], capsys)
