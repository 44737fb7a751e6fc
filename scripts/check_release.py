"""Check what a release consists of: python -m scripts.check_release DIST [--sbom]

The sdist and the wheel have what they need and nothing else; with ``--sbom``, the SBOM names every
package that the wheel requires.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
WHEEL_HAS = (
    r"kvconnect/__init__\.py",
    r"kvconnect/py\.typed",
    r"kvconnect/_native\..*\.so",
    r"kvconnect/kernels/pages\.cu",
    r"kvconnect/cache/architectures\.json",
    r"kvconnect/settings/schema\.json",
    r"kvconnect/observability/metrics/dashboards/alerts\.yaml",
    r"kvconnect-.*/licenses/LICENSE",
)
SDIST_HAS = (r"pyproject\.toml", r"setup\.py", r"README\.md", r"LICENSE", r"kvconnect/native/.*\.c")
NOWHERE = r"(^|/)(tests?|benchmarks|\.venv.*|build|shared)/"  # in a wheel


def missing(names: list[str], wanted: tuple[str, ...]) -> list[str]:
    """Return the patterns that no name matches."""
    return [each for each in wanted if not any(re.fullmatch(each, name) for name in names)]


def check_files(dist: Path) -> list[str]:
    """Return what is wrong with the sdist and the wheel of a folder."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    in_wheel = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as packed:
        in_sdist = [name.partition("/")[2] for name in packed.getnames()]
    wrong = [f"{wheel.name} lacks {each}" for each in missing(in_wheel, WHEEL_HAS)]
    wrong += [f"{sdist.name} lacks {each}" for each in missing(in_sdist, SDIST_HAS)]
    return wrong + [f"{wheel.name} has {each}" for each in in_wheel if re.search(NOWHERE, each)]


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
