"""``scripts/gpu_run``: steps run without a GPU, broken ones are reported, pieces arrive whole."""

from __future__ import annotations

import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from scripts.gpu import engine, engine_import, fat_binaries, phases, pieces, run_tests, wheels
from scripts.gpu.steps import SKIPPED, Phase, Result, Step

ROOT = Path(__file__).resolve().parents[3]


def step(name: str, code: str, limit_s: float = 60.0) -> Step:
    return Step(name, (sys.executable, "-c", code), limit_s)


def run(tmp_path: Path, *steps: Step, limit_s: float = 60.0) -> dict[str, Result]:
    found = Phase("p", tmp_path, limit_s, {"ADDED": "7"}).run(steps)
    return {result.step: result for result in found}


def gpu_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/gpu_run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_steps_run_dry_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    chosen = ["probe", "descriptors", "copies-page-16k", "copies-digests", "tests-host_pin"]
    made = gpu_run("a", "--dry-run", "--out", str(tmp_path), "--only", *chosen)
    assert made.returncode == 0, made.stdout + made.stderr
    report = json.loads((tmp_path / "a.json").read_text())
    assert [result["step"] for result in report["steps"]] == chosen and not report["failed"]
    figures = [result["figures"] for result in report["steps"]]
    assert figures[0]["page_locked"] and figures[1]["fault"] is None
    assert figures[1]["queued_us_1024_16k"] > 0 and figures[2]["gbps_load_16k"] > 0
    assert figures[3]["gbps_digest_16k"] > 0 and figures[4]["passed"] == 3
    assert all(f"== {name}" in (tmp_path / "a.log").read_text() for name in chosen)


def test_a_step_that_is_not_dry_fails_without_a_gpu(tmp_path: Path) -> None:
    """Negative control: what passed above did so because it was dry."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        return
    made = gpu_run("a", "--out", str(tmp_path), "--only", "copies-digests")
    assert made.returncode == 1 and "torch sees no CUDA device" in made.stdout
    assert json.loads((tmp_path / "a.json").read_text())["failed"] == ["copies-digests"]


def test_an_interpreter_without_a_gpu_is_not_ready(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    made = gpu_run("ready", "--site", str(tmp_path))
    assert (made.returncode == 0) == torch.cuda.is_available()
    assert made.returncode == 0 or "cannot run the GPU tests" in made.stderr
    assert gpu_run("cuda").stdout in ("12\n", "13\n")


def test_a_step_without_such_a_name_is_refused() -> None:
    made = gpu_run("a", "--out", "/nowhere", "--only", "prob")
    assert made.returncode == 1 and "phase a has no step prob" in made.stderr


def test_figures_come_first_and_the_sanitizer_last() -> None:
    names = [step.name for step in phases.copies()]
    kinds = [name.partition("-")[0] for name in names]
    assert kinds.index("tests") == len(kinds) - kinds.count("tests")
    assert names[:4] == ["probe", "build", "descriptors", "copies-calibration"]
    assert names[-1] == "tests-sanitizer"
    pages = [name.removeprefix("copies-page-") for name in names if "page" in name]
    assert pages == ["4m", "1m", "256k", "64k", "16k", "4k"]


def test_tests_that_need_an_engine_are_in_phase_b() -> None:
    names = {step.name for step in phases.engine()}
    assert names == {"engine-import", "tests-sleep", "tests-vllm_bytes"}
    assert not names & {step.name for step in phases.copies()}


def test_phase_b_runs_dry_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    made = gpu_run("b", "--dry-run", "--out", str(tmp_path))
    assert made.returncode == 0, made.stdout + made.stderr
    report = json.loads((tmp_path / "b.json").read_text())
    assert [result["step"] for result in report["steps"]] == [s.name for s in phases.engine()]
    assert not report["failed"]


def test_where_the_report_goes_is_asked_for() -> None:
    made = gpu_run("a")
    assert made.returncode == 2 and "--out" in made.stderr


def test_larger_batches_are_not_tried_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = importlib.import_module("scripts.gpu.descriptors")

    def measure(copies: int, pretended: bool) -> None:
        (tmp_path / str(copies)).touch()
        if copies == faulty:
            os.kill(os.getpid(), signal.SIGKILL)
        if copies == hanging:
            signal.pause()

    monkeypatch.setattr(descriptors, "measure", measure)
    monkeypatch.setattr(descriptors, "CHILD_LIMIT_S", 0.5)
    faulty, hanging = 256, 0
    assert descriptors.probe(False) == "batches of 256: exit status -9"
    assert not (tmp_path / "1024").exists()
    faulty, hanging = 0, 256
    assert descriptors.probe(False) == "batches of 256: no end within 0.5 s"
    assert not (tmp_path / "1024").exists()
    hanging = 0
    monkeypatch.setattr(descriptors, "CHILD_LIMIT_S", 60.0)
    assert descriptors.probe(False) is None  # negative control
    assert (tmp_path / "1024").exists()


def test_every_step_starts_a_module_that_is_there() -> None:
    for each in (*phases.copies(), *phases.engine()):
        for command in (each.command, each.dry or each.command):
            assert command[1] == "-m" and (ROOT / f"{command[2].replace('.', '/')}.py").exists()


def test_a_failing_step_keeps_no_other_from_running(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        step("typo", "import jsn"),
        Step("nothing", (str(tmp_path / "no such program"),), 60.0),
        step("lacking", f"raise SystemExit({SKIPPED})"),
        step("fine", "import os; print('{\"added\": %s}' % os.environ['ADDED'])"),
    )
    states = {name: result.state for name, result in found.items()}
    assert states == {
        "typo": "failed",
        "nothing": "failed",
        "lacking": "skipped",
        "fine": "passed",
    }
    assert found["fine"].figures == {"added": 7}
    assert json.loads((tmp_path / "p.json").read_text())["failed"] == ["typo", "nothing"]
    assert "No module named 'jsn'" in (tmp_path / "p.log").read_text()


def test_a_step_that_hangs_ends_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    found = run(tmp_path, step("hangs", hangs, 0.7), step("after", "pass"), limit_s=30.0)
    assert (found["hangs"].state, found["after"].state) == ("timed out", "passed")
    time.sleep(max(0.0, began + 2.5 - time.monotonic()))
    assert not mark.exists()


def test_no_step_starts_when_the_time_is_used_up(tmp_path: Path) -> None:
    found = run(tmp_path, step("long", "import time; time.sleep(60)"), step("b", ""), limit_s=0.5)
    assert (found["long"].state, found["b"].state) == ("timed out", "not started")


def test_tests_that_are_all_skipped_are_no_success() -> None:
    outcomes = run_tests.Outcomes()
    assert run_tests.verdict(5, outcomes, dry=True) == run_tests.NOTHING_COLLECTED
    outcomes.skipped["NIXL is not installed"] += 1
    assert run_tests.verdict(5, outcomes, dry=False) == SKIPPED
    assert run_tests.verdict(1, outcomes, dry=False) == 1
    outcomes.skipped["could not import 'cupy'"] += 1
    assert run_tests.verdict(5, outcomes, dry=False) == 1
    outcomes.passed = 1
    assert run_tests.verdict(0, outcomes, dry=False) == 0
    outcomes.skipped["no CUDA device"] += 1  # whatever else has passed
    assert run_tests.verdict(0, outcomes, dry=False) == 1
    assert run_tests.verdict(0, outcomes, dry=True) == 0
    outcomes.failed.append("tests/gpu/test_cuda_copy.py::test_other")
    assert run_tests.verdict(1, outcomes, dry=True) == 1
    assert run_tests.verdict(1, outcomes, dry=False) == 1


def test_parts_of_the_benchmark_are_found() -> None:
    text = """
PAGES = {"4k": 4 << 10, "1m": MIB}
def measure_a(bench, rounds): ...
def measure_executor(bench, rounds): ...
def measure_all(seed, rounds): ...
"""
    found = phases.benchmark_parts(text)
    assert found == ["executor", "ways", "page-1m", "page-4k", "a"]


def wheel(folder: Path, requires: tuple[str, ...] = ()) -> Path:
    path = folder / "stand_in-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as content:
        content.writestr("stand_in/__init__.py", "NUMBER = 3\n")
        content.writestr("stand_in/more.py", "# " + "x" * 600)
        content.writestr("stand_in-1.data/", "")
        content.writestr("stand_in-1.data/purelib/beside.py", "")
        content.writestr("stand_in-1.data/scripts/tool", "")
        lines = ("Name: stand_in", "Version: 1", *(f"Requires-Dist: {text}" for text in requires))
        content.writestr("stand_in-1.dist-info/METADATA", "\n".join(lines))
    return path


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder with pieces of a wheel and of a C extension."""
    folder = tmp_path / "pieces"
    folder.mkdir()
    files = [("native/_native.so", b"machine code"), *wheels.members(wheel(tmp_path))]
    digests = pieces.write_pieces(iter(files), folder, 700)
    assert len(digests) > 1
    assert all((folder / name).stat().st_size <= 700 for name in digests)
    index = {"wheels": ["stand_in"], "pieces": digests}
    (folder / pieces.INDEX).write_text(json.dumps(index))
    return folder


def test_pieces_can_be_carried_one_by_one(packed: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    first, *others = sorted(packed.glob("piece-*.zip"))
    away = [path.rename(tmp_path / path.name) for path in others]
    assert pieces.unpack(packed, site, tmp_path)["missing_pieces"] == [p.name for p in others]
    for path in away:
        path.rename(packed / path.name)
    first.unlink()  # carried by the call before
    assert pieces.unpack(packed, site, tmp_path)["missing_pieces"] == []
    loaded = "import stand_in, beside; print(stand_in.NUMBER)"
    command = [sys.executable, "-c", loaded]
    made = subprocess.run(command, env={"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert made.stdout == "3\n", made.stderr
    assert (tmp_path / "_native.so").read_bytes() == b"machine code"
    assert not (site / "tool").exists()


def test_a_damaged_piece_is_not_unpacked(packed: Path, tmp_path: Path) -> None:
    path = packed / "piece-0.zip"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"piece-0\.zip is damaged"):
        pieces.unpack(packed, tmp_path / "site", tmp_path)


def test_a_file_larger_than_a_piece_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="big takes"):
        pieces.write_pieces(iter([("big", bytes(range(256)) * 9)]), tmp_path, 400)


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 1, 64, len(code)).ljust(28, b"\0")
    return (header + struct.pack("<I", architecture)).ljust(64, b"\0") + code


def container(*entries: bytes) -> bytes:
    inside = b"".join(entries)
    return fat_binaries.MAGIC + struct.pack("<HHQ", 1, 16, len(inside)) + inside


PTX, CUBIN = fat_binaries.PTX, fat_binaries.CUBIN


@pytest.mark.parametrize(
    ("architecture", "left"),
    [(90, (b"c90c90", b"p80p80")), (86, (b"c80c80", b"c80x80")), (100, (b"p90p90", b"p80p80"))],
)
def test_code_for_other_architectures_is_zeroed(architecture: int, left: tuple[bytes, ...]) -> None:
    first = container(
        *(entry(PTX, 80, b"p80..."), entry(PTX, 90, b"p90p90")),
        *(entry(CUBIN, 80, b"c80c80"), entry(CUBIN, 90, b"c90c90"), entry(CUBIN, 120, b"c12c12")),
    )
    second = container(entry(CUBIN, 80, b"c80x80"), entry(PTX, 80, b"p80p80"))
    library = b"other" + first + b"between" + second + b"end" + fat_binaries.MAGIC
    stripped = fat_binaries.strip(library, architecture)
    assert len(stripped) == len(library) and b"between" in stripped
    codes = (b"p80...", b"p90p90", b"c80c80", b"c90c90", b"c12c12", b"c80x80", b"p80p80")
    assert tuple(code for code in codes if code in stripped) == left
    assert all(code in library for code in codes)  # negative control


def test_what_the_machine_has_is_not_carried(tmp_path: Path) -> None:
    needs = ("Numpy_X>=1", "nvidia-nccl", "torch==2", "orjson", 'ray; extra == "ray"')
    found = engine.requires(wheel(tmp_path, needs))
    assert [text for text in found if engine.is_carried(text, {"numpy-x"})] == ["orjson"]


def test_a_wheel_that_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(wanted: list[str], folder: Path, alone: bool = False) -> None:
        raise subprocess.CalledProcessError(1, ["pip", "download"])

    monkeypatch.setattr(engine, "download", refuse)
    assert engine.fetch(tmp_path, None, set())[0] is None
    (text,) = engine.fetch(tmp_path, None, set())[1]
    assert text.startswith(engine.VLLM)
    monkeypatch.setattr(engine, "requires", lambda path: ["orjson"])
    monkeypatch.setattr(engine, "resolve", lambda wanted: ["orjson==3"])
    found, (text,) = engine.fetch(tmp_path, wheel(tmp_path), set())
    assert found and text.startswith("orjson==3")


def test_an_engine_wheel_is_packed_without_its_server(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    with zipfile.ZipFile(path, "a") as content:
        content.writestr(engine.SERVER, "")
        content.writestr("vllm/code.so", container(entry(CUBIN, 80, b"c80c80")))
    found = dict(engine.engine_members(path, 90))
    assert engine.SERVER not in found and b"c80c80" not in found["vllm/code.so"]


def test_what_no_version_meets_is_taken_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(wanted: list[str]) -> list[str]:
        if "certifi>=9" in wanted:
            raise subprocess.CalledProcessError(1, "uv", stderr="you require certifi>=9")
        return [f"{engine.name_of(text)}==1" for text in wanted]

    monkeypatch.setattr(engine, "compiled", compiled)
    assert engine.resolve(["orjson>=1", "certifi>=9"]) == ["orjson==1", "certifi==1"]


def test_names_that_torch_lacks_are_found() -> None:
    pytest.importorskip("torch")
    source = "torch.float32\nother.accelerator.x\nif y:\n    torch.accelerator.no_such(1)\n"
    names = list(engine_import.names_of_torch(source))
    assert ("torch.float32", 1) in names and ("torch.accelerator.no_such", 4) in names
    there = {text: engine_import.is_there(text) for text, _ in names}
    assert not there.pop("torch.accelerator.no_such")  # negative control
    assert there and all(there.values())
