"""What a user gets by installing and importing the package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvconnect
from kvconnect import engine_versions, errors
from scripts.check_release import check_files, check_sbom, check_wheel

ROOT = Path(__file__).resolve().parents[3]

HEAVY = ["torch", "vllm", "sglang", "cupy", "nixl", "aiohttp", "prometheus_client", "xxhash"]
HEAVY += ["rich", "matplotlib", "jinja2"]


def loaded_after(code: str) -> set[str]:
    """The heavy packages in ``sys.modules`` after ``code`` ran in a fresh interpreter."""
    report = f"{code}\nimport sys; print(*(n for n in {HEAVY!r} if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import kvconnect",
        "import kvconnect; [getattr(kvconnect, name) for name in kvconnect.__all__]",
        "import kvconnect.settings, kvconnect.memory, kvconnect.stats, kvconnect.engine_versions",
        "import kvconnect.cli",
    ],
)
def test_importing_loads_no_engine(code: str) -> None:
    assert loaded_after(code) == set()


def test_the_probe_sees_a_loaded_package() -> None:
    assert loaded_after("import xxhash") == {"xxhash"}


def test_public_names_resolve_and_others_do_not() -> None:
    for name in kvconnect.__all__:
        assert getattr(kvconnect, name) is not None
    assert kvconnect.ConfigError is errors.ConfigError
    assert dir(kvconnect) == sorted(kvconnect.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ConfigErr'"):
        kvconnect.ConfigErr  # type: ignore[attr-defined]  # noqa: B018


def test_version_is_that_of_the_installed_package() -> None:
    assert kvconnect.__version__ == version("kvconnect")


def test_the_changelog_begins_with_the_version_in_work() -> None:
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert newest == number.replace(".0.dev0", " (unreleased)").removesuffix(".0")


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert found["kvconnect"] == "kvconnect.engines.vllm:register"


def test_supported_range_is_the_one_that_pip_is_told() -> None:
    (first, last) = engine_versions.SUPPORTED_VLLM
    said = next(line for line in requires("kvconnect") or [] if line.startswith("vllm"))
    assert f">={first[0]}.{first[1]}" in said
    assert f"<{last[0]}.{last[1] + 1}" in said


@pytest.mark.parametrize(
    ("text", "supported"),
    [
        ("0.32.0", True),
        ("0.33.2", True),
        ("0.32.0+cpu", True),
        ("0.33.0rc1", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_which_engines_are_supported(text: str, supported: bool) -> None:
    assert engine_versions.vllm_is_supported(text) is supported


# The development environment ----------------------------------------------------------------------


def locked(engine: str) -> dict[str, str]:
    """The packages of a lock file with their versions. Each must have a hash."""
    text = (ROOT / "requirements" / f"{engine}.lock").read_text()
    entries = re.findall(
        r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M
    )
    assert len(entries) == len(re.findall(r"^\S", text, re.M))
    return {canonicalize_name(name): version for name, version, _ in entries}


def not_met(wanted: list[str], found: dict[str, str]) -> list[str]:
    def met(one: Requirement) -> bool:
        name = canonicalize_name(one.name)
        return name in found and found[name] in one.specifier

    return [text for text in wanted if not met(Requirement(text))]


@pytest.mark.parametrize(("engine", "extra"), [("vllm", "dev"), ("sglang", "router")])
def test_the_lock_has_what_is_asked_for(engine: str, extra: str) -> None:
    found = locked(engine)
    setup = (ROOT / "scripts" / "setup").read_text()
    versions_set = dict(re.findall(r'^[A-Z]+="([\w-]+)==([\w.]+)"', setup, re.M))
    exact = {name: v for name, v in versions_set.items() if name in found}
    assert len(exact) >= 3
    assert all(found[name] == v for name, v in exact.items())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"][extra]
    assert not_met(wanted, found) == []
    assert not_met([*wanted, "msgspec>=99", "no-such-package"], found) == [
        "msgspec>=99",
        "no-such-package",
    ]


# The repository -----------------------------------------------------------------------------------

FOLDERS = {".ci", ".github", "benchmarks", "demo", "deploy", "docs", "examples", "kernels"}
FOLDERS |= {"kvconnect", "requirements", "scripts", "tests"}
FILES = {".dockerignore", ".gitignore", ".pre-commit-config.yaml", "mkdocs.yml", "pyproject.toml"}
FILES |= {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md"}
FILES |= {"SECURITY.md", "setup.py"}
BUILT = (".whl", ".so", ".fatbin", ".pyc", ".tar.gz", ".deb")


def strays(tracked: list[str]) -> list[str]:
    """Return files that have no place in the repository: built ones, and unknown ones beside the
    folders."""
    known = {name for name in tracked if name in FILES or name.partition("/")[0] in FOLDERS}
    return [name for name in tracked if name not in known or name.endswith(BUILT)]


def test_the_repository_has_nothing_that_was_downloaded_or_built() -> None:
    if not (ROOT / ".git").exists():
        return
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    tracked = listed.stdout.decode().splitlines()
    assert len(tracked) > 500, "the listing has the files"
    assert strays(tracked) == []


def test_a_file_that_has_no_place_is_found() -> None:
    wrong = ["nh3-1-cp38-abi3.whl", "notes.txt", "kvconnect/_native.abi3.so"]
    assert strays(["README.md", "kvconnect/types.py", *wrong]) == wrong


# Releases -----------------------------------------------------------------------------------------


def test_a_release_that_lacks_something_is_found(tmp_path: Path) -> None:
    names = ["kvconnect/__init__.py", "kvconnect/py.typed", "kvconnect/_native.so"]
    names += [
        "kvconnect/kernels/pages.cu",
        "kvconnect/cache/architectures.json",
        "kvconnect/settings/schema.json",
        "kvconnect/observability/metrics/dashboards/alerts.yaml",
    ]
    names += ["kvconnect-1.dist-info/licenses/LICENSE"]
    source = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "kvconnect/native/native.c"]

    def wrong(in_wheel: list[str], in_sdist: list[str]) -> list[str]:
        with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
            for name in in_wheel:
                wheel.writestr(name, extension())
        with tarfile.open(tmp_path / "k.tar.gz", "w:gz") as sdist:
            for name in in_sdist:
                sdist.addfile(tarfile.TarInfo(f"k-1/{name}"))
        return check_files(tmp_path)

    names[2] = "kvconnect/_native.abi3.so"
    assert wrong(names, source) == []
    assert len(wrong(names[1:], source)) == len(wrong(names, source[1:])) == 1
    assert wrong([*names, "tests/x.py"], source) == [f"{WHEEL} has tests/x.py"]
    names[2] = "kvconnect/_native.cpython-311.so"  # for one version of Python
    assert len(wrong(names, source)) == 1


WHEEL = "kvconnect-1-cp311-abi3-manylinux_2_17_x86_64.whl"


def extension(machine: int = 62, needs: bytes = b"libc.so.6", version: bytes = b"2.17") -> bytes:
    """What is read of an extension: its machine, and the names in it."""
    head = b"\x7fELF".ljust(18, b"\0") + machine.to_bytes(2, "little")
    return head + b"\0" + needs + b"\0GLIBC_2.2.5\0GLIBC_" + version + b"\0"


def test_a_link_that_leads_nowhere_on_an_index_is_found(tmp_path: Path) -> None:
    for about, said in (("[x](https://example.org)", 0), ("[x](docs/x.md)", 1)):
        with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
            wheel.writestr("kvconnect-1.dist-info/METADATA", about)
        found = [each for each in check_wheel(tmp_path / WHEEL) if "links to docs/x.md" in each]
        assert len(found) == said


@pytest.mark.parametrize(
    ("name", "library", "said"),
    [
        (WHEEL, extension(), ""),
        (WHEEL.replace("x86_64", "aarch64"), extension(183), ""),
        (WHEEL.replace("x86_64", "aarch64"), extension(), "of another machine than aarch64"),
        (WHEEL, extension(version=b"2.34"), "needs glibc 2.34"),
        (WHEEL, extension(needs=b"libpython3.11.so.1.0"), "needs libpython3.11.so.1.0"),
        ("kvconnect-1-cp311-cp311-linux_x86_64.whl", extension(), "is not named as"),
    ],
)
def test_a_wheel_that_does_not_run_where_it_says_is_found(
    tmp_path: Path, name: str, library: bytes, said: str
) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("kvconnect/_native.abi3.so", library)
    found = [each for each in check_wheel(tmp_path / name) if " lacks " not in each]
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_an_sbom_that_lacks_something_is_found(tmp_path: Path) -> None:
    names = ["msgspec", "xxhash", "aiohttp", "httptools", "prometheus_client"]
    names += ["pyyaml", "pyzmq", "uvloop"]
    for gone in (None, *names):
        parts = [{"name": name} for name in names if name != gone]
        (tmp_path / "k.cdx.json").write_text(json.dumps({"components": parts}))
        found = check_sbom(tmp_path)
        assert found == ([f"k.cdx.json lacks {gone.replace('_', '-')}"] if gone else [])
