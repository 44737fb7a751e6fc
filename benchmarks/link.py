"""Two network namespaces on this machine, and between them a link whose rate can be set.

The link is a ``veth`` pair with a token bucket (``tc tbf``) at either end. Each namespace also has
a way to the rest of the machine, never shaped, over which a client reaches servers inside. Needs
root (or CAP_NET_ADMIN and CAP_SYS_ADMIN), ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from types import TracebackType

BURST_S = 0.002  # what the bucket holds: this long at full rate,
LEAST_BURST = 64 << 10  # but not less than the largest packet that TCP hands to a device
QUEUE = "5ms"  # what waits longer is dropped


class Unavailable(RuntimeError):
    """This system does not let us make or shape a link; the message says what failed."""


@dataclass(frozen=True)
class End:
    """One end of the link: a namespace (``""``: none), its device, and its addresses.

    ``address`` is reached from the other end, over the link; ``control`` from outside, beside it.
    """

    namespace: str
    device: str
    address: str
    control: str
    outside: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What a command starts with to run in the namespace."""
        return ("ip", "netns", "exec", self.namespace) if self.namespace else ()


LOOPBACK = End("", "lo", "127.0.0.1", "127.0.0.1", "127.0.0.1")


class Link:
    """Two namespaces and the link between them; use as a context manager."""

    def __init__(self) -> None:
        tag = f"kvc{os.getpid()}"
        self.ends = tuple(
            End(
                namespace=f"{tag}{side}",
                device=f"{tag}{side}",
                address=f"10.77.0.{number}",
                control=f"10.78.{number}.2",
                outside=f"10.78.{number}.1",
            )
            for number, side in enumerate("ab", start=1)
        )

    def __enter__(self) -> Link:
        """Make it.

        Raises:
            Unavailable: the system does not permit that.
        """
        try:
            self._make()
            self.shape(1e9)  # say at once if that is not possible
            self.shape(None)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def shape(self, bits_per_s: float | None) -> None:
        """Limit the rate, each way by itself; None takes the limit away.

        Raises:
            Unavailable: ``tc`` cannot do it.
        """
        for end in self.ends:
            kind: tuple[str, ...] = ("noqueue",)
            if bits_per_s is not None:
                burst = max(LEAST_BURST, int(bits_per_s / 8 * BURST_S))
                rate = ("rate", f"{bits_per_s:.0f}bit", "burst", f"{burst}b")
                kind = ("tbf", *rate, "latency", QUEUE)
            _run(*end.inside, "tc", "qdisc", "replace", "dev", end.device, "root", *kind)

    def _make(self) -> None:
        a, b = self.ends
        for end in self.ends:
            _run("ip", "netns", "add", end.namespace)
        pair = ("link", "add", a.device, "netns", a.namespace, "type", "veth")
        _run("ip", *pair, "peer", "name", b.device, "netns", b.namespace)
        for end in self.ends:
            into = ("ip", "-n", end.namespace)
            control = ("peer", "name", "control", "netns", end.namespace)
            _run("ip", "link", "add", end.device, "type", "veth", *control)
            _run("ip", "addr", "add", f"{end.outside}/30", "dev", end.device)
            _run("ip", "link", "set", end.device, "up")
            _run(*into, "addr", "add", f"{end.control}/30", "dev", "control")
            _run(*into, "addr", "add", f"{end.address}/24", "dev", end.device)
            for device in ("lo", "control", end.device):
                _run(*into, "link", "set", device, "up")

    def _remove(self) -> None:
        """Remove what there is of it; a namespace goes with the last process in it."""
        for end in self.ends:
            for what in (("link", "del", end.device), ("netns", "del", end.namespace)):
                with contextlib.suppress(Unavailable):
                    _run("ip", *what)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(command)}: {error.stderr.strip()}") from error
