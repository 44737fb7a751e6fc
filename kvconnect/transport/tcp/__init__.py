"""Hand-off over TCP: one control connection and a few data connections per peer.

Control connections belong to one event-loop thread (``loop``, ``hub``, ``peer``, ``control``);
data connections belong to threads of their own that move pages outside the interpreter lock
(``lane``), told what to do by what is queued and expected (``traffic``). Who may connect is in
``guard``, how a connection proves itself in ``handshake``.
"""

from __future__ import annotations

from kvconnect.transport.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
