"""What nvcc makes of the kernels, read from their machine code: the speed that a CPU can check.

A copy needs words of 128 bits, several of them on their way at a time. A register that is spilled,
or a constant whose address differs between the threads of a warp, costs more than the work itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvconnect.copy import kernels
from scripts import build_kernels

MOST_REGISTERS = 120
"""Of the 128 that each of 512 threads can have on one multiprocessor."""

THREADS, WARP = 512, 32
SM_REGISTERS = 64 << 10
RESIDENT_REGISTERS = 128 * 40 + 256 * 232
"""What a block of a matrix product takes on Hopper: a warp group that loads and two that multiply,
as CUTLASS's cooperative kernels divide them (40 and 232 registers a thread). FlashAttention 3 has
24 and 240, which is as many."""

TABLE, TABLE_NVCC = Path(__file__).parents[2] / "docs" / "copy.md", "13.0"

WIDE = {"hash_blocks": (8, 0)}
"""128-bit words that a thread loads at a time, and those that it stores; copies have eight."""


@dataclass
class MachineCode:
    """One kernel for one architecture."""

    registers: int = 0
    shared_bytes: int = 0
    instructions: list[str] = field(default_factory=list)

    def taken(self, threads: int) -> int:
        """Return the registers of a block; a thread's are a multiple of eight."""
        return threads * (-(-self.registers // 8) * 8)

    def faults(self, loads: int, stores: int) -> list[str]:
        """Return what is wrong, for a kernel that moves this many 128-bit words at a time."""
        found = []
        if self.registers > MOST_REGISTERS:
            found.append(f"{self.registers} registers")
        for pattern, why in (
            (r"\b(STL|LDL)\b", "spills"),
            (r"\bLDC\S* R\d+, c\[\w+\]\[R\d", "constants differ between threads"),
        ):
            found += [f"{why}: {text}" for text in self.instructions if re.search(pattern, text)]
        if self._loads_in_flight() < loads:
            found.append(f"{self._loads_in_flight()} loads of 128 bits at a time, not {loads}")
        stored = sum("STG" in text and ".128" in text for text in self.instructions)
        if stored < stores:
            found.append(f"{stored} stores of 128 bits, not {stores}")
        return found

    def _loads_in_flight(self) -> int:
        """Return how many 128-bit loads start before one of their results is used."""
        most, waiting, loaded = 0, 0, set[int]()
        for text in self.instructions:
            load = re.search(r"\bLDG\S*\.128\S* R(\d+), (.*)", text)
            used = {int(number) for number in re.findall(r"\bR(\d+)", load[2] if load else text)}
            if used & loaded:
                waiting, loaded = 0, set()
            if load:
                waiting += 1
                loaded |= set(range(int(load[1]), int(load[1]) + 4))
            most = max(most, waiting)
        return most


def find_cuobjdump() -> str | None:
    """Return the path of CUDA's disassembler, which Triton has, too."""
    paths = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    if (triton := find_spec("triton")) and triton.origin:
        paths.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(paths))


NVCC, CUOBJDUMP = build_kernels.find_nvcc(), find_cuobjdump()
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")
needs_cuobjdump = pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump")


Codes = dict[tuple[int, str], MachineCode]
"""Kernels by (architecture, name)."""


def read_code(binary: Path) -> Codes:
    """Return the kernels of a fat binary."""
    command = [str(CUOBJDUMP), "-sass", "-res-usage", str(binary)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: Codes = defaultdict(MachineCode)
    architecture, name = 0, ""
    for line in text.splitlines():
        if match := re.match(r"arch = sm_(\d+)", line):
            architecture = int(match[1])
        elif match := re.match(r"\s*Function\s?:? (\w+):?$", line):
            name = match[1]
        elif match := re.match(r"\s*REG:(\d+).* SHARED:(\d+)", line):
            code = found[architecture, name]
            code.registers, code.shared_bytes = int(match[1]), int(match[2])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?) ;", line):
            found[architecture, name].instructions.append(match[1])
    return found


def compiled(source: Path, folder: Path) -> Path:
    """Compile a source for every target as :func:`build_kernels.build` does."""
    assert NVCC is not None
    target = folder / "made.fatbin"
    architectures = build_kernels.known_architectures(NVCC)
    subprocess.run(build_kernels.command(NVCC, architectures, source, target), check=True)
    return target


@pytest.fixture(scope="module", params=kernels.SOURCES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def binary(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(build_kernels.SOURCES / f"{family}.cu", tmp_path_factory.mktemp(family))


def test_every_family_compiles_for_all_targets(binary: Path) -> None:
    assert binary.read_bytes().startswith(bytes.fromhex("50ed55ba"))  # a fat binary


@needs_cuobjdump
def test_every_kernel_is_fast_on_every_target(family: str, binary: Path) -> None:
    assert NVCC is not None
    found = read_code(binary)
    names = [name for name, place in kernels.KERNELS.items() if place == family]
    targets = build_kernels.known_architectures(NVCC)
    assert found.keys() == {(target, name) for target in targets for name in names}
    faults = {key: code.faults(*WIDE.get(key[1], (8, 8))) for key, code in found.items()}
    assert not any(faults.values()), faults


@needs_cuobjdump
def test_a_block_fits_on_a_multiprocessor_that_is_empty_and_on_no_other(binary: Path) -> None:
    """So a launch waits for a block of the model's to end. Fewer registers would change nothing:
    not even one warp fits beside a matrix product."""
    left = SM_REGISTERS - RESIDENT_REGISTERS
    for key, code in read_code(binary).items():
        assert 0 < code.taken(THREADS) <= SM_REGISTERS, key
        assert code.taken(WARP) > left, key
        assert code.shared_bytes <= 2048, key  # with what the driver keeps for itself


@needs_cuobjdump
def test_the_table_of_registers_is_of_these_kernels(family: str, binary: Path) -> None:
    assert NVCC is not None
    said = subprocess.run([NVCC, "--version"], check=True, capture_output=True, text=True).stdout
    if f"release {TABLE_NVCC}," not in said:
        pytest.skip(f"the table is of nvcc {TABLE_NVCC}")
    found, rows = read_code(binary), TABLE.read_text(encoding="utf-8").splitlines()
    targets = build_kernels.known_architectures(NVCC)
    for name in (name for name, place in kernels.KERNELS.items() if place == family):
        made = [str(found[target, name].registers) for target in targets]
        assert f"| `{name}` | {' | '.join(made)} |" in rows
        assert all(found[target, name].shared_bytes in (0, 1, 1025) for target in targets)
    assert "| kernel | " + " | ".join(f"`sm_{target}`" for target in targets) + " |" in rows


SLOW = """
__device__ __constant__ const int TABLE[64] = {1, 2, 3};

extern "C" __global__ void constants(int *to) { to[threadIdx.x] = TABLE[threadIdx.x]; }

extern "C" __global__ void spilled(int *to, const int *from) {
    int held[64];
    for (int i = 0; i < 64; i++)
        held[i] = from[i];
    for (int i = 0; i < 64; i++)
        to[i] = held[from[i] & 63];
}

extern "C" __global__ void narrow(int *to, const int *from) { to[threadIdx.x] = from[threadIdx.x]; }

extern "C" __global__ void one_by_one(uint4 *to, const uint4 *from) {
    for (int i = 0; i < 8; i++)
        to[threadIdx.x * 8 + i] = from[threadIdx.x * 8 + i];
}

extern "C" __global__ void crowded(uint4 *to, const uint4 *from) {
    uint4 held[40];
#pragma unroll
    for (int i = 0; i < 40; i++)
        held[i] = from[threadIdx.x + 32 * i];
#pragma unroll
    for (int i = 0; i < 40; i++)
        to[threadIdx.x + 32 * i] = held[39 - i];
}
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Codes:
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow.cu").write_text(SLOW)
    return read_code(compiled(folder / "slow.cu", folder))


@needs_cuobjdump
def test_a_block_that_fits_nowhere_is_seen(slow: Codes) -> None:
    """Negative control: too many registers for the threads of a launch, or so few that a warp does
    fit beside a matrix product."""
    crowded = [code for (_, name), code in slow.items() if name == "crowded"]
    narrow = [code for (_, name), code in slow.items() if name == "narrow"]
    assert crowded and all(code.taken(THREADS) > SM_REGISTERS for code in crowded)
    left = SM_REGISTERS - RESIDENT_REGISTERS
    assert narrow and all(code.taken(WARP) <= left for code in narrow)


@needs_cuobjdump
@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("constants", "constants differ between threads: "),
        ("spilled", "spills: "),
        ("narrow", "0 loads of 128 bits at a time, not 8"),
        ("narrow", "0 stores of 128 bits, not 8"),
        ("one_by_one", "1 loads of 128 bits at a time, not 8"),
        ("crowded", " registers"),
    ],
)
def test_a_slow_kernel_is_seen(slow: Codes, kernel: str, fault: str) -> None:
    """Negative control, on every target."""
    for (_, name), code in slow.items():
        if name == kernel:
            assert any(fault in text for text in code.faults(8, 8)), code
