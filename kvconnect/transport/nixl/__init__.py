"""Transport over NIXL: the source writes pages directly into the reader's memory.

Connections, authentication, messages, and pages for peers without NIXL use ``tcp``.
"""

from kvconnect.transport.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
