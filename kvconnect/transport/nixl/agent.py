"""One NIXL agent: KVConnect's errors, and no polling thread that spins.

NIXL (https://github.com/ai-dynamo/nixl) moves bytes with UCX, libfabric and others. Its Python
class ``nixl_agent`` starts a progress thread that never sleeps and occupies one core. This module
uses the bindings below that class, where the pause can be set.
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
from typing import Any

import numpy as np

from kvconnect.cuda import has_context
from kvconnect.errors import ConfigError, Misuse, TransferFailed
from kvconnect.protocol.nixl_messages import NixlOffer, metadata_error
from kvconnect.transport.base import MemoryRegion
from kvconnect.transport.nixl.descriptors import Ints

logger = logging.getLogger(__name__)

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""Builds of NIXL, by CUDA version; for CPU memory both work."""

POLL_US = 1000  # of the progress thread; a notification takes 40 us all the same
_SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES")  # they decide which transport UCX uses
_MAX_NOTIFICATIONS = 1 << 16  # of one connection, not asked for yet
_INFINIBAND = Path("/sys/class/infiniband")


class NixlAgent:
    """All methods are for one thread, which needs a CUDA context if a region is on a device.

    ``offer`` is for the greeting to the other side. ``local``: no other machine can reach it.

    Raises:
        ConfigError: NIXL, its backend or this memory cannot be used; the message says why.
        Misuse: the calling thread has no context.
    """

    def __init__(self, backend: str, areas: Sequence[MemoryRegion], *, local: bool) -> None:
        if any(area.device >= 0 for area in areas) and not has_context():
            raise Misuse("NIXL is started in a thread that has no CUDA context")
        package = find_package(sys.modules.get("torch"), any(a.device >= 0 for a in areas))
        _prepare_environment(local=local)
        self._nixl = nixl = _load(package)
        self._errors: tuple[type[Exception], ...] = tuple(
            kind for name, kind in vars(nixl).items() if name.endswith("Error")
        )
        # Unique for each start: a name that was used before is refused, or worse, remembered.
        name = f"kvconnect-{os.getpid()}-{secrets.token_hex(8)}"
        config = nixl.nixlAgentConfig()
        # NIXL gives this thread no CUDA context (its issue 2102), which is for NIXL to mend:
        # without the thread nothing moves on a side that has nothing to ask for.
        config.useProgThread = True
        config.pthrDelay = POLL_US
        config.captureTelemetry = True
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self._notifications: dict[bytes, set[bytes]] = {}  # that arrived, by session
        self._peers: Counter[str] = Counter()  # connections to each other side
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
            )
        except self._errors as error:
            raise ConfigError("transport", package, f"NIXL does not start: {error}") from error
        # Where our own has another form, that of a later NIXL, so has the other side's.
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
            TransferFailed: NIXL cannot read it.
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
        del self._peers[name]
        try:
            self._agent.invalidateRemoteMD(name)
        except self._errors as error:
            logger.debug("forgetting %s: %s", name, error)

    def write(
        self,
        peer: str,
        pieces: tuple[Ints, Ints, Ints],
        devices: tuple[int, int],
        notification: bytes,
    ) -> int:
        """Start to write pieces (addresses here, there, lengths) into the other side's memory;
        the other side receives ``notification`` when they are complete. Return a handle.

        ``devices`` are those of the two memories. May block for as long as the copy takes.

        Raises:
            TransferFailed: an address that is not registered, or the other side is gone.
        """
        ours, theirs, lengths = pieces
        try:
            handle: int = self._agent.createXferReq(
                self._nixl.NIXL_WRITE,
                self._descs(ours, lengths, devices[0]),
                self._descs(theirs, lengths, devices[1]),
                peer,
                "",
                [],
            )
        except self._errors as error:
            raise TransferFailed(f"NIXL refuses to write these pages: {error}") from error
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
        if self._agent is None:
            return  # closing the agent freed it
        try:
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            logger.debug("releasing a transfer: %s", error)

    def expect_notifications(self, session: bytes) -> None:
        """Keep this session's notifications from now on; those of unknown sessions are dropped."""
        self._notifications.setdefault(session, set())

    def take_notification(self, session: bytes, notification: bytes) -> bool:
        """Say whether a notification has arrived, and forget it if so. Then its pages have arrived.

        A notification begins with its session.

        Raises:
            TransferFailed: NIXL cannot be asked.
        """
        if notification not in self._notifications.get(session, ()):
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
        """End the agent: after this no network write can reach this memory."""
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
    """Return the name of the NIXL build to load.

    ``on_device``: it must fit the CUDA version that ``torch``, a module or None, is built for.

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
    """Set what UCX reads when it is loaded, where the user has not."""
    if local:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())):
        # With a distribution's libibverbs beside it, UCX crashes at exit.
        os.environ.setdefault("UCX_MODULES", "^ib")
    # These write into another process without its agent: ending that would not stop them.
    os.environ.setdefault("UCX_TLS", "^cma,knem,xpmem")
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # or memory grows without end


def _device_name(device: int) -> str:
    return "CPU" if device < 0 else f"cuda:{device}"
