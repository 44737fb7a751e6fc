"""Files of API keys: only what is meant as a key is one."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigError
from kvconnect.router.api_keys import SHORTEST_KEY, ApiKey, parse_api_keys

KEY, OTHER = "sk-4a7f0c2be19d4e5f", "k" * SHORTEST_KEY


def parse(text: str) -> tuple[ApiKey, ...]:
    return parse_api_keys("api-key-file", "/keys", text)


def test_each_line_is_a_key_or_a_name_and_a_key() -> None:
    text = f"# keys of team A, do not share\n\nalice {KEY}\r\n  # more: {KEY}\n\t{OTHER} \n"
    assert parse(text) == (ApiKey(KEY, "alice"), ApiKey(OTHER))
    assert parse(f"alice {KEY} priority\n") == (ApiKey(KEY, "alice", priority=True),)
    assert parse(f"alice {KEY} weight=20\n") == (ApiKey(KEY, "alice", weight=20),)
    assert parse(f"alice {KEY} disaggregate\n") == (ApiKey(KEY, "alice", disaggregate=True),)
    both = ApiKey(KEY, "alice", priority=True, weight=3)
    for line in (f"alice {KEY} priority weight=3", f"alice {KEY} weight=3 priority"):
        assert parse(line) == (both,)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x", "16 characters or more"),
        (OTHER[1:], "16 characters or more"),
        ("alice short", "16 characters or more"),
        (f"{KEY} alice", "16 characters or more"),  # the wrong way round
        (f"alice {KEY} # hers", "write KEY, NAME KEY, or NAME KEY and behind it"),
        (f"{KEY} disaggregate", "16 characters or more"),
        (f"alice {KEY} weight=0", "write KEY"),
        (f"alice {KEY} weight=1000", "write KEY"),
        (f"alice {KEY} weight=2 weight=3", "write KEY"),
        (f"alice team-a {KEY}", "write KEY, NAME KEY"),
        (f"{KEY} #hers-since-march-2026", "write KEY, NAME KEY"),
        (f"{KEY} priority", "16 characters or more"),
        (f"{KEY}\u00e9", "printable ASCII"),
        (f"{KEY}\x00", "printable ASCII"),
        (f"al:ice {KEY}", "use a name"),
        (f"{'a' * 65} {KEY}", "use a name"),
        (f"bob {OTHER}", "stands on a line before"),
        (f"carol {KEY}", "stands on a line before"),
    ],
)
def test_any_other_line_is_refused_by_its_number(line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        parse(f"# comment\ncarol {OTHER}\n{line}\n")
    said = str(refused.value)
    assert "line 3:" in said and "/keys" in said
    assert not any(word in said for word in line.split() if len(word) > 6), "it may be a key"


def test_a_file_without_a_key_is_refused() -> None:
    for text in ("", "\n", "# only a comment\n"):
        with pytest.raises(ConfigError, match="put a key in it"):
            parse(text)
