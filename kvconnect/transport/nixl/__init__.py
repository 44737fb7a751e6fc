"""Pages through NIXL, which the source writes into the reader's memory itself.

The control connection, who may connect, and pages for those without NIXL are those of ``tcp``.
"""

from kvconnect.transport.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
