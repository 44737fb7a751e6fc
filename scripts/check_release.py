"""Check what a release consists of: python -m scripts.check_release DIST [--sbom]

The sdist and the wheels have what they need and nothing else. A wheel runs where its name says that
it does: with Python 3.11 and later, on any Linux whose glibc is not older.

With ``--sbom``, the SBOM names every package that the wheel requires.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from scripts.index_page import LINK

ROOT = Path(__file__).resolve().parents[1]
WHEEL_HAS = (
    r"kvconnect/__init__\.py",
    r"kvconnect/py\.typed",
    r"kvconnect/_native\.abi3\.so",
    r"kvconnect/kernels/pages\.cu",
    r"kvconnect/cache/architectures\.json",
    r"kvconnect/settings/schema\.json",
    r"kvconnect/observability/metrics/dashboards/alerts\.yaml",
    r"kvconnect-.*/licenses/LICENSE",
)
SDIST_HAS = (r"pyproject\.toml", r"setup\.py", r"README\.md", r"LICENSE", r"kvconnect/native/.*\.c")
NAME = re.compile(r"kvconnect-[^-]+-cp311-abi3-manylinux_2_(\d+)_(x86_64|aarch64)\.whl")
MACHINES = {"x86_64": 62, "aarch64": 183}  # as ELF numbers them
_GLIBC = re.compile(rb"GLIBC_2\.(\d+)")
_PARTS_OF_GLIBC = {"libc.so.6", "libpthread.so.0"}
_LIBRARY = re.compile(rb"\0(lib[\w+.-]+\.so[\w.]*)(?=\0)")
NOWHERE = r"(^|/)(tests?|benchmarks|\.venv.*|build|shared)/"  # in a wheel


def missing(names: list[str], wanted: tuple[str, ...]) -> list[str]:
    """Return the patterns that no name matches."""
    return [each for each in wanted if not any(re.fullmatch(each, name) for name in names)]


def check_files(dist: Path) -> list[str]:
    """Return what is wrong with the sdist and the wheels of a folder."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        in_sdist = [name.partition("/")[2] for name in packed.getnames()]
    wrong = [f"{sdist.name} lacks {each}" for each in missing(in_sdist, SDIST_HAS)]
    wheels = sorted(dist.glob("*.whl"))
    return [*wrong, *(each for wheel in wheels for each in check_wheel(wheel))] or (
        [] if wheels else [f"{dist} has no wheel"]
    )


def check_wheel(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        libraries = {name: packed.read(name) for name in names if name.endswith(".so")}
        about = [packed.read(name).decode() for name in names if name.endswith("/METADATA")]
    wrong = [f"lacks {each}" for each in missing(names, WHEEL_HAS)]
    wrong += [f"has {each}" for each in names if re.search(NOWHERE, each)]
    wrong += [f"links to {link[2]}, which an index lacks" for link in LINK.findall("".join(about))]
    tag = NAME.fullmatch(wheel.name)
    if tag is None:
        wrong.append(f"is not named as {NAME.pattern}")
    else:
        for name, library in libraries.items():
            wrong += check_library(name, library, int(tag[1]), tag[2])
    return [f"{wheel.name} {each}" for each in wrong]


def check_library(name: str, library: bytes, glibc: int, machine: str) -> list[str]:
    """Return why an extension does not run on a machine with a glibc of version 2.``glibc``."""
    wrong = []
    if int.from_bytes(library[18:20], "little") != MACHINES[machine]:
        wrong.append(f"has {name} of another machine than {machine}")
    newest = max((int(found) for found in _GLIBC.findall(library)), default=0)
    if newest > glibc:
        wrong.append(f"has {name} that needs glibc 2.{newest}")
    others = {found.decode() for found in _LIBRARY.findall(library)} - _PARTS_OF_GLIBC
    return wrong + [f"has {name} that needs {each}" for each in sorted(others)]


def check_sbom(dist: Path) -> list[str]:
    """Return which of the packages that a wheel with the router installs the SBOM lacks."""
    (file,) = dist.glob("*.cdx.json")
    named = {
        each["name"].lower().replace("_", "-")
        for each in json.loads(file.read_text())["components"]
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["router"]]
    names = [re.match(r"[\w-]+", each) for each in needed]
    return [f"{file.name} lacks {name[0]}" for name in names if name and name[0] not in named]


def main() -> int:
    dist = Path(sys.argv[1])
    wrong = check_sbom(dist) if "--sbom" in sys.argv[2:] else check_files(dist)
    sys.stderr.writelines(f"release: {each}\n" for each in wrong)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
