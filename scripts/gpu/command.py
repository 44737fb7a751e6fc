"""The command line of ``scripts/gpu_run``."""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
from pathlib import Path

from scripts.gpu import engine, phases, pieces
from scripts.gpu.steps import Phase, Step

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "gpu-site"
PHASE_LIMIT_S = 540.0
PHASES = {"a": phases.copies, "b": phases.engine}


def environment(site: Path) -> dict[str, str]:
    """Return what steps need: our packages before the machine's, and no plugin of pytest that is
    not ours, because those of the machine may be for another pytest."""
    before = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(site), before))),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_timeout",
    }


CHECK = """
import importlib
import torch
if not torch.cuda.is_available():
    raise SystemExit("torch has no CUDA or finds no device")
for name in ("hypothesis", "msgspec", "pytest_timeout", "xxhash"):
    importlib.import_module(name)
import pytest
if int(pytest.__version__.partition(".")[0]) < 9:
    raise SystemExit(f"pytest {pytest.__version__} is older than 9")
"""


def check_ready(options: argparse.Namespace) -> int:
    """Return 0 if this interpreter can run the tests, with the pieces if there are any."""
    if options.pieces:
        pieces.unpack(options.pieces, options.site, ROOT / "kvconnect")
    command = [sys.executable, "-c", CHECK]
    made = subprocess.run(
        command, env={**os.environ, **environment(options.site)}, capture_output=True, text=True
    )
    if made.returncode:
        reason = made.stderr.strip().splitlines()[-1]
        print(f"{sys.executable} cannot run the GPU tests: {reason}", file=sys.stderr)
    return made.returncode


def print_cuda() -> int:
    """Print which of the extras cuda12 and cuda13 is for the driver: 13 without a driver."""
    version = ctypes.c_int(13000)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError as error:
        print(f"the CUDA driver does not load: {error}", file=sys.stderr)
    print(min(max(version.value // 1000, 12), 13))
    return 0


def run_phase(name: str, options: argparse.Namespace) -> int:
    """Run the chosen steps of a phase; return 1 if one of them failed."""
    steps = PHASES[name]()
    if options.list:
        sys.stdout.write("".join(f"{step.name}\n" for step in steps))
        return 0
    unknown = sorted(set(options.only) - {step.name for step in steps})
    if unknown:
        sys.exit(f"phase {name} has no step {', '.join(unknown)}; --list names them")
    chosen = [step for step in steps if not options.only or step.name in options.only]
    if options.pieces:
        folder, site = str(options.pieces), str(options.site)
        unpack = phases.python("scripts.gpu.pieces", folder, site)
        chosen.insert(0, Step("unpack", unpack, 120.0))
    phase = Phase(name, options.out, options.limit, environment(options.site))
    results = phase.run(chosen, options.dry_run)
    failed = [result.step for result in results if not result.good]
    print(f"phase {name}: {len(results) - len(failed)} of {len(results)} steps did not fail")
    print(f"report: {options.out / name}.json, {options.out / name}.log")
    if failed:
        print(f"failed: {' '.join(failed)}")
    return int(bool(failed))


def pack(options: argparse.Namespace) -> int:
    have = options.have.read_text().splitlines() if options.have else []
    contents = pieces.Contents(
        options.engine,
        options.architecture,
        frozenset(map(engine.name_of, have)),
        options.wheel,
    )
    return pieces.pack(options.folder, contents)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_run")
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="download what a GPU machine lacks, in pieces")
    pack.add_argument("folder", type=Path)
    pack.add_argument("--engine", action="store_true", help="with vLLM, for phase b")
    pack.add_argument("--wheel", type=Path, help="of vLLM, instead of downloading it")
    pack.add_argument("--have", type=Path, help="pip freeze of the GPU machine: not packed")
    pack.add_argument("--architecture", type=int, default=90, help="of its GPU, times ten")
    commands.add_parser("cuda", help="print 12 or 13: which CUDA extra the driver needs")
    commands.add_parser("ready", help="exit with 0 if this Python can run the GPU tests")
    for name, phase in PHASES.items():
        command = commands.add_parser(name, help=(phase.__doc__ or "").split("\n")[0])
        command.add_argument("--only", nargs="+", default=[], metavar="STEP")
        command.add_argument("--list", action="store_true", help="name the steps, run none")
        command.add_argument("--dry-run", action="store_true", help="in small, without a GPU")
        command.add_argument("--out", type=Path, required=True, help="where the report goes")
        command.add_argument("--limit", type=float, default=PHASE_LIMIT_S, help="seconds in all")
    for name in ("ready", *PHASES):
        command = commands.choices[name]
        command.add_argument("--pieces", type=Path, help="what 'pack' made")
        command.add_argument("--site", type=Path, default=SITE, help="where to unpack it")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    os.chdir(ROOT)
    options = parse([*arguments])
    if options.command == "pack":
        return pack(options)
    if options.command == "cuda":
        return print_cuda()
    if options.command == "ready":
        return check_ready(options)
    return run_phase(options.command, options)
