"""Transport over TCP: one control connection and a few data connections per peer.

Control connections belong to one event-loop thread (``event_loop``, ``listener``, ``peer``,
``control_connection``). Data connections (``data_connection``) have threads of their own, which
move the frames of ``send_queue`` without holding the GIL. A page to send passes ``transport``,
``send_queue``, ``data_connection`` and ``kvconnect.transport.page_io``.
"""

from __future__ import annotations

from kvconnect.transport.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
