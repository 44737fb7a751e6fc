"""What workers of versions 1 to 3 of the protocol send, as it was recorded: both sides refuse each
other before anything else is read, and can say which versions they have."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec
import pytest
from msgspec.structs import replace

from kvconnect.doctor import exchange
from kvconnect.errors import ProtocolError, Refused
from kvconnect.protocol import cache_messages, messages
from kvconnect.protocol.codec import PROTOCOL, common_protocol
from kvconnect.protocol.negotiation import negotiate
from kvconnect.transport.base import UNAUTHENTICATED, PeerDown
from tests.links import outcome, side

OPENING = bytes.fromhex("4b56434f0100010000000000020073657373696f6e2d31362d6279746573" + "63" * 32)
CHALLENGE = bytes.fromhex("4b56434301000100" + "73" * 32)
HELLO_1 = bytes.fromhex(
    "89a474797065a568656c6c6fa870726f746f636f6c920101a8666561747572657390a8736f667477617265af6b7663"
    "6f6e6e65637420302e322e30a9656e67696e655f6964a164a565706f636801a472616e6b9400010001a6666f726d61"
    "7482a56d6f64656ca16da56474797065a862666c6f61743136a667726f757073918bac626c6f636b5f746f6b656e73"
    "10ab706167655f746f6b656e7310a677696e646f77c0a56368756e6bc0a66c617965727392a161a162a86b765f6865"
    "61647308a5686561647308a9726f775f6279746573cd0100af6c617965725f726f775f627974657390a56f72646572"
    "a3484e43aa73706c69747461626c65c3"
)
CACHE_HELLO_1 = bytes.fromhex(
    "88a474797065a568656c6c6fa870726f746f636f6c920101a6656e67696e65c410000102030405060708090a0b0c0d"
    "0e0fa6666f726d6174c40166a66c61796f7574c4086c6c6c6c6c6c6c6ca667726f757073918100cd0400a570616765"
    "7390a56e6f6e6365c400"
)
HELLO_3 = bytes.fromhex(
    "8aa474797065a568656c6c6fa870726f746f636f6c920303a8666561747572657390a8736f667477617265af6b7663"
    "6f6e6e65637420302e332e30a9656e67696e655f6964a165a565706f636801a472616e6b9400010001a86964656e74"
    "69747983a77765696768747383a566696c6573a166a776657273696f6ea0aa706172616d6574657273a0a564726166"
    "7483a566696c6573a0a776657273696f6ea0aa706172616d6574657273a0ad6d697865735f77656967687473c2a666"
    "6f726d617481a56d6f64656ca16da667726f757073918bac626c6f636b5f746f6b656e7310ab706167655f746f6b65"
    "6e7310a677696e646f77c0a56368756e6bc0a66c617965727391a161a86b765f686561647308a5686561647308a972"
    "6f775f6279746573cd0100af6c617965725f726f775f627974657390a56f72646572a3484e43aa73706c6974746162"
    "6c65c3"
)
CACHE_HELLO_3 = bytes.fromhex(
    "89a474797065a568656c6c6fa870726f746f636f6c920303a6656e67696e65c410000102030405060708090a0b0c0d"
    "0e0fa6666f726d6174c40166a66c61796f7574c4086c6c6c6c6c6c6c6ca667726f757073918100cd0400a570616765"
    "7390a86964656e7469747983a77765696768747383a566696c6573a0a776657273696f6ea0aa706172616d65746572"
    "73a0a5647261667483a566696c6573a0a776657273696f6ea0aa706172616d6574657273a0ad6d697865735f776569"
    "67687473c2a56e6f6e6365c400"
)
HELLOS = [HELLO_1, HELLO_3]
CACHE_HELLOS = [CACHE_HELLO_1, CACHE_HELLO_3]
OURS = "4 to 4 here"


def of_version(number: int, message: bytes) -> bytes:
    """An opening or a challenge of version 1, as another version sends it."""
    return message[:4] + struct.pack("<HH", number, number) + message[8:]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_older_reader_is_refused_and_told_our_version(version: int) -> None:
    with side() as source, socket.create_connection(source.transport.listen("127.0.0.1", 0)) as old:
        old.sendall(of_version(version, OPENING))
        old.settimeout(20)
        farewell = b"".join(iter(lambda: old.recv(100), b""))
        # The older version reads this as a challenge, and finds a range without its own version.
        assert farewell[:8] == CHALLENGE[:4] + bytes([4, 0, 4, 0])
        assert len(farewell) == len(CHALLENGE)
        source.poll()
        (down,) = source.of(PeerDown)
        assert (down.peer, down.refused) == (UNAUTHENTICATED, "protocol")
        assert OURS in down.reason and f"{version} to {version} there" in down.reason


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_older_source_is_refused(version: int) -> None:
    with side() as reader, socket.create_server(("127.0.0.1", 0)) as old, ExitStack() as stack:

        def answer() -> None:
            with suppress(OSError):  # closed
                while True:
                    connection, _ = old.accept()
                    stack.enter_context(connection).sendall(of_version(version, CHALLENGE))

        thread = threading.Thread(target=answer)
        stack.callback(thread.join)
        stack.callback(old.shutdown, socket.SHUT_RDWR)
        thread.start()
        down = outcome(reader, old.getsockname()[:2])
        assert down.refused == "protocol" and OURS in down.reason
        assert f"{version} to {version} there" in down.reason


@pytest.mark.parametrize(("hello", "of_cache"), list(zip(HELLOS, CACHE_HELLOS, strict=True)))
def test_older_hellos_are_read_and_refused_for_their_version(hello: bytes, of_cache: bytes) -> None:
    older, other = messages.decode(hello), cache_messages.decode(of_cache)
    assert isinstance(older, messages.HandoffHello)
    assert isinstance(other, cache_messages.CacheHello)
    ours = replace(older, protocol=PROTOCOL)
    for refuse in (
        lambda: negotiate(ours, older),
        lambda: negotiate(older, ours),
        lambda: common_protocol(PROTOCOL, other.protocol),
    ):
        with pytest.raises(Refused, match="upgrade the older KVConnect") as caught:
            refuse()
        assert caught.value.field == "protocol"


@pytest.mark.parametrize(
    "decode",
    [messages.decode, cache_messages.decode, exchange.decode],
    ids=["hand-off", "share", "doctor"],
)
def test_a_hello_that_cannot_be_read_is_refused_for_its_version(
    decode: Callable[[bytes], object],
) -> None:
    """Later versions may have other fields; here, those of another service."""
    hellos = CACHE_HELLOS if decode is messages.decode else HELLOS
    for older in hellos:
        with pytest.raises(Refused, match="upgrade the older KVConnect") as caught:
            decode(older)
        assert caught.value.field == "protocol"
        ours = msgspec.msgpack.encode({**msgspec.msgpack.decode(older), "protocol": PROTOCOL})
        with pytest.raises(ProtocolError, match="cannot be read"):  # the control
            decode(ours)
