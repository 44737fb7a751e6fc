"""A shared tier on an object store: S3 and compatible ones, GCS, Azure, or a file system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from kvconnect.errors import ConfigError, TransferFailed
from kvconnect.secret_files import read_secret
from kvconnect.settings.stores import ONE_BY_ONE, ObjectSettings
from kvconnect.tiers.backends.base import BlockOutcome
from kvconnect.tiers.backends.record_seals import RecordKeys
from kvconnect.tiers.backends.remote import RemoteStore, Server

T = TypeVar("T")

_FILE = "file://"
_PART = 200  # characters of a path component; file systems allow 255


def make_object_store(
    settings: ObjectSettings, fingerprint: bytes, keys: RecordKeys | None = None
) -> RemoteStore:
    """Return a store with the settings of :class:`ObjectSettings`.

    An unreachable server is not an error.

    Raises:
        ConfigError: a setting cannot be used.
    """
    return RemoteStore(ObjectServer(settings), settings.prefix, fingerprint, keys=keys)


class ObjectServer(Server):
    """One object per value, several requests at a time."""

    one_by_one = ObjectSettings in ONE_BY_ONE

    def __init__(self, options: ObjectSettings) -> None:
        self._url = options.url
        self._client = _client(options)
        self._threads = ThreadPoolExecutor(
            options.connections, thread_name_prefix="kvconnect-object"
        )

    def __repr__(self) -> str:
        return f"objects at {self._url}"

    def store(self, names: Sequence[str], values: Sequence[memoryview]) -> list[BlockOutcome]:
        def put(pair: tuple[str, memoryview]) -> BlockOutcome:
            obstore.put(self._client, _path(pair[0]), pair[1], use_multipart=False)
            return BlockOutcome.OK

        return self._each(put, list(zip(names, values, strict=True)))

    def load(self, names: Sequence[str], most: int) -> list[memoryview | None]:
        def get(name: str) -> memoryview | None:
            try:
                found = obstore.get(self._client, _path(name))  # receives only the headers
                if found.meta["size"] <= most:
                    return memoryview(found.bytes())
                return memoryview(
                    obstore.get_range(self._client, _path(name), start=0, length=most)
                )
            except FileNotFoundError:
                return None

        return self._each(get, names)

    def sizes(self, names: Sequence[str]) -> list[int]:
        return self._each(self._size, names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        def drop(name: str) -> bool:
            there = self._size(name) > 0
            if there:
                obstore.delete(self._client, _path(name))
            return there

        return self._each(drop, names)

    def close(self) -> None:
        self._threads.shutdown()

    def _size(self, name: str) -> int:
        try:
            return int(obstore.head(self._client, _path(name))["size"])
        except FileNotFoundError:
            return 0

    def _each(self, request: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        try:
            return list(self._threads.map(request, items))
        except (BaseError, OSError) as error:
            raise TransferFailed(f"{self!r}: {error}") from error


def _client(options: ObjectSettings) -> Any:
    config = _config(options.config_file)
    try:
        if options.url.startswith(_FILE):
            return LocalStore(options.url.removeprefix(_FILE), mkdir=True)
        timeout = timedelta(seconds=options.timeout_s)
        http = str(config.get("endpoint", "")).startswith("http://")
        return from_url(
            options.url,
            config=config,
            client_options={"timeout": timeout, "connect_timeout": timeout, "allow_http": http},
            # A server may be busy for a moment. If it stays busy, the circuit breaker opens.
            retry_config={"max_retries": 3, "retry_timeout": timeout},
        )
    except (BaseError, OSError, ValueError, TypeError) as error:
        fix = f"use a bucket such as s3://bucket, or file:///folder: {error}"
        raise ConfigError("url", options.url, fix) from error


def _config(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return msgspec.json.decode(read_secret("config_file", path), type=dict[str, str | bool])
    except msgspec.DecodeError as error:
        fix = f"name a file with one JSON object of texts: {error}"
        raise ConfigError("config_file", path, fix) from error


def _path(name: str) -> str:
    """Return an object's path. The suffix ``.kv`` keeps objects and folders apart."""
    folder, _, key = name.rpartition("/")
    parts = [key[start : start + _PART] for start in range(0, len(key), _PART)]
    return "/".join([folder, *parts]) + ".kv"
