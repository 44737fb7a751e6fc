"""The NIXL transport passes the conformance checks over each way that UCX has here.

UCX reads its environment when it is loaded, so each way has a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("nixl_cu12"), reason="nixl-cu12 is not installed"
)

CHECK = """
import sys
from dataclasses import replace
from kvconnect.testing import transport as conformance
from kvconnect.transport import ConnectionOptions, Security, make_transport
from kvconnect.transport.nixl import send as launching

def swapped(here, there):
    ours, theirs, lengths = paired(here, there)
    return ours[::-1], theirs, lengths

paired = launching.paired
if sys.argv[1] == "swapped":
    launching.paired = swapped
    conformance._PATIENCE_S = 10.0  # the pages never come
options = ConnectionOptions(stall_s=3.0, digest=sys.argv[2], local=True)
conformance.check_transport(lambda: make_transport("nixl", Security(), options), "nixl")
"""


def check(*arguments: str, ucx_tls: str) -> subprocess.CompletedProcess[str]:
    """Run the check; with an empty ``ucx_tls``, over what KVConnect has UCX use by default."""
    others = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    return subprocess.run(
        [sys.executable, "-c", CHECK, *arguments],
        env={**others, "UCX_TLS": ucx_tls} if ucx_tls else others,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("ucx_tls", ["tcp,self", "posix,sysv,tcp,self", ""])
def test_nixl(ucx_tls: str) -> None:
    done = check("right", "full", ucx_tls=ucx_tls)
    assert done.returncode == 0, done.stderr[-3000:]


def test_pages_in_the_wrong_places_are_noticed() -> None:
    done = check("swapped", "off", ucx_tls="tcp,self")
    assert done.returncode == 1
    assert "AssertionError: check_pages" in done.stderr
