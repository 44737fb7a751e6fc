"""Takes requests apart as they arrive from a client, by httptools (llhttp). Event loop only."""

from __future__ import annotations

from collections.abc import Callable

import httptools

from kvconnect.router.http.http_request import HttpRequest, RequestContent

_MOST_HEAD = 64 * 1024  # bytes of a head, and of any line
_MOST_HEADERS = 64
_VERSIONS = ("1.1", "1.0")
_SHOWN = 200  # characters of an error

Taker = Callable[["HttpRequest"], bool]
"""Takes a request whose head is complete; returns whether its body is wanted."""


class HttpParser:
    """The requests on one connection; the callbacks of httptools.

    Attributes:
        incoming: the request whose body is not complete.
        upgraded: the client goes on in another protocol, which is not spoken here.
        bad: why what follows is no HTTP; empty: it is.
    """

    def __init__(self, take: Taker, whole: Callable[[], None], wanted: Callable[[], None]) -> None:
        """``whole``: is called when a request has arrived whole. ``wanted``: when more of a body is
        to be received."""
        self.incoming: HttpRequest | None = None
        self.upgraded = False
        self.bad = ""
        self._take, self._whole, self._wanted = take, whole, wanted
        self._in_head = True
        self._head_bytes = self._head_count = 0  # of the headers so far
        self._quiet = 0  # bytes received since the library last told something
        self._target, self._headers = b"", dict[str, str]()
        self._native: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    @property
    def held(self) -> int:
        """Bytes of a head that is not complete."""
        return self._head_bytes + self._quiet if self._in_head else 0

    def feed(self, data: bytes) -> None:
        """Parse what was received. After :attr:`upgraded` or :attr:`bad`, nothing is parsed."""
        if self._native is None or self.upgraded or self.bad:
            return
        self._quiet += len(data)
        try:
            self._native.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.upgraded = True
        except httptools.HttpParserError as error:
            self._refuse(str(error.__context__ or error))
        if self._quiet > _MOST_HEAD:
            self._refuse(f"a line has more than {_MOST_HEAD} bytes")

    def close(self) -> None:
        """Parse no more, and refer to nobody."""
        self._native = self.incoming = None

    def on_message_begin(self) -> None:
        """httptools: a request begins."""
        self._in_head = True
        self._head_bytes = self._head_count = 0
        self._target, self._headers = b"", {}

    def on_url(self, target: bytes) -> None:
        """httptools: a part of the target."""
        self._target += target
        self._count(len(target))

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header, or one trailer, which is ignored."""
        self._quiet = 0
        self._count(len(name) + len(value))
        self._head_count += 1
        if self._head_count > _MOST_HEADERS:
            raise ValueError(f"a head has more than {_MOST_HEADERS} headers")
        if not self._in_head:
            return
        key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
        before = self._headers.get(key)
        self._headers[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        """httptools: the head is complete."""
        assert self._native is not None, "it calls"
        self._in_head = False
        head_bytes = self._head_bytes
        self._quiet = self._head_bytes = self._head_count = 0
        version = self._native.get_http_version()
        encoding = self._headers.get("transfer-encoding")
        if version not in _VERSIONS:
            raise ValueError(f"HTTP/{version} is not spoken here")
        if encoding is not None and (version != "1.1" or encoding.lower() != "chunked"):
            raise ValueError("the only transfer encoding is chunked, of HTTP/1.1")
        method = self._native.get_method().decode("latin-1")
        target = self._target.decode("latin-1")
        request = HttpRequest(method, target, self._headers, RequestContent(self._wanted))
        request.head_bytes = head_bytes
        request.old = version == "1.0"
        request.keep_alive = self._native.should_keep_alive()
        if self._take(request):
            self.incoming = request

    def on_chunk_header(self) -> None:
        """httptools: the size of a chunk is known."""
        self._quiet = 0

    def on_body(self, body: bytes) -> None:
        """httptools: a piece of the body."""
        self._quiet = 0
        if self.incoming is not None:
            self.incoming.content.feed(body)

    def on_message_complete(self) -> None:
        """httptools: the request is complete."""
        self._quiet = 0
        if self.incoming is not None:
            self.incoming.content.end()
            self.incoming = None
        self._whole()

    def _count(self, nbytes: int) -> None:
        """Count a part of a head.

        Raises:
            ValueError: it is one too many.
        """
        self._head_bytes += nbytes
        if self._head_bytes > _MOST_HEAD:
            raise ValueError(f"a head has more than {_MOST_HEAD} bytes")

    def _refuse(self, why: str) -> None:
        self.bad = self.bad or " ".join(why.split())[:_SHOWN]
        if self.incoming is not None:
            self.incoming.content.fail(f"the request body is no HTTP: {self.bad}")
            self.incoming.keep_alive = False
