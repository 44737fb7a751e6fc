"""An engine's sources, from a wheel or a folder, and what they define. Nothing is imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@dataclass
class Module:
    """What one module defines and imports, also under ``if`` and ``try``. ``imported``: name in the
    module -> (module, name there); the name is "" for a module itself."""

    name: str
    is_package: bool
    defined: dict[str, list[Definition]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)

    def read(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.defined.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in targets(node):
                    if isinstance(target, ast.Name):
                        self.defined.setdefault(target.id, []).append(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            elif isinstance(node, ast.If | ast.Try):
                self.read([*node.body, *node.orelse])

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                name, origin = alias.asname or alias.name, (self._absolute(node), alias.name)
            else:
                name = alias.asname or alias.name.partition(".")[0]
                origin = (alias.name if alias.asname else name, "")
            self.imported[name] = origin

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = len(parts) - node.level + self.is_package
        return ".".join([*parts[:kept], *filter(None, [node.module])])


def targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


class Sources:
    """The modules of ``package``. ``where``: a wheel, or the folder that has the package."""

    def __init__(self, where: Path, package: str) -> None:
        self._where = where
        self.package = package
        self._modules: dict[str, Module | None] = {}

    @cached_property
    def _files(self) -> dict[str, str]:
        """Path of each module's file, relative to the root, by the module's name."""
        if self._where.is_dir():
            root = self._where / self.package
            found = [str(p.relative_to(self._where)) for p in root.rglob("*.py")]
        else:
            found = [n for n in self._wheel.namelist() if n.startswith(f"{self.package}/")]
        names = (path for path in found if path.endswith(".py"))
        return {p[:-3].removesuffix("/__init__").replace("/", "."): p for p in names}

    @cached_property
    def _wheel(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self._where)

    def text(self, name: str) -> str:
        path = self._files[name]
        if self._where.is_dir():
            return (self._where / path).read_text()
        return self._wheel.read(path).decode()

    def names(self) -> Iterator[str]:
        """Yield the names of all modules."""
        yield from sorted(self._files)

    def module(self, name: str) -> Module | None:
        """Return a module of the package; None if there is none of this name."""
        if name not in self._modules:
            self._modules[name] = self._read(name) if name in self._files else None
        return self._modules[name]

    def _read(self, name: str) -> Module:
        module = Module(name, self._files[name].endswith("/__init__.py"))
        module.read(ast.parse(self.text(name)).body)
        return module

    def find(self, module: str, name: str) -> tuple[Module, str] | None:
        """Return the module that defines a name, and its name there, following imports; None if it
        is not the package's, or not defined."""
        for _ in range(20):
            found = self.module(module)
            if found is None or name in found.defined:
                return found and (found, name)
            if name not in found.imported:
                return None
            module, name = found.imported[name]
            if not name:
                return None
        return None
