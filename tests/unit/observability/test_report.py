"""``kvconnect report``: the figures and lines of one run or two, on one page that loads nothing."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from kvconnect import cli
from kvconnect.observability.metrics.rates import EndpointFrame, Phase, Snapshot, TransferRates
from kvconnect.observability.report import runs
from kvconnect.observability.report.comparison import compare, largest_changes, unit_of
from kvconnect.observability.report.page import figure
from kvconnect.observability.report.page import html as page

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


def result(path: Path, figures: dict[str, Any], name: str = "copy", **machine: Any) -> str:
    path.write_text(json.dumps({"benchmark": name, "machine": machine, "figures": figures}))
    return str(path)


def history(path: Path, rates: list[float | None], url: str = "http://a:1/metrics") -> str:
    frames = [
        Snapshot(
            at=1000.0 + 2 * number,
            endpoints=(
                EndpointFrame(url=url, kind="vllm", transfers=(sent(rate),), phases=(WAIT,))
                if rate is not None
                else EndpointFrame(url=url, error="refused"),
            ),
        )
        for number, rate in enumerate(rates)
    ]
    path.write_bytes(b"".join(msgspec.json.encode(frame) + b"\n" for frame in frames))
    return str(path)


def sent(rate: float) -> TransferRates:
    return TransferRates(transfer_type="SEND", bytes_total=1.0, bytes_per_s=rate)


WAIT = Phase(name="handoff_wait", per_s=1.0, mean_s=0.25, p99_s=None)


class Cells(html.parser.HTMLParser):
    """The texts of table cells row by row, and everything that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [str(v) for n, v in attrs if n in ("src", "href", "xlink:href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    before = {"ttft_ms": 200.0, "hit_over_miss": 0.5, "native": True, "gone": 1.0, "blocks": 12345}
    after = {"ttft_ms": 100.0, "hit_over_miss": 0.55, "native": False, "blocks": 12345}
    return [
        result(tmp_path / "before.json", before, cores=2),
        result(tmp_path / "after.json", after, cores=4),
    ]


def test_figures_with_their_ratio(two: list[str]) -> None:
    text = page([runs.read(path) for path in two])
    rows = Cells(text).rows
    assert ["figure", "before", "after", "ratio"] in rows
    assert ["ttft_ms", "200", "100", "0.5"] in rows
    assert ["hit_over_miss", "0.5", "0.55", "1.1"] in rows
    assert ["native", "True", "False", ""] in rows
    assert ["gone", "1", "", ""] in rows
    assert ["blocks", "12,345", "12,345", "1"] in rows
    assert ["cores", "2", "4"] in rows
    # What differs most comes first, as a factor either way; what does not differ is not there.
    assert [row[1:] for row in rows if row[0] == "copy"] == [
        ["ttft_ms", "200", "100", "0.5"],
        ["hit_over_miss", "0.5", "0.55", "1.1"],
    ]


def test_bars_have_their_figures(two: list[str]) -> None:
    plots = re.findall(r"<svg.*?</svg>", page([runs.read(path) for path in two]), re.S)
    assert len(plots) == 2  # milliseconds and ratios; what has no unit is not drawn
    assert [bool(re.search(r">ttft_ms<", plot)) for plot in plots] == [True, False]
    assert ">200<" in plots[0]
    assert ">100<" in plots[0]


def test_one_run_has_no_ratios(two: list[str]) -> None:
    rows = Cells(page([runs.read(two[0])])).rows
    assert ["figure", "before"] in rows
    assert not any("ratio" in row for row in rows)


def test_units() -> None:
    names = ("ttft_ms", "ttft_ms_4k", "hit_over_miss", "gbps_4k", "ratio_x", "x_gain", "wrong")
    want = ["ms", "ms", "ratios", "GB/s", "ratios", "gains", ""]
    assert [unit_of(name) for name in names] == want


def test_the_page_in_the_docs_has_the_figures_of_the_results() -> None:
    """Control: figures that are not those of the results are found."""
    rows = Cells((ROOT / "docs" / "serve.html").read_text()).rows
    figures = runs.read(str(RESULTS / "serve.json")).sections["serve"].figures
    for name, value in figures.items():
        assert [name, figure(value)] in rows, "make docs/serve.html again"
        assert [name, figure(f"{value} or so")] not in rows


def test_a_folder_is_all_its_results() -> None:
    run = runs.read(str(RESULTS))
    assert set(run.sections) >= {"plan", "handoff", "transport"}
    want = json.loads((RESULTS / "plan.json").read_text())["figures"]["lookup_8192_ms"]
    assert run.sections["plan"].figures["lookup_8192_ms"] == want
    assert largest_changes(compare([run, run])) == []


def test_a_history(tmp_path: Path) -> None:
    first = history(tmp_path / "one.jsonl", [1e6, 3e6])
    second = history(tmp_path / "two.jsonl", [4e6, None, 8e6], "http://b:2/metrics")
    (section,) = compare([runs.read(first), runs.read(second)])
    assert section.name == "vllm 1"  # the first of its kind in either, wherever it ran
    assert section.lines["SEND, bytes/s"] == ([(0, 1e6), (2, 3e6)], [(0, 4e6), (4, 8e6)])
    assert section.lines["up, 1 or 0"][1] == [(0, 1), (2, 0), (4, 1)]
    text = page([runs.read(first), runs.read(second)])
    rows = Cells(text).rows
    assert ["SEND, bytes/s", "2,000,000", "6,000,000", "3"] in rows
    assert ["mean handoff_wait, s", "0.25", "0.25", "1"] in rows
    assert text.count("<svg") == len(section.lines) == 3


def test_names_are_only_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>_ms"
    path = result(tmp_path / "a&b.json", {evil: 1.0, "$\\frac_ms": 2.0}, evil, cpu=evil)
    lines = history(tmp_path / "<b>.jsonl", [1.0], f"http://{evil}")
    for text in (page([runs.read(path)]), page([runs.read(lines)])):
        assert "script" not in Cells(text).tags
        assert "&lt;script&gt;" in text
    assert ">$\\frac_ms<" in page([runs.read(path)])  # and no formula


def test_the_page_loads_nothing(two: list[str]) -> None:
    text = page([runs.read(path) for path in two])
    assert not re.search(r"@import|url\((?!#)", text)
    assert all(target.startswith("#") for target in Cells(text).loads)
    assert "default-src 'none'" in text
    assert len(text) < 1e6


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{",
        b"[1]",
        b'{"benchmark": "x", "figures": {}}',
        b'{"benchmark": "x", "machine": {}, "figures": 3}',
        b'{"at": 1, "endpoints": [{}]}',
        b'{"at": 1, "endpoints": []}\nnonsense\n',
        b'{"at": NaN, "endpoints": []}',
        b"\xff\xfe",
    ],
)
def test_bad_input_is_one_error(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(path), "-o", str(tmp_path / "out.html")])
    assert stop.value.code == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "run.json" in error
    assert not (tmp_path / "out.html").exists()


def test_an_empty_folder_and_a_bad_output_are_errors(tmp_path: Path, two: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    for argv in (["report", str(tmp_path / "empty")], ["report", two[0], "-o", "/nowhere/x.html"]):
        with pytest.raises(SystemExit):
            cli.main(argv)


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_a_browser_shows_it(two: list[str], tmp_path: Path) -> None:
    """Text and both runs' colours are seen, and an empty page is told from it."""
    out = tmp_path / "out.html"
    assert cli.main(["report", *two, "-o", str(out)]) == 0
    full = seen(out)
    blue, orange = (0x42, 0x69, 0xD0), (0xFF, 0x8C, 0x1A)
    assert min(full.count(blue), full.count(orange)) > 1000  # bars, not only letters
    assert sum(sum(pixel) < 150 for pixel in full) > 1000
    out.write_text(re.sub(r"<svg.*?</svg>", "", out.read_text(), flags=re.S))
    assert seen(out).count(blue) < 1000


def seen(path: Path) -> list[tuple[int, int, int]]:
    """The pixels of a page in a browser."""
    assert BROWSER is not None
    shot = path.with_suffix(".png")
    subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--window-size=1000,1000", f"--user-data-dir={path.parent}/browser"),
            *(f"--screenshot={shot}", path.as_uri()),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    with Image.open(shot) as image:
        data = iter(image.convert("RGB").tobytes())
    return list(zip(data, data, data, strict=True))
