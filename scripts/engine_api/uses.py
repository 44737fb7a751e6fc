"""What KVConnect's sources use of an engine: the names that they import, and every word in them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("kvconnect", "tests", "benchmarks")


@dataclass
class Uses:
    """``imported``: (module, name). ``modules``: that the package imports from or whole; what its
    tests import does not count. ``words``: identifiers anywhere, also in strings, so that what
    is read by ``getattr`` counts. ``called`` and ``extended``: imported names that are called, and
    that are base classes."""

    imported: set[tuple[str, str]] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    extended: set[str] = field(default_factory=set)

    def read(self, text: str, package: str) -> None:
        """Add what a source uses of ``package``."""
        tree = ast.parse(text)
        self.imported |= set(imports(tree, package))
        for node in ast.walk(tree):
            self._see(node)

    def _see(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self.words.add(node.id)
        elif isinstance(node, ast.Attribute):
            self.words.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            self.words.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            self.words.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier():
                self.words.add(node.value)
        elif isinstance(node, ast.ClassDef):
            self.extended |= {ast.unparse(base) for base in node.bases}
        if isinstance(node, ast.Call):
            self.called.add(ast.unparse(node.func).rpartition(".")[2])


def imports(tree: ast.AST, package: str) -> Iterable[tuple[str, str]]:
    """Yield the (module, name) that a source imports of ``package``; ``import package`` yields the
    attributes that the source reads from it. What may be missing is left out."""
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import) and package in {alias.name for alias in node.names}:
            for read in ast.walk(tree):
                if isinstance(read, ast.Attribute) and ast.unparse(read.value) == package:
                    yield package, read.attr


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those of a ``try`` that expects an ImportError."""
    for child in ast.iter_child_nodes(tree):
        handled = [ast.unparse(h.type) for h in getattr(child, "handlers", ()) if h.type]
        if "ImportError" not in handled:
            yield child
            yield from walk(child)


def users(package: str, tops: Iterable[str] = TOPS) -> list[Path]:
    """Return the sources of KVConnect that import ``package``."""
    paths = (path for top in tops for path in sorted((ROOT / top).rglob("*.py")))
    return [path for path in paths if any(imports(ast.parse(path.read_text()), package))]


def uses_of(package: str) -> Uses:
    """Return what KVConnect, its tests and its benchmarks use of ``package``."""
    uses = Uses()
    for top in TOPS:
        for path in users(package, [top]):
            uses.read(path.read_text(), package)
        if top == "kvconnect":
            uses.modules = {name for pair in uses.imported for name in (pair[0], ".".join(pair))}
    return uses
