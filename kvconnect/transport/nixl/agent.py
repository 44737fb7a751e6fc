"""Wrapper of one NIXL agent: raises KVConnect's errors, and its progress thread sleeps.

NIXL (https://github.com/ai-dynamo/nixl) moves bytes with UCX, libfabric and others. Its Python
class ``nixl_agent`` starts a progress thread that never sleeps and occupies one core. This module
uses the lower-level bindings, where the thread's pause can be set.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvconnect.cuda import has_context
from kvconnect.errors import ConfigError, Misuse, TransferFailed
from kvconnect.protocol.nixl_messages import NixlOffer
from kvconnect.protocol.nixl_metadata import metadata_error
from kvconnect.transport.base import MemoryRegion
from kvconnect.transport.nixl.descriptors import Ints, PairedRuns

logger = logging.getLogger(__name__)

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""Packages of NIXL, one per CUDA version; either works for CPU memory."""

POLL_US = 10_000  # pause of the progress thread: arrivals wake it, but for a fault of UCX
_SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES")  # environment variables that select UCX's transport
_MAX_NOTIFICATIONS = 1 << 16  # of one connection that were not taken yet
_INFINIBAND = Path("/sys/class/infiniband")


class WriteDevices(NamedTuple):
    """Numbers of the devices whose memory is read here and written there."""

    here: int
    there: int


class NixlAgent:
    """A NIXL agent with registered memory. All methods are for one thread, which needs a CUDA
    context if a region is on a device.

    ``offer`` is sent in the greeting. ``local``: other machines cannot reach the agent. ``owner``:
    see :class:`NixlOffer`.

    Raises:
        ConfigError: NIXL, its backend or this memory cannot be used; the message says why.
        Misuse: a region is on a device and the calling thread has no CUDA context.
    """

    def __init__(
        self, backend: str, areas: Sequence[MemoryRegion], *, local: bool, owner: str = ""
    ) -> None:
        if any(area.device >= 0 for area in areas) and not has_context():
            raise Misuse("NIXL is started in a thread that has no CUDA context")
        package = find_package(sys.modules.get("torch"), any(a.device >= 0 for a in areas))
        _prepare_environment(local=local)
        self._nixl = nixl = _load(package)
        self._errors: tuple[type[Exception], ...] = tuple(
            kind for name, kind in vars(nixl).items() if name.endswith("Error")
        )
        # Unique for each start: NIXL refuses a name used before, or reuses what it knows of it.
        name = f"kvconnect-{os.getpid()}-{secrets.token_hex(8)}"
        config = nixl.nixlAgentConfig()
        # NIXL gives its progress thread no CUDA context (NIXL issue 2102). The thread is used
        # nevertheless: without it, nothing moves on a side that makes no calls.
        config.useProgThread = True
        config.pthrDelay = POLL_US
        config.captureTelemetry = True
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self._notifications: dict[bytes, set[bytes]] = {}  # arrived and not taken, by session
        self._peers: Counter[str] = Counter()  # connections, by agent name
        self._handles: set[int] = set()  # of writes that were not released
        try:
            self._agent: Any = nixl.nixlAgent(name, config)
            self._create_backend(backend)
            for area in areas:
                self._register(area)
            self.offer = NixlOffer(
                backend=backend,
                version=_version(package),
                agent=name,
                metadata=self._agent.getLocalMD(),
                owner=owner,
            )
        except self._errors as error:
            raise ConfigError("transport", package, f"NIXL does not start: {error}") from error
        # A later NIXL may use another form on both sides; the other side's is not checked then.
        self._form_is_known = not metadata_error(self.offer.metadata, name, backend)
        settings = ", ".join(f"{key}={os.environ.get(key, 'unset')}" for key in _SETTINGS)
        logger.info("%s %s, backend %s, %s", package, self.offer.version, backend, settings)

    def _create_backend(self, backend: str) -> None:
        try:
            self._agent.createBackend(backend, {})
        except self._errors as error:
            fix = f"NIXL cannot load this backend ({error}); use one of its plugins: "
            plugins = ", ".join(sorted(self._agent.getAvailPlugins()))
            raise ConfigError("nixl_backend", backend, fix + plugins) from error

    def _register(self, area: MemoryRegion) -> None:
        kind, device = self._kind(area.device)
        try:
            descs = self._nixl.nixlRegDList(kind, [(area.address, area.nbytes, device, "")])
            self._agent.registerMem(descs, [])
        except self._errors as error:
            what = f"{area.nbytes} bytes of {_device_name(area.device)} memory"
            fix = f"NIXL cannot register it ({error}): check ulimit -l and UCX_TLS, or use tcp"
            raise ConfigError("transport", what, fix) from error

    def add_peer(self, offer: NixlOffer) -> str:
        """Load the other side's metadata; return its agent's name.

        Raises:
            TransferFailed: NIXL cannot read the metadata.
        """
        refusal = "NIXL cannot read the other side's metadata"
        if self._form_is_known:
            why = metadata_error(offer.metadata, offer.agent, offer.backend)
            if why:
                raise TransferFailed(f"{refusal}: {why}")
        try:
            name: bytes = self._agent.loadRemoteMD(offer.metadata)
        except self._errors as error:
            raise TransferFailed(f"{refusal}: {error}") from error
        if name.decode(errors="replace") != offer.agent:
            raise TransferFailed(f"{refusal}: it names another agent")
        self._peers[offer.agent] += 1
        return offer.agent

    def remove_peer(self, name: str) -> None:
        """Undo one ``add_peer``."""
        if self._agent is None or not self._peers[name]:
            return
        self._peers[name] -= 1
        if self._peers[name]:
            return  # another connection to the same process still needs it
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self._peers[name]
        try:
            self._agent.invalidateRemoteMD(name)
        except self._errors as error:
            logger.debug("forgetting %s: %s", name, error)

    def write(
        self,
        peer: str,
        pieces: PairedRuns,
        devices: WriteDevices,
        notification: bytes,
    ) -> int:
        """Start writing into the other side's memory; return a handle. The other side receives
        ``notification`` once the write is complete. May block for as long as the copy takes.

        Raises:
            TransferFailed: an address is not registered, or the other side is gone.
        """
        try:
            handle: int = self._agent.createXferReq(
                self._nixl.NIXL_WRITE,
                self._descs(pieces.here, pieces.lengths, devices.here),
                self._descs(pieces.there, pieces.lengths, devices.there),
                peer,
                "",
                [],
            )
        except self._errors as error:
            raise TransferFailed(f"NIXL refuses to write these pages: {error}") from error
        self._handles.add(handle)
        try:
            self._agent.postXferReq(handle, notification)
        except self._errors as error:
            self.release(handle)
            raise TransferFailed(f"NIXL cannot write: {error}") from error
        return handle

    def seconds(self, handle: int) -> float | None:
        """Return the seconds a write took, or None while it is under way.

        Raises:
            TransferFailed: the write failed.
        """
        try:
            if self._agent.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return None
            return float(self._agent.getXferTelemetry(handle).xferDuration) / 1e6
        except self._errors as error:
            raise TransferFailed(f"NIXL could not write: {error}") from error

    def release(self, handle: int) -> None:
        """Free a write's handle; ends the write if it is still under way."""
        if handle not in self._handles:
            return  # freed when the agent was closed
        self._handles.remove(handle)
        try:
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            logger.debug("releasing a transfer: %s", error)

    def expect_notifications(self, session: bytes) -> None:
        """Keep a session's notifications from now on; those of other sessions are dropped."""
        self._notifications.setdefault(session, set())

    def take_notification(self, session: bytes, notification: bytes) -> bool:
        """Return whether a notification, and so its pages, has arrived; forget it if so.

        A notification begins with its session.

        Raises:
            TransferFailed: NIXL cannot be asked.
        """
        if notification not in self._notifications.get(session, ()):
            if self._agent is None:
                raise TransferFailed("the NIXL agent has ended")
            try:
                arrived = self._agent.getNotifs({}, [])
            except self._errors as error:
                raise TransferFailed(f"NIXL cannot look for notifications: {error}") from error
            for each in (
                notification for notifications in arrived.values() for notification in notifications
            ):
                waiting = self._notifications.get(each[: len(session)])
                if waiting is not None and len(waiting) < _MAX_NOTIFICATIONS:
                    waiting.add(each)
        found = notification in self._notifications.get(session, ())
        if found:
            self._notifications[session].discard(notification)
        return found

    def drop_notifications(self, session: bytes) -> None:
        """Forget the notifications of a session that has ended."""
        self._notifications.pop(session, None)

    def close(self) -> None:
        """End the agent. No network write can reach this memory afterwards.

        Writes end before the connections that they use, and these before the agent: UCX may abort
        the process if it is closed with requests under way.
        """
        for handle in list(self._handles):
            self.release(handle)
        for name in list(self._peers):
            self._forget(name)
        self._agent = None

    def _descs(self, addresses: Ints, lengths: Ints, device: int) -> Any:
        kind, number = self._kind(device)
        table = np.empty((len(addresses), 3), np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = addresses, lengths, number
        return self._nixl.nixlXferDList(kind, table)

    def _kind(self, device: int) -> tuple[Any, int]:
        if device < 0:
            return self._nixl.DRAM_SEG, 0
        return self._nixl.VRAM_SEG, device


def find_package(torch: Any, on_device: bool) -> str:
    """Return the name of the NIXL package to load.

    With ``on_device`` it must fit the CUDA version of ``torch``, which is the module or None.

    Raises:
        ConfigError: none is installed, or only one for another CUDA version.
    """
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    wanted = f"nixl_cu{cuda.split('.')[0]}" if cuda else ""
    installed = [name for name in PACKAGES if importlib.util.find_spec(name)]
    if not installed:
        name = (wanted or PACKAGES[0]).replace("_", "-")
        fix = f"NIXL is not installed: pip install {name}, or use 'tcp'"
        raise ConfigError("transport", "nixl", fix)
    if wanted in installed:
        return wanted
    if on_device:
        fix = f"torch is built for CUDA {cuda}: pip install {wanted.replace('_', '-')}"
        raise ConfigError("transport", installed[0], fix)
    return installed[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _load(package: str) -> Any:
    try:
        return importlib.import_module(f"{package}._bindings")
    except (ImportError, OSError) as error:
        fix = f"{package} does not load ({error}): repair it with pip install --force-reinstall "
        fix += f"{package.replace('_', '-')}, or use 'tcp'"
        raise ConfigError("transport", "nixl", fix) from error


def _prepare_environment(*, local: bool) -> None:
    """Set UCX's environment variables, which it reads when loaded, unless the user has."""
    if local:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())):
        # UCX crashes at exit if a distribution's libibverbs is loaded beside it.
        os.environ.setdefault("UCX_MODULES", "^ib")
    # These write into a process without its agent, so ending the agent would not stop them.
    os.environ.setdefault("UCX_TLS", "^cma,knem,xpmem")
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # or memory grows without limit


def _device_name(device: int) -> str:
    return "CPU" if device < 0 else f"cuda:{device}"
