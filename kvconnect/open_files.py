"""How many files this process may have open: each connection needs one."""

from __future__ import annotations

import errno
import os
import resource

_MANY = 1 << 20  # where there is no limit


def limit() -> int:
    """Return how many files may be open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else min(soft, _MANY)


def raise_limit() -> None:
    """Raise the limit as far as the process may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def none_left() -> bool:
    """Return whether no file can be opened now."""
    try:
        os.close(os.open("/", os.O_PATH))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False
