"""LoRA adapters of vLLM's requests: which files they are, and whether their KV may be reused.

vLLM names an adapter's blocks by the adapter's name and path. New weights under the same name and
path get the same hashes, and vLLM does not tell connectors when it loads an adapter. So each
adapter's files are observed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvconnect.bounded import remember
from kvconnect.cache.model_identity import adapter_name, model_folder
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.prompt_settings import DEFAULTS, PromptSettings
from kvconnect.errors import Refused
from kvconnect.protocol.prompts import PromptIdentity
from kvconnect.timed_calls import TimedCalls

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MOST_ADAPTERS = 65536  # observed at once; more are not trusted, and use no more memory
MOST_DIGESTS = 4096  # remembered; others are made again
UNCHANGED_S = 3600.0
"""Age of an adapter's files when its first request came, from which on a later look still tells
what the engine loaded. It is long, since the disk may have another clock."""


class _File(NamedTuple):
    """A file's identity. Each change of its bytes changes the last field."""

    name: str
    inode: int
    size: int
    changed_ns: int


@dataclass
class _Adapter:
    """An adapter as its first request named it.

    ``loaded``: its number and whether it is loaded in place.
    """

    loaded: tuple[int, bool]
    files: tuple[_File, ...]
    trusted: bool


class _Named(NamedTuple):
    """An adapter whose first request came while its files could not be looked at, or not read;
    ``at``: seconds since 1970, ``files``: what was seen, if it was."""

    loaded: tuple[int, bool]
    at: float
    files: tuple[_File, ...] | None

    def allows(self, loaded: tuple[int, bool], files: tuple[_File, ...]) -> bool:
        """Whether files that are seen now are those that the engine loaded."""
        if self.files is not None:
            return loaded == self.loaded and files == self.files
        latest_ns = (self.at - UNCHANGED_S) * 1e9
        return loaded == self.loaded and all(file.changed_ns < latest_ns for file in files)


class Adapters:
    """The adapters that requests named since the last :meth:`reset`, by (name, path). Owned by the
    scheduler's thread.

    An adapter is trusted as long as all of its requests name the same load of it (its number and
    ``load_inplace``) and its files stay as the first request found them. Else some of its KV may be
    of other weights than the hashes say, and none of it is reused until the next reset. In a step
    in which its files cannot be looked at soon, it is not trusted either.

    Attributes:
        settings: of the engine, for its prompts' media and adapters.
    """

    def __init__(self, settings: PromptSettings = DEFAULTS) -> None:
        self.settings = settings
        self._known: dict[tuple[str, str], _Adapter] = {}
        self._late: dict[tuple[str, str], _Named] = {}  # those whose files were not seen in time
        self._checked: dict[tuple[str, str], bool] = {}  # in this step: known to be the same
        self._contents: dict[str, tuple[tuple[_File, ...], str]] = {}  # by path
        self._lock = threading.Lock()  # of the contents, which are remembered where they are read
        self._call = TimedCalls("kvconnect-adapters")
        # An adapter that takes long to read must not keep others' files from being looked at.
        self._read_call = TimedCalls("kvconnect-adapter-contents")

    def next_step(self) -> None:
        """Read each adapter's file times again when it is needed next."""
        self._checked.clear()

    def reset(self) -> None:
        """Forget all adapters: no KV of theirs is stored any more."""
        self._known.clear()
        self._late.clear()
        self._checked.clear()

    def trusted(self, lora: LoRARequest) -> bool:
        """Return whether all KV of this adapter is of the weights that it has now."""
        name = lora.lora_name, lora.lora_path
        known = self._known.get(name) or self._first_look(name, lora)
        if known is None or not known.trusted:
            return False
        if known.loaded != (lora.lora_int_id, lora.load_inplace):
            known.trusted = False
        elif name not in self._checked:
            try:
                known.trusted = self._checked[name] = known.files == self._files(lora.lora_path)
            except TimeoutError:  # a later step sees whether they have changed
                self._checked[name] = False
        if not known.trusted:
            text = "adapter %s of %s was loaded again or its files changed: its KV is not reused"
            logger.warning(text, lora.lora_name, lora.lora_path)
        return known.trusted and self._checked[name]

    def _first_look(self, name: tuple[str, str], lora: LoRARequest) -> _Adapter | None:
        """Look at an adapter that is not known yet; None: its files cannot be looked at now."""
        late = self._late.get(name)
        if name in self._checked or (not late and self._is_full()):
            return None
        loaded = lora.lora_int_id, lora.load_inplace
        files: tuple[_File, ...] | None = None
        try:
            files = self._files(lora.lora_path)
            contents = self._contents_of(lora.lora_path, files)
        except TimeoutError:
            self._late.setdefault(name, _Named(loaded, time.time(), files))
            self._checked[name] = False
            return None
        self._late.pop(name, None)
        trusted = bool(contents and files) and (late is None or late.allows(loaded, files))
        if contents and not trusted:
            text = "the files of adapter %s of %s were seen too late: its KV is not reused"
            logger.warning(text, lora.lora_name, lora.lora_path)
        self._known[name] = _Adapter(loaded, files, trusted)
        self._checked[name] = trusted
        return self._known[name]

    def _is_full(self) -> bool:
        return len(self._known) + len(self._late) >= MOST_ADAPTERS

    def scope(self, lora: LoRARequest) -> bytes:
        """Return what separates an adapter's blocks from those of others in secondary tiers. All
        engines agree on it; for an adapter that is not trusted, or whose files cannot be read now,
        it is random."""
        contents = self.contents(lora) if self.trusted(lora) else ""
        return (contents + self.settings.modules).encode() if contents else os.urandom(16)

    def contents(self, lora: LoRARequest) -> str:
        """Return a digest of an adapter's weights and configuration files as they are now; empty if
        they cannot be read, or not soon. May block for tens of milliseconds when the files have
        changed."""
        try:
            return self._contents_of(lora.lora_path, self._files(lora.lora_path))
        except TimeoutError:
            return ""

    def _contents_of(self, path: str, files: tuple[_File, ...]) -> str:
        """Return the contents of an adapter that has these files. Raises :class:`TimeoutError` if
        they are not known soon."""
        with self._lock:
            known = self._contents.get(path)
            if known is not None and known[0] == files:
                remember(self._contents, path, known, MOST_DIGESTS)
                return known[1]
        return self._read_call(partial(self._read, path, files))

    def _read(self, path: str, files: tuple[_File, ...]) -> str:
        """Return the contents. They are remembered also if nobody waits for them any more: the next
        request must not wait as long again."""
        contents = adapter_name(path)
        with self._lock:
            remember(self._contents, path, (files, contents), MOST_DIGESTS)
        return contents

    def _files(self, path: str) -> tuple[_File, ...]:
        """Return the files of an adapter; empty if they cannot be read. Raises
        :class:`TimeoutError` if that is not known soon."""
        try:
            return self._call(partial(_files_of, path))
        except TimeoutError:
            raise
        except OSError:  # it is being replaced, or its disk fails
            return ()

    def prompt_identity(self, request: Request) -> PromptIdentity:
        """See :func:`translate.prompt_identity`. Also raises :class:`Refused` if the weights of the
        request's adapter are not known: the other engine's may be others."""
        lora = request.lora_request
        contents = self.contents(lora) if lora else ""
        if lora and not contents:
            fix = "load it from a folder that each engine can read"
            raise Refused("params", f"no file tells the weights of adapter {lora.name}: {fix}")
        media = self.settings.media.hex()
        return translate.prompt_identity(request, contents + self.settings.modules, media)


def _files_of(path: str) -> tuple[_File, ...]:
    folder = model_folder(path, None)
    return tuple(sorted(_entries(folder))) if folder else ()


def _entries(folder: Path) -> Iterator[_File]:
    with os.scandir(folder) as entries:
        for entry in entries:
            found = entry.stat()
            yield _File(entry.name, found.st_ino, found.st_size, found.st_ctime_ns)
