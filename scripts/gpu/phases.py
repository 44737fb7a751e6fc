"""The steps of each phase."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from scripts.gpu.steps import Step

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "copy_cuda.py"
TEST_LIMITS_S = {"test_cuda_copy": 120.0, "test_sanitizer": 240.0}
TEST_LIMIT_S, ENGINE_LIMIT_S, MEASURE_LIMIT_S = 90.0, 510.0, 120.0
DESCRIPTORS_LIMIT_S = 20.0
FIRST = ("executor", "ways")
"""What matters most is measured first, in case that time runs out."""

NEEDS_ENGINE = 'find_spec("vllm")'
"""What the tests have in common that skip without an engine."""


def python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def with_dry(name: str, limit_s: float, module: str, *arguments: str) -> Step:
    """Return a step whose dry run is the same command with ``--dry``."""
    command = python(module, *arguments)
    return Step(name, command, limit_s, (*command, "--dry"))


def test_files() -> list[Path]:
    return sorted((ROOT / "tests/gpu").glob("test_*.py"))


def needs_engine(path: Path) -> bool:
    return NEEDS_ENGINE in path.read_text()


def test_step(path: Path) -> Step:
    name = f"tests-{path.stem.removeprefix('test_')}"
    limit_s = TEST_LIMITS_S.get(path.stem, ENGINE_LIMIT_S if needs_engine(path) else TEST_LIMIT_S)
    return with_dry(name, limit_s, "scripts.gpu.run_tests", f"tests/gpu/{path.name}")


def copies() -> list[Step]:
    """Phase A: the machine, the figures of the copies, the tests of ``tests/gpu`` by file."""
    files = [path for path in test_files() if not needs_engine(path)]
    files.sort(key=lambda path: path.stem == "test_sanitizer")  # last: it takes minutes
    measured = [
        with_dry(f"copies-{part}", MEASURE_LIMIT_S, "scripts.gpu.measure", part)
        for part in benchmark_parts(BENCHMARK.read_text())
    ]
    return [
        with_dry("probe", 60.0, "scripts.gpu.probe"),
        Step("build", python("scripts.gpu.build"), 150.0),
        with_dry("descriptors", DESCRIPTORS_LIMIT_S, "scripts.gpu.descriptors"),
        with_dry("copies-calibration", 60.0, "scripts.gpu.measure", "calibration"),
        *measured,
        *map(test_step, files),
    ]


def engine() -> list[Step]:
    """Phase B: what of vLLM loads beside this torch, and the tests of ``tests/gpu`` with vLLM."""
    return [
        with_dry("engine-import", 180.0, "scripts.gpu.engine_import"),
        *(test_step(path) for path in test_files() if needs_engine(path)),
    ]


def benchmark_parts(text: str) -> list[str]:
    """Return the parts that ``copy_cuda.py`` can measure by themselves: the functions
    ``measure_<part>(bench, rounds)``, and each of its pages. Large pages come first, since they
    make the fewest copies of a batch: what a driver cannot take costs only the smaller ones."""
    parts, pages = [], []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("measure_"):
            arguments = [argument.arg for argument in node.args.args]
            if arguments == ["bench", "rounds"]:
                parts.append(node.name.removeprefix("measure_"))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES":
            pages = re.findall(r"'(\w+)':", ast.unparse(node.value))
    others = [part for part in parts if part not in FIRST]
    return [*FIRST, *(f"page-{name}" for name in reversed(pages)), *others]
