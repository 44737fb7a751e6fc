"""Setup of one connection: TCP, TLS, authentication."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Iterator

from kvconnect.errors import Refused
from kvconnect.protocol.auth import ClientAuth, ServerAuth
from kvconnect.transport.access_policy import wrap
from kvconnect.transport.tcp.event_loop import READ, WRITE
from kvconnect.transport.tcp.sockets import read_some, write_some

_READ_BYTES = 4096  # more than any handshake message


class Handshake:
    """Connects (as a client), sets up TLS (with a context) and authenticates.

    Attributes:
        sock: the socket; another object once TLS is set up, with the same descriptor ``fd``.
        heard: the other side has sent something that may begin a proof.

    ``host`` is where a client connects to; a certificate that names addresses must name it.
    """

    def __init__(
        self,
        sock: socket.socket,
        auth: ClientAuth | ServerAuth,
        tls: ssl.SSLContext | None,
        host: str = "",
    ) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.auth = auth
        self.heard = False
        self._tls = tls
        self._host = host
        self._steps = self._proceed()

    def advance(self) -> int:
        """Continue without waiting; return the event mask to wait for, 0 once done.

        Raises:
            Refused, ProtocolError: see :mod:`kvconnect.protocol.auth`; field ``tls`` in addition.
            OSError, EOFError: the connection broke.
        """
        return next(self._steps, 0)

    def _proceed(self) -> Iterator[int]:
        if isinstance(self.auth, ClientAuth):
            yield WRITE
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
        if self._tls:
            yield from self._set_up_tls(self._tls)
        try:
            yield from self._authenticate()
        except Refused:
            write_some(self.sock, self.auth.farewell)
            raise
        except ssl.SSLError as error:  # TLS 1.3 tells a client only now that it was refused
            raise Refused("tls", f"TLS: {error}") from error

    def _set_up_tls(self, tls: ssl.SSLContext) -> Iterator[int]:
        wrapped = wrap(self.sock, tls, isinstance(self.auth, ServerAuth))
        self.sock = wrapped
        while True:
            try:
                wrapped.do_handshake()
                _check_address(wrapped, self._host)
                return
            except ssl.SSLWantReadError:
                yield READ
                self.heard = True
            except ssl.SSLWantWriteError:
                yield WRITE
            except ssl.SSLError as error:
                raise Refused("tls", f"TLS: {error}") from error

    def _authenticate(self) -> Iterator[int]:
        auth = self.auth
        out = bytearray(auth.start() if isinstance(auth, ClientAuth) else b"")
        view = memoryview(bytearray(_READ_BYTES))
        while True:
            while out:
                count = write_some(self.sock, out)
                del out[:count]
                if not count:
                    yield WRITE
            if auth.done:
                return
            got = read_some(self.sock, view)
            if got is None:
                yield READ
            elif got == 0:
                raise EOFError("closed by the other side before it was authenticated")
            else:
                out += auth.feed(bytes(view[:got]))
                self.heard = True


def _check_address(sock: ssl.SSLSocket, host: str) -> None:
    """Check that a certificate that names addresses names ``host``, so that one stolen from
    another machine is useless here. A certificate without addresses is good for any host."""
    names = (sock.getpeercert() or {}).get("subjectAltName", ())
    named = [str(pair[1]).strip() for pair in names if pair[0] == "IP Address"]
    if host and named and ipaddress.ip_address(host) not in map(ipaddress.ip_address, named):
        raise Refused(
            "tls", f"the certificate at {host} is for {', '.join(named)}: another engine's"
        )
