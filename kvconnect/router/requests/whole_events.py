"""Streams of server-sent events, cut into whole ones. Pure."""

from __future__ import annotations

END = b"\n\n"
MOST_EVENT = 1 << 24
"""Bytes of one event. vLLM's first may have all token ids of the prompt, the last all text."""


class WholeEvents:
    """Cuts a stream into events.

    Attributes:
        too_long: an event is over the size limit.
    """

    def __init__(self) -> None:
        self.too_long = False
        self._partial = b""

    @property
    def cut(self) -> bool:
        """Whether the stream ends within an event so far."""
        return bool(self._partial)

    def of(self, chunk: bytes) -> list[bytes]:
        """Return the events that end with a chunk, without the empty line at their end."""
        *whole, self._partial = (self._partial + chunk).split(END)
        self.too_long = len(self._partial) > MOST_EVENT
        return whole
