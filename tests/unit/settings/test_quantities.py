"""Sizes are exact, and an unusable one says what to write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigError
from kvconnect.settings.quantities import parse_bytes


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("8192", 8192),
        ("7B", 7),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("500 MB", 500 * 10**6),
        (" 4GiB ", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("0.5 TiB", 1 << 39),
        ("2TB", 2 * 10**12),
        ("9007199254740993", 9007199254740993),  # more digits than a float has
        pytest.param("9" * 400, 10**400 - 1, id="400 digits"),
    ],
)
def test_sizes(value: object, nbytes: int) -> None:
    assert parse_bytes("host_bytes", value) == nbytes


@given(st.integers(0, 2**60), st.sampled_from(["", "B", "KiB", "GB", "TiB"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert parse_bytes("f", f"{number}{unit}") == number * parse_bytes("f", f"1{unit}")


def test_the_size_error_names_the_field_it_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes("disk_bytes", "4 GIGA")
    assert (caught.value.field, caught.value.value) == ("disk_bytes", "4 GIGA")
