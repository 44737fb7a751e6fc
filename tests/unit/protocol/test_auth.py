"""The handshake: the right key and only that; any pieces; nothing reflected, replayed, changed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvconnect.errors import KVConnectError, Misuse, ProtocolError, Refused
from kvconnect.protocol import auth
from kvconnect.protocol.auth import ClientAuth, Opening, ServerAuth

KEY = b"a key that both sides hold"
SESSION = b"session-16-bytes"
OPENING = Opening("data", SESSION, 1, 2)
CLIENT_NONCE, SERVER_NONCE = b"c" * 32, b"s" * 32


def client(key: bytes = KEY, opening: Opening = OPENING) -> ClientAuth:
    return ClientAuth(key, opening, CLIENT_NONCE)


def server(key: bytes = KEY) -> ServerAuth:
    return ServerAuth(key, SERVER_NONCE)


def cut(data: bytes, size: int) -> Iterable[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


def shake(one: ClientAuth, other: ServerAuth, size: int = 1000) -> None:
    """Run a handshake to its end, every message cut into pieces of ``size`` bytes."""
    to_server = one.start()
    while to_server:
        to_client = b"".join([other.feed(piece) for piece in cut(to_server, size)])
        to_server = b"".join([one.feed(piece) for piece in cut(to_client, size)])


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("key", [KEY, b""])
@pytest.mark.parametrize(
    "opening",
    [
        *(OPENING, Opening("control", SESSION, 0, 16)),
        *(OPENING._replace(service="share"), Opening("control", SESSION, 0, 16, "share")),
    ],
)
def test_sides_with_the_same_key_agree(size: int, key: bytes, opening: Opening) -> None:
    one, other = client(key, opening), server(key)
    shake(one, other, size)
    assert one.done and other.done
    assert other.opening == opening


def test_what_follows_the_handshake_is_kept() -> None:
    one, other = client(), server()
    proof = one.feed(other.feed(one.start()))
    verdict = other.feed(proof + b"first message")
    assert one.feed(verdict + b"answer") == b""
    assert (other.rest, one.rest) == (b"first message", b"answer")
    with pytest.raises(Misuse):
        one.feed(b"more")


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, b"other"), (KEY, b""), (b"", KEY)])
def test_another_key_is_refused_on_both_sides(ours: bytes, theirs: bytes) -> None:
    one, other = client(ours), server(theirs)
    with pytest.raises(Refused) as at_server:
        shake(one, other)
    with pytest.raises(Refused) as at_client:
        one.feed(other.farewell)
    assert at_server.value.field == at_client.value.field == "auth"
    assert not one.done and not other.done


def test_a_server_without_the_key_is_refused() -> None:
    """One that accepts whatever proof it is given still cannot prove itself."""
    one, other = client(), server(b"guess")
    other._check_proof = lambda side, mac, reason: None  # type: ignore[method-assign]
    with pytest.raises(Refused) as caught:
        shake(one, other)
    assert caught.value.field == "auth" and not one.done


def test_a_reflected_proof_is_refused() -> None:
    """An attacker without the key sends the client's own proof back as a verdict."""
    one, other = client(), server()
    proof = one.feed(other.feed(one.start()))
    with pytest.raises(Refused):
        one.feed(b"KVCV" + proof[4:])
    # The mirror: a server's verdict is no client's proof, even over the same two messages.
    verdict = other.feed(proof)
    again = server()
    again.feed(client().start())
    with pytest.raises(Refused):
        again.feed(b"KVCP" + verdict[4:])


def test_messages_of_the_wrong_side_break_the_protocol() -> None:
    one, other = client(), server()
    opening = one.start()
    with pytest.raises(ProtocolError):
        one.feed(opening)
    with pytest.raises(ProtocolError):
        server().feed(other.feed(opening))


def test_a_replayed_handshake_is_refused() -> None:
    one = client()
    opening = one.start()
    proof = one.feed(server().feed(opening))
    fresh = ServerAuth(KEY, b"t" * 32)
    fresh.feed(opening)
    with pytest.raises(Refused):
        fresh.feed(proof)
    same = server()  # negative control: it is the fresh nonce that matters
    same.feed(opening)
    same.feed(proof)
    assert same.done


def messages() -> list[bytes]:
    one, other = client(), server()
    opening = one.start()
    challenge = other.feed(opening)
    proof = one.feed(challenge)
    return [opening, challenge, proof, other.feed(proof)]


@pytest.mark.parametrize("number", range(4))
def test_every_changed_byte_ends_the_handshake(number: int) -> None:
    """Whatever an attacker changes on the way, not both sides are satisfied."""
    for place in range(len(messages()[number])):
        one, other = client(), server()
        sent, count = one.start(), 0
        with pytest.raises(KVConnectError):
            while True:
                if count == number:
                    changed = bytearray(sent)
                    changed[place] ^= 1
                    sent = bytes(changed)
                sent = (one if count % 2 else other).feed(sent)
                count += 1
        assert not (one.done and other.done)


def test_an_unchanged_handshake_ends_well() -> None:
    shake(one := client(), other := server())  # negative control of the test above
    assert one.done and other.done


def test_other_versions_are_refused_by_both_sides_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = client(), server()
    monkeypatch.setattr(auth, "PROTOCOL", (2, 3))
    opening = one.start()
    monkeypatch.setattr(auth, "PROTOCOL", (4, 5))
    with pytest.raises(Refused, match="4 to 5 here, 2 to 3 there") as at_server:
        other.feed(opening)
    monkeypatch.setattr(auth, "PROTOCOL", (2, 3))
    with pytest.raises(Refused, match="2 to 3 here, 4 to 5 there") as at_client:
        one.feed(other.farewell)
    assert at_server.value.field == at_client.value.field == "protocol"


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"K\0", bytes(99)])
def test_garbage_ends_the_handshake_at_its_first_bytes(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        server().feed(garbage)
    one = client()
    one.start()
    with pytest.raises(ProtocolError):
        one.feed(garbage)


WRONG = [
    Opening("data", SESSION, 2, 2),
    Opening("control", SESSION, 1, 2),
    Opening("data", SESSION, 0, 0),
    Opening("data", b"short", 0, 1),
    Opening("data", SESSION, -1, 1),
    Opening("data", SESSION, 0, 1 << 16),
]


@pytest.mark.parametrize("opening", WRONG)
def test_a_wrong_opening_is_not_sent(opening: Opening) -> None:
    with pytest.raises(Misuse):
        client(opening=opening)


@pytest.mark.parametrize("opening", WRONG[:3])
def test_a_wrong_opening_is_not_taken(opening: Opening) -> None:
    one = client()
    one._opening = opening
    with pytest.raises(ProtocolError):
        server().feed(one.start())


def test_an_unknown_channel_is_not_taken() -> None:
    data = bytearray(client().start())
    data[8] = 9
    with pytest.raises(ProtocolError, match="channel"):
        server().feed(bytes(data))


def test_a_challenge_before_the_opening_is_not_answered() -> None:
    with pytest.raises(ProtocolError):
        client().feed(messages()[1])


@pytest.mark.parametrize("nonce", [b"", bytes(16), bytes(33)])
def test_a_nonce_has_one_length(nonce: bytes) -> None:
    with pytest.raises(Misuse):
        ServerAuth(KEY, nonce)
