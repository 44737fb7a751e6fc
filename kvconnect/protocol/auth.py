"""Handshake that proves, at the start of every connection, that both sides hold the same key.

::

    client                                   server
      opening: versions, channel, service,     |
               session, number, nonce  ---------> |
      | <--------------------- challenge: versions, server nonce
      proof: MAC("client", both messages) ---> |   checks it
      | <--------------------- verdict: MAC("server", both messages)
    checks it                                  |

The MAC (HMAC-SHA256) covers both messages: versions, channel, session and both nonces. It covers
the side's name too, so a proof sent back to its author fails. Fresh nonces make a recorded proof
fail. The server reveals nothing about its key until the client has proven that it knows the key.
The payload after the handshake is not encrypted; TLS does that.

An empty key proves nothing; the transport decides where it is allowed.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvconnect.errors import Misuse, ProtocolError, Refused
from kvconnect.protocol.codec import PROTOCOL, common_protocol

SESSION_BYTES = 16
NONCE_BYTES = 32

Channel = Literal["control", "data"]
Service = Literal["handoff", "share"]
"""What a connection is for: hand-offs, or blocks of host memory."""

_CHANNELS: tuple[Channel, ...] = ("control", "data")
_SERVICES: tuple[Service, ...] = ("handoff", "share")
_KINDS = tuple((channel, service) for service in _SERVICES for channel in _CHANNELS)
"""Index = number of a channel on the wire."""
_OPENING_MAGIC, _CHALLENGE_MAGIC, _PROOF_MAGIC, _VERDICT_MAGIC = b"KVCO", b"KVCC", b"KVCP", b"KVCV"
_OPENING = struct.Struct(f"<4sHHHHH{SESSION_BYTES}s{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<4sHH{NONCE_BYTES}s")
_MAC = struct.Struct("<4s32s")  # proof and verdict
_TURNED_AWAY = bytes(32)  # replaces the MAC in a verdict that rejects the client
_NOTHING = (b"", 0)  # magic and size when no message is expected


class Opening(NamedTuple):
    """Purpose of a connection. All connections of one peer have the same session."""

    channel: Channel
    session: bytes  # SESSION_BYTES, random
    number: int  # index of a data connection; 0 for the control connection
    connections: int  # how many data connections this peer has, at least 1
    service: Service = "handoff"


class _Handshake(ABC):
    """One side of the handshake. Not thread-safe; not usable after it raised.

    Attributes:
        done: whether the other side has proven that it holds the key.
        rest: bytes received after the end of the handshake, once ``done``.
        farewell: after :class:`Refused`, bytes to send before closing, so that the other side can
            report the reason too. May be empty.
    """

    def __init__(self, key: bytes, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise Misuse(f"a nonce of {len(nonce)} bytes, not {NONCE_BYTES}")
        self.done = False
        self.rest = b""
        self.farewell = b""
        self._key = key
        self._nonce = nonce
        self._said = b""  # opening and challenge, as sent
        self._buffer = b""
        self._expected = _NOTHING

    def feed(self, data: bytes) -> bytes:
        """Process received bytes, in pieces of any size; return bytes to send, which may be none.

        Raises:
            Refused: the other side has another key (field ``auth``), or there is no common
                protocol version (field ``protocol``). Send ``farewell``, then close.
            ProtocolError: the bytes are not a valid handshake.
            Misuse: the handshake is over.
        """
        if self._expected is _NOTHING:
            raise Misuse("the handshake is over: what follows is not for it")
        self._buffer += data
        answer = b""
        while not self.done:
            magic, size = self._expected
            if not magic.startswith(self._buffer[: len(magic)]):
                raise ProtocolError(f"handshake expects {magic!r}, not {self._buffer[:4]!r}")
            if len(self._buffer) < size:
                return answer
            message, self._buffer = self._buffer[:size], self._buffer[size:]
            answer += self._on_message(message)
        self.rest, self._buffer = self._buffer, b""
        return answer

    @abstractmethod
    def _on_message(self, message: bytes) -> bytes:
        """Process the expected message; return the answer."""

    def _finish(self) -> None:
        self.done = True
        self._expected = _NOTHING

    def _proof(self, side: bytes) -> bytes:
        return _proof(self._key, side, self._said)

    def _check_proof(self, side: bytes, mac: bytes, reason: str) -> None:
        if not hmac.compare_digest(self._proof(side), mac):
            raise Refused("auth", reason)


class ClientAuth(_Handshake):
    """Handshake of the side that connects. ``nonce``: ``NONCE_BYTES`` fresh random bytes."""

    def __init__(self, key: bytes, opening: Opening, nonce: bytes) -> None:
        super().__init__(key, nonce)
        wrong = _what_is_wrong(opening)
        if wrong:
            raise Misuse(f"{opening}: {wrong}")
        self._opening = opening
        self._expected = (_CHALLENGE_MAGIC, _CHALLENGE.size)

    def start(self) -> bytes:
        """Return the bytes to send first."""
        opening = self._opening
        first, last = PROTOCOL
        self._said = _OPENING.pack(
            _OPENING_MAGIC,
            first,
            last,
            _KINDS.index((opening.channel, opening.service)),
            opening.number,
            opening.connections,
            opening.session,
            self._nonce,
        )
        return self._said

    def _on_message(self, message: bytes) -> bytes:
        if message.startswith(_CHALLENGE_MAGIC):
            if not self._said:
                raise ProtocolError("a challenge before the opening")
            _, low, high, _ = _CHALLENGE.unpack(message)
            common_protocol(PROTOCOL, (low, high))
            self._said += message
            self._expected = (_VERDICT_MAGIC, _MAC.size)
            return _MAC.pack(_PROOF_MAGIC, self._proof(b"client"))
        _, mac = _MAC.unpack(message)
        if mac == _TURNED_AWAY:
            raise Refused("auth", "the other side turned our key away: give both the same key_file")
        self._check_proof(b"server", mac, "the other side does not hold our key")
        self._finish()
        return b""


class ServerAuth(_Handshake):
    """Handshake of the side that listens. ``nonce``: ``NONCE_BYTES`` fresh random bytes.

    ``also``: other accepted keys, while keys are changed; the server answers with the key that the
    client used. ``opening`` is validated and authenticated once ``done``.
    """

    opening: Opening

    def __init__(self, key: bytes, nonce: bytes, also: Sequence[bytes] = ()) -> None:
        super().__init__(key, nonce)
        self._accepted = (key, *also)
        self._expected = (_OPENING_MAGIC, _OPENING.size)

    def _on_message(self, message: bytes) -> bytes:
        if message.startswith(_OPENING_MAGIC):
            return self._on_opening(message)
        _, mac = _MAC.unpack(message)
        try:
            reason = "a peer with another key: give both the same key_file"
            self._key = next((key for key in self._accepted if self._fits(key, mac)), self._key)
            self._check_proof(b"client", mac, reason)
        except Refused:
            self.farewell = _MAC.pack(_VERDICT_MAGIC, _TURNED_AWAY)
            raise
        self._finish()
        return _MAC.pack(_VERDICT_MAGIC, self._proof(b"server"))

    def _fits(self, key: bytes, mac: bytes) -> bool:
        return hmac.compare_digest(_proof(key, b"client", self._said), mac)

    def _on_opening(self, message: bytes) -> bytes:
        _, low, high, channel, number, connections, session, _ = _OPENING.unpack(message)
        challenge = _CHALLENGE.pack(_CHALLENGE_MAGIC, *PROTOCOL, self._nonce)
        try:  # checked first: in another version the rest may have another meaning
            common_protocol(PROTOCOL, (low, high))
        except Refused:
            self.farewell = challenge  # tells the client our versions
            raise
        if channel >= len(_KINDS):
            raise ProtocolError(f"opening for channel number {channel}")
        kind, service = _KINDS[channel]
        self.opening = Opening(kind, session, number, connections, service)
        wrong = _what_is_wrong(self.opening)
        if wrong:
            raise ProtocolError(f"{self.opening}: {wrong}")
        self._said = message + challenge
        self._expected = (_PROOF_MAGIC, _MAC.size)
        return challenge


def _proof(key: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"kvconnect " + side + b"\0" + said, hashlib.sha256)


def _what_is_wrong(opening: Opening) -> str:
    """Return why an opening is invalid, "" if it is valid."""
    if (opening.channel, opening.service) not in _KINDS or len(opening.session) != SESSION_BYTES:
        return f"use one of {_KINDS} and a session of {SESSION_BYTES} bytes"
    if not 1 <= opening.connections <= 0xFFFF:
        return "connections must be 1 to 65535"
    numbers = opening.connections if opening.channel == "data" else 1
    if not 0 <= opening.number < numbers:
        return f"number must be less than {numbers} for a {opening.channel} connection"
    return ""
