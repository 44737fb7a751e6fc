"""The transport seam with a NIXL path beside the data connections of TCP."""

from __future__ import annotations

from functools import partial

from kvconnect.transport.base import LinkOptions, Memory, Security
from kvconnect.transport.nixl.mover import Mover
from kvconnect.transport.nixl.rail import NixlRail
from kvconnect.transport.tcp import TcpTransport


class NixlTransport(TcpTransport):
    """Peers that have NIXL too get the path ``nixl``; all have ``tcp``.

    The source writes, the reader never reads: destinations are the reader's own words, and what a
    reader has to wait for before it uses a block again is the source's word, or the end of the
    agent that writes come through.
    """

    def __init__(self, security: Security, options: LinkOptions) -> None:
        super().__init__(security, options)
        self._mover: Mover | None = None

    def register(self, memory: Memory) -> None:
        """See the base class.

        Raises:
            ConfigError: NIXL, its backend or this memory cannot be used.
        """
        super().register(memory)
        options = self._shared.options
        self._mover = Mover(options.backend, memory.areas(), local=options.local)
        self._shared.make_rail = partial(NixlRail, self._mover)

    def close(self) -> None:
        super().close()
        if self._mover:
            self._mover.close()
