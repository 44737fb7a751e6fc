"""Files of keys, tokens and certificates: read at the start, and again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvconnect.changed_files import Changes
from kvconnect.errors import ConfigError
from kvconnect.router.api_keys import ApiKey, parse_api_keys
from kvconnect.secret_files import read_secret_text

logger = logging.getLogger(__name__)

EVERY_S = 2.0  # between two looks at the files


def read_api_keys(path: str) -> tuple[ApiKey, ...]:
    """Return the clients' keys in a file.

    Raises:
        ConfigError: the file cannot be read, or one of its lines is no key.
    """
    return parse_api_keys("api-key-file", path, read_secret_text("api-key-file", path))


def read_admin_token(path: str) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: the file cannot be read, or holds no token.
    """
    token = read_secret_text("admin-token-file", path)
    if not 16 <= len(token) <= 4096 or not token.isascii() or len(token.split()) > 1:
        raise ConfigError("admin-token-file", path, "put a token of 16 characters or more in it")
    return token


class WatchedFiles(NamedTuple):
    """Files that belong together, and what takes what is in them. ``load`` raises
    :class:`ConfigError` or :class:`OSError` if they are of no use."""

    paths: tuple[str, ...]
    load: Callable[[], None]


async def follow(watched: Sequence[WatchedFiles]) -> None:
    """Load files now, and again whenever they change. Those that are of no use change nothing, and
    are logged once."""
    looks = [(files, Changes(files.paths)) for files in watched]
    for files in watched:  # they may have changed since the flags were read
        _load(files, at_start=True)
    while True:
        await asyncio.sleep(EVERY_S)
        for files, changes in looks:
            if changes.found():
                _load(files)


def _load(files: WatchedFiles, *, at_start: bool = False) -> None:
    names = ", ".join(files.paths)
    try:
        files.load()
    except (ConfigError, OSError) as error:
        why = error.fix if isinstance(error, ConfigError) else error
        logger.warning("%s changed, and the former content stays in use: %s", names, why)
    else:
        if not at_start:
            logger.info("%s changed and was read again", names)


def take_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Have new connections of a server use a certificate.

    Raises:
        OSError: it cannot be used, and the former one stays in use.
    """
    # Two files that do not belong together would leave the context without a key.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    context.load_cert_chain(certificate, key)
