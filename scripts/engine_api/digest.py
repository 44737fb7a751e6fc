"""The text that ``python -m scripts.engine_api`` prints: stubs by module, then the calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scripts.engine_api.calls import calls
from scripts.engine_api.sources import Sources
from scripts.engine_api.stubs import Stubs
from scripts.engine_api.uses import uses_of

MARK = "# == "
MISSING = "# missing: "
CALLS = "connector_calls"
HEAD = (
    "from dataclasses import dataclass, field\n"
    "from typing import Any, ClassVar\n"
    "_default: Any  # of fields\n"
)


def digest(where: Path, package: str) -> str:
    """Return the digest of an engine's wheel, or of the folder that it is installed in."""
    sources = Sources(where, package)
    stubs = Stubs(sources, uses_of(package))
    texts = stubs.write()
    if package == "vllm":
        texts[CALLS] = calls(sources)
    missing = "".join(f"{MISSING}{name}\n" for name in stubs.missing)
    return missing + "".join(f"{MARK}{name}\n{text}" for name, text in texts.items())


def parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each module of a digest."""
    for part in text.split(MARK)[1:]:
        name, _, body = part.partition("\n")
        yield name, body


def unpack(text: str, folder: Path) -> None:
    """Write a digest as packages of stubs that a type checker finds in ``folder``."""
    for name, body in parts(text):
        path = folder / name.replace(".", "/")
        if name == CALLS:
            path.with_suffix(".py").write_text(body)
        else:
            path.mkdir(parents=True, exist_ok=True)
            (path / "__init__.pyi").write_text(HEAD + body)
