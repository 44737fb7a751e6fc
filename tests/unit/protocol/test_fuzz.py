"""A few thousand of the inputs that ``make fuzz`` gives a million of, and proof that it sees."""

from __future__ import annotations

import random

import pytest

from kvconnect.errors import Misuse
from tests.fuzz import fuzz_codec
from tests.fuzz.fuzz_codec import MOST_BYTES, TARGETS, fuzz, peak_bytes


def test_only_errors_of_the_library_come_out() -> None:
    ends = fuzz(8000, seed=1)
    for target in TARGETS:  # neither all is turned away, nor nothing
        assert [end for end in ends if end.startswith(target.__name__) and "accept" not in end]
    accepted = {end.split()[0] for end in ends if end.endswith("accepted")}
    assert accepted >= {
        "fuzz_header",
        "fuzz_messages_in_pieces",
        "fuzz_message",
        "fuzz_cache_message",
        "fuzz_doctor_message",
        "fuzz_hints",
        "fuzz_cache_body",
        "fuzz_session",
        "fuzz_ticket",
        "fuzz_share_ticket",
    }


def test_small_inputs_take_little_memory() -> None:
    assert peak_bytes(2000, seed=2) < MOST_BYTES


@pytest.mark.parametrize("error", [KeyError, UnicodeError, RecursionError, Misuse, AssertionError])
def test_another_error_is_seen(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def target(rng: random.Random) -> None:
        if rng.random() < 0.1:
            raise error("escaped")

    monkeypatch.setattr(fuzz_codec, "TARGETS", (target,))
    with pytest.raises(AssertionError, match="target, seed 1, run") as caught:
        fuzz(1000, seed=1)
    assert isinstance(caught.value.__cause__, error)


def test_much_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_codec, "TARGETS", (lambda rng: bytes(2 * MOST_BYTES),))
    assert peak_bytes(2, seed=1) > MOST_BYTES
