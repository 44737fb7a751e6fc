"""Stubs of the part of an engine that KVConnect uses, as text for a type checker.

Modules that the package ``kvconnect`` imports from have all their public names, and classes all
their public members, so that most changes of KVConnect need no new stubs. Annotations become
``Any`` where they lead out of the engine and the standard library, and on members that KVConnect
does not name.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections import defaultdict
from collections.abc import Sequence

from scripts.engine_api.sources import Module, Sources, targets
from scripts.engine_api.uses import Uses

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
KEPT_DECORATORS = {
    *("property", "cached_property", "functools.cached_property", "classmethod", "staticmethod"),
    *("abstractmethod", "abc.abstractmethod", "overload"),
}


class Stubs:
    """Writes the stubs of what ``uses`` names, and of what that leads to."""

    def __init__(self, sources: Sources, uses: Uses) -> None:
        self._sources = sources
        self._uses = uses
        self._texts: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._todo: list[tuple[str, str]] = []
        self._whole: set[tuple[str, str]] = set()
        self._added: set[tuple[str, str, bool]] = set()
        self._lines: set[str] = set()
        self._typed = True
        self.missing: list[str] = []

    def write(self) -> dict[str, str]:
        """Return the text of each module; ``missing`` has what the engine does not define."""
        for module, name in sorted(self._uses.imported):
            self._add_import(module, name)
        while self._todo:
            self._add(*self._todo.pop())
        folders = {m.rpartition(".")[0] for m in self._texts} - {""}
        while folders:
            for name in folders:
                self._texts.setdefault(name, {})
            folders = {n.rpartition(".")[0] for n in folders} - {""} - set(self._texts)
        return {
            name: "".join(f"{parts[key]}\n" for key in sorted(parts))
            for name, parts in sorted(self._texts.items())
        }

    def _add_import(self, module: str, name: str) -> None:
        below = f"{module}.{name}"
        if self._sources.find(module, name) is not None:
            self._add_module(module)
            self._todo.append((module, name))
        elif self._sources.module(below):
            self._add_module(below)
        else:
            self.missing.append(below)

    def _add_module(self, name: str) -> None:
        """Add what a module defines, and what a package offers under names of its own."""
        module = self._sources.module(name)
        assert module is not None
        self._texts[name]
        defined = set(module.defined) - {"__getattr__", "__all__", "logger"}
        names = defined & self._uses.words
        if name in self._uses.modules and name != self._sources.package:
            names |= {own for own in defined if not own.startswith("_")}
            names.update(strings(module.defined.get("__all__", [])) if module.is_package else ())
        self._todo.extend((name, own) for own in sorted(names))

    def _add(self, module: str, name: str) -> None:
        """Add one name to the stub of its module, as its definition or as an import."""
        key = module, name, (module, name) in self._whole
        if key in self._added:
            return
        self._added.add(key)
        found = self._sources.find(module, name)
        if found is None:
            return
        origin, own = found
        if (origin.name, own) != (module, name):
            self._texts[module][name] = f"from {origin.name} import {own} as {name}"
            self._todo.append((origin.name, own))
            return
        self._lines = set()
        self._typed = name in self._uses.words
        nodes = origin.defined[own]
        several = without_overloaded(nodes) if isinstance(nodes[0], FUNCTIONS) else nodes[:1]
        parts = [self._definition(origin, node) for node in several]
        self._texts[module][name] = "\n".join([*sorted(self._lines), *parts])

    def _definition(self, module: Module, node: ast.AST) -> str:
        if isinstance(node, ast.ClassDef):
            return self._class(module, node)
        if isinstance(node, FUNCTIONS):
            return self._function(module, node, "")
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        (target,) = (t for t in targets(node)[:1])
        name = ast.unparse(target)
        if isinstance(node, ast.AnnAssign):
            if ast.unparse(node.annotation).endswith("TypeAlias") and node.value is not None:
                return f"{name} = {self._type(module, node.value)}"
            return f"{name}: {self._type(module, node.annotation)}"
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "NewType":
            self._lines.add("from typing import NewType")
            return ast.unparse(node)
        return f"{name}: {constant(node.value)}"

    # Classes ------------------------------------------------------------------------------------

    def _class(self, module: Module, node: ast.ClassDef) -> str:
        self._typed = True
        names = [ast.unparse(base) for base in node.bases]
        bases = [self._base(module, base) for base in node.bases]
        whole = (module.name, node.name) in self._whole or node.name in self._uses.extended
        if whole:
            self._whole_bases(module, names)
        members = {**self._fields(module, node, whole), **self._methods(module, node, whole)}
        listed = ", ".join(base for base in bases if base)
        only_named = any("kw_only=True" in ast.unparse(d) for d in node.decorator_list)
        decorator = f"@dataclass(kw_only={only_named})\n" if is_record(node) else ""
        return f"{decorator}class {node.name}({listed}):\n" + (
            "".join(members.values()) or "    ...\n"
        )

    def _whole_bases(self, module: Module, names: list[str]) -> None:
        for name in names:
            found = self._sources.find(module.name, name)
            if found is not None:
                self._whole.add((found[0].name, found[1]))
                self._todo.append((found[0].name, found[1]))

    def _base(self, module: Module, base: ast.expr) -> str:
        """Return a base class as the stub names it: records of msgspec have none, since they are
        written as data classes."""
        text = ast.unparse(base)
        if text in ("msgspec.Struct", "BaseModel") or text.startswith("Generic["):
            return ""
        return self._type(module, base)

    def _keep(self, name: str, whole: bool) -> bool:
        """Return whether a class's member is kept, and note whether its types are."""
        named = name in self._uses.words and not name.startswith("__")
        self._typed = whole or named
        return named or not name.startswith("_")

    def _fields(self, module: Module, node: ast.ClassDef, whole: bool) -> dict[str, str]:
        """Return annotated fields, constants, and what methods set on ``self``."""
        found: dict[str, str] = {}
        for child in node.body:
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                name = child.target.id
                if self._keep(name, whole) or is_record(node):
                    kind = self._type(module, child.annotation)
                    found[name] = f"    {name}: {kind}{default(child.value)}\n"
            elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
                name = child.targets[0].id
                if self._keep(name, whole):
                    enum = any("Enum" in ast.unparse(base) for base in node.bases)
                    text = f"{name} = ..." if enum else f"{name}: {constant(child.value)}"
                    found[name] = f"    {text}\n"
        for name, kind in self._set_on_self(module, node, whole).items():
            if name not in found:
                found[name] = f"    {name}: {f'ClassVar[{kind}]' if is_record(node) else kind}\n"
        methods = {child.name for child in node.body if isinstance(child, FUNCTIONS)}
        return {name: text for name, text in found.items() if name not in methods}

    def _set_on_self(self, module: Module, node: ast.ClassDef, whole: bool) -> dict[str, str]:
        found: dict[str, str] = {}
        for method in (child for child in node.body if isinstance(child, FUNCTIONS)):
            arguments = {a.arg: a.annotation for a in all_arguments(method.args)}
            for child in ast.walk(method):
                if not isinstance(child, ast.Assign | ast.AnnAssign):
                    continue
                for target in targets(child):
                    text = ast.unparse(target)
                    if not text.startswith("self.") or not text[5:].isidentifier():
                        continue
                    if not self._keep(text[5:], whole):
                        continue
                    kind = child.annotation if isinstance(child, ast.AnnAssign) else None
                    if kind is None and isinstance(child.value, ast.Name):
                        kind = arguments.get(child.value.id)
                    known = "Any" if kind is None else self._type(module, kind)
                    found.setdefault(text[5:], known)
        return found

    def _methods(self, module: Module, node: ast.ClassDef, whole: bool) -> dict[str, str]:
        found: dict[str, str] = {}
        for child in without_overloaded(node.body):
            made = child.name in ("__init__", "__new__", "__getattr__")
            if self._keep(child.name, whole and not made) or made:
                text = self._function(module, child, "    ") + "\n"
                found[child.name] = found.get(child.name, "") + text
        return found

    # Functions and types ------------------------------------------------------------------------

    def _function(self, module: Module, node: FUNCTIONS, indent: str) -> str:
        lines = []
        for decorator in node.decorator_list:
            name = ast.unparse(decorator)
            if name in KEPT_DECORATORS:
                self._import_of(module, name.partition(".")[0])
                lines.append(f"{indent}@{name}")
            elif name.endswith(".setter"):
                lines.append(f"{indent}@{name}")
        text = ", ".join(self._parameters(module, node.args))
        returns = "Any" if node.returns is None else self._type(module, node.returns)
        returns = "None" if node.name == "__init__" else returns
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        lines.append(f"{indent}{prefix}def {node.name}({text}) -> {returns}: ...")
        return "\n".join(lines)

    def _parameters(self, module: Module, of: ast.arguments) -> list[str]:
        plain = [*of.posonlyargs, *of.args]
        first = len(plain) - len(of.defaults)
        made = [self._parameter(module, a, i >= first) for i, a in enumerate(plain)]
        if of.posonlyargs:
            made.insert(len(of.posonlyargs), "/")
        if of.vararg:
            made.append("*" + self._parameter(module, of.vararg, False))
        elif of.kwonlyargs:
            made.append("*")
        for argument, value in zip(of.kwonlyargs, of.kw_defaults, strict=True):
            made.append(self._parameter(module, argument, value is not None))
        if of.kwarg:
            made.append("**" + self._parameter(module, of.kwarg, False))
        return made

    def _parameter(self, module: Module, argument: ast.arg, has_default: bool) -> str:
        if argument.arg in ("self", "cls") and argument.annotation is None:
            return argument.arg
        kind = "Any" if argument.annotation is None else self._type(module, argument.annotation)
        return f"{argument.arg}: {kind}{' = ...' if has_default else ''}"

    def _import_of(self, module: Module, name: str) -> bool:
        """Note the import that a name of the standard library needs; return whether it is known."""
        if hasattr(builtins, name):
            return True
        origin, own = module.imported.get(name, ("", ""))
        if origin.partition(".")[0] not in sys.stdlib_module_names:
            return False
        line = f"from {origin} import {own} as {name}" if own else f"import {origin} as {name}"
        self._lines.add(line)
        return True

    def _type(self, module: Module, node: ast.expr) -> str:
        """Return an annotation with what is not known here as ``Any``."""
        if not self._typed:
            return "Any"
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                try:
                    return self._type(module, ast.parse(node.value, mode="eval").body)
                except SyntaxError:
                    return "Any"
            return "None" if node.value is None else "Any"
        if isinstance(node, ast.BinOp):
            return f"{self._type(module, node.left)} | {self._type(module, node.right)}"
        if isinstance(node, ast.Subscript):
            return self._subscript(module, node)
        if isinstance(node, ast.Attribute):
            root = ast.unparse(node).partition(".")[0]
            return ast.unparse(node) if self._import_of(module, root) else "Any"
        if isinstance(node, ast.Name):
            return self._named(module, node.id)
        return "Any"

    def _subscript(self, module: Module, node: ast.Subscript) -> str:
        outer = self._type(module, node.value)
        if outer == "Any":
            return "Any"
        if outer.rpartition(".")[2] in ("Literal", "Callable", "Annotated", "NotRequired"):
            return "Any"
        if self._sources.find(module.name, outer):
            return outer  # type variables are not written
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        made = ["..." if ast.unparse(item) == "..." else self._type(module, item) for item in inner]
        return f"{outer}[{', '.join(made)}]"

    def _named(self, module: Module, name: str) -> str:
        if name == "Any":
            return "Any"
        found = self._sources.find(module.name, name)
        if found is None:
            return name if self._import_of(module, name) else "Any"
        origin, own = found
        if not is_type(origin.defined[own][0]):
            return "Any"
        self._todo.append((origin.name, own))
        if origin.name != module.name or own != name:
            self._lines.add(f"from {origin.name} import {own} as {name}")
        return name


def strings(nodes: Sequence[ast.AST]) -> list[str]:
    """Return the strings of a list, as in ``__all__``."""
    return [
        child.value
        for node in nodes
        for child in ast.walk(node)
        if isinstance(child, ast.Constant) and isinstance(child.value, str)
    ]


def is_type(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.value).startswith("NewType(")
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation).endswith("TypeAlias")
    return isinstance(node, ast.ClassDef)


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class's fields are the parameters of its constructor."""
    if any(isinstance(c, FUNCTIONS) and c.name == "__init__" for c in node.body):
        return False
    marks = [*map(ast.unparse, node.decorator_list), *map(ast.unparse, node.bases)]
    records = (
        "dataclass",
        "dataclasses.dataclass",
        "config",
        "msgspec.Struct",
        "EventBatch",
        "KVCacheEvent",
        "BaseModel",
    )
    return any(mark.partition("(")[0] in records for mark in marks)


def without_overloaded(body: Sequence[ast.AST]) -> list[FUNCTIONS]:
    """Return the functions of a body; of overloaded ones, only what a caller sees."""
    functions = [child for child in body if isinstance(child, FUNCTIONS)]
    overloaded = {f.name for f in functions if "overload" in map(ast.unparse, f.decorator_list)}
    return [
        f
        for f in functions
        if f.name not in overloaded or "overload" in map(ast.unparse, f.decorator_list)
    ]


def default(value: ast.expr | None) -> str:
    """Return the default of a field, as far as it changes the constructor."""
    if value is None:
        return ""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) not in ("field", "Field"):
        return " = ..."
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
    given = {k: named[k] for k in ("init", "kw_only") if k in named}
    has_default = bool(value.args or {"default", "default_factory"} & set(named))
    if not given:
        return " = ..." if has_default else ""
    if has_default:
        given["default"] = "_default"
    return f" = field({', '.join(f'{k}={v}' for k, v in given.items())})"


def constant(value: ast.expr | None) -> str:
    """Return the type of a constant, with its value where that is short."""
    if isinstance(value, ast.Constant) and value.value is not None:
        return f"{type(value.value).__name__} = {value.value!r}"
    return "Any"


def all_arguments(of: ast.arguments) -> list[ast.arg]:
    return [*of.posonlyargs, *of.args, *of.kwonlyargs]
