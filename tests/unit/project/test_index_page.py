"""The README on a package index."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.index_page import LINK, NO_ADDRESS, index_page

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
TEXT = """See [the guide](docs/guide.md#start), [two
lines](a.md), [home](https://example.org/x) and [below](#below).
![a [drawing]](docs/a.svg)
"""


def test_without_an_address_links_become_text() -> None:
    shown = index_page(TEXT, "")
    assert shown == (
        "See the guide, two\nlines, [home](https://example.org/x) and [below](#below).\n\n"
        + NO_ADDRESS
    )


def test_with_an_address_links_lead_there() -> None:
    shown = index_page(TEXT, "https://example.org/kvconnect/")
    assert "[the guide](https://example.org/kvconnect/docs/guide.md#start)" in shown
    assert "![a [drawing]](https://example.org/kvconnect/docs/a.svg)" in shown
    assert shown.count("](") == TEXT.count("](")


@pytest.mark.parametrize("address", ["", "https://example.org/"])
def test_no_link_of_the_readme_is_left(address: str) -> None:
    assert len(LINK.findall(README)) > 20, "the control"
    assert LINK.findall(index_page(README, address)) == []
