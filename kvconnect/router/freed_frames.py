"""Frees what an error's frames hold, when the error has been dealt with."""

from __future__ import annotations

import traceback
from types import TracebackType


class FreedFrames:
    """Clears the local variables of the frames that an error leaves; a context manager.

    A frame that refers to the error, or to the task that raised it, is a reference cycle. It would
    keep the request's body until the garbage collector comes.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
