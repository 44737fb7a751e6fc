"""Connected pairs of TCP transports with short deadlines, for tests."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvconnect.testing.page_memory import PageMemory
from kvconnect.testing.proxy import FaultProxy
from kvconnect.testing.transport import ConnectedPair, Side
from kvconnect.transport import ConnectionOptions, Security, make_transport
from kvconnect.transport.base import PeerDown, PeerUp, Transport

QUICK = ConnectionOptions(
    heartbeat_s=0.1, dead_after_s=2.0, silent_s=2.0, stall_s=1.0, digest="full"
)
NIXL_QUICK = replace(QUICK, local=True, stall_s=5.0)
OPEN = Security()


def tcp(security: Security = OPEN, **options: object) -> Transport:
    return make_transport("tcp", security, replace(QUICK, **options))  # type: ignore[arg-type]


@contextmanager
def side(security: Security = OPEN, nbytes: int = 1 << 20, **options: object) -> Iterator[Side]:
    transport = tcp(security, **options)
    try:
        yield Side(transport, PageMemory(nbytes, seed=1))
    finally:
        transport.close()


@contextmanager
def through_proxy(
    nbytes: int = 4 << 20, **options: object
) -> Iterator[tuple[ConnectedPair, FaultProxy]]:
    """A reader that reaches its source through a proxy: pages go ``down``."""
    with side(nbytes=nbytes, **options) as reader, side(nbytes=nbytes, **options) as source:
        reader.memory.data[:] = bytes(nbytes)
        with FaultProxy(*source.transport.listen("127.0.0.1", 0)) as proxy:
            source.transport.listen = lambda *_: proxy.address  # type: ignore[method-assign]
            yield ConnectedPair(reader, source), proxy


def result(reader: Side, address: tuple[str, int]) -> PeerUp | PeerDown:
    """Connect, and return what came of it."""
    number = reader.transport.connect(*address)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        reader.poll()
        events: list[PeerUp | PeerDown] = [*reader.of(PeerUp), *reader.of(PeerDown)]
        for event in events:
            if event.peer == number:
                return event
    raise AssertionError("neither up nor down")


def outcome(reader: Side, address: tuple[str, int]) -> PeerDown:
    """Connect, and return how that failed."""
    found = result(reader, address)
    assert isinstance(found, PeerDown), found
    return found


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "kvconnect" in thread.name}


def threads_after_close() -> set[str]:
    """Return the threads that do not end. A thread's last act, such as to log why it died, comes
    after it has told its owner."""
    end = time.monotonic() + 20
    for thread in threading.enumerate():
        if "kvconnect" in thread.name:
            thread.join(max(0.0, end - time.monotonic()))
    return threads()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def make_certificates(folder: Path, name: str = "worker", alternative: str = "") -> Security:
    """Make a certificate authority in ``folder`` and one certificate of it, with an alternative
    name such as ``IP:127.0.0.1`` if there is one."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        *("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt"),
        *("-subj", "/CN=authority", "-days", "2"),
    )
    openssl("req", *curve, "-keyout", "tls.key", "-out", "tls.csr", "-subj", f"/CN={name}")
    extension = ()
    if alternative:
        (folder / "ext").write_text(f"subjectAltName={alternative}")
        extension = ("-extfile", "ext")
    openssl(
        *("x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-out", "tls.crt", "-days", "2", *extension),
    )
    paths = [str(folder / file) for file in ("tls.crt", "tls.key", "ca.crt")]
    return Security(tls_cert=paths[0], tls_key=paths[1], tls_ca=paths[2])
