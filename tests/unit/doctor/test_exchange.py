"""Messages of ``doctor transport``: they arrive as they were, and nothing else passes."""

from __future__ import annotations

import pytest

from kvconnect.doctor.exchange import (
    CpuRequest,
    CpuSeconds,
    DoctorHello,
    DoctorMessage,
    SocketTestPort,
    SocketTestRequest,
    TransferRequest,
    decode,
    encode,
)
from kvconnect.errors import ProtocolError
from kvconnect.protocol.hello import Reject

MESSAGES: list[DoctorMessage] = [
    DoctorHello(area_bytes=4096, device="cpu"),
    TransferRequest(1, 4096, [0, 5]),
    CpuRequest(),
    CpuSeconds(1.5),
    SocketTestRequest(2, 1 << 20),
    SocketTestPort(7000, bytes(16)),
    Reject("other", "because"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_arrive_as_they_were(message: DoctorMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        DoctorHello(area_bytes=0, device="cpu"),
        DoctorHello(area_bytes=1, device="x" * 65),
        TransferRequest(0, 4096, [0]),
        TransferRequest(1, 0, [0]),
        TransferRequest(1, 4096, []),
        TransferRequest(1, 4096, [-1]),
        TransferRequest(1, 4096, [0] * ((1 << 16) + 1)),
        SocketTestRequest(0, 1),
        SocketTestRequest(17, 1),
        SocketTestRequest(1, 1 << 33),
        SocketTestPort(0, bytes(16)),
        SocketTestPort(1, b"short"),
    ],
)
def test_numbers_out_of_range_are_refused(message: DoctorMessage) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(message))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"hello", bytes((1 << 20) + 1)])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)
