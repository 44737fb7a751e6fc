"""The rules of ``test_architecture.py`` as data, and the checkers that read sources against them.

A checker takes texts and returns what is wrong with them; it looks at no files, so the tests can
also show it bad examples.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

LAYERS = (
    {
        "types",
        "errors",
        "settings",
        "stats",
        "memory",
        "engine_versions",
        "cuda",
        "threads",
        "circuit_breaker",
        "bounded",
        "life_cycles",
        "secret_files",
        "changed_files",
        "extras",
        "user_folders",
        "terminal",
        "open_files",
        "timed_calls",
        "direct_http",
    },
    {"cache", "protocol", "_native"},
    {"copy", "transport"},
    {"jobs", "peers"},
    {"offload"},
    {"tiers", "disaggregation"},
    {"observability"},
    {"router"},
    {"engines", "testing", "doctor", "trial", "__init__"},
    {"commands"},
    {"cli"},
)
"""L0 to L10. An import goes to a lower layer or stays inside its folder; L0 is one folder."""

ROUTER_LAYERS = (
    {"policy"},
    {"requests"},
    {"api_keys", "flag_sources", "freed_frames", "supervisor"},
    {"engine_spec"},
    {"options", "credentials", "cross_origin"},
    {"connections", "decision", "flags", "metrics"},
    {"fleet"},
    {"tracing"},
    {"http"},
    {"cache_admin"},
    {"admin"},
    {"app"},
    {"server"},
)
"""The same inside ``router/``: what chooses stands at the bottom and knows nothing of what asks it.
Imports for type checking count too."""

FOREIGN = {
    "msgspec": ("",),
    "torch": ("copy/", "offload/", "tiers/", "disaggregation/", "engines/", "testing/", "doctor/"),
    "numpy": ("transport/nixl/",),
    "xxhash": ("offload/", "tiers/backends/", "transport/page_io.py", "copy/kernels/reference.py"),
    "cupy": ("copy/kernel_loading.py",),
    "valkey": ("tiers/backends/valkey.py",),
    "obstore": ("tiers/backends/object.py",),
    "mooncake": ("tiers/backends/mooncake.py",),
    "prometheus_client": (
        *("observability/metrics/prometheus.py", "observability/top/scrape.py"),
        "router/",
    ),
    "rich": ("observability/top/",),
    "matplotlib": ("observability/report/plots.py",),
    "jinja2": ("observability/report/page.py",),
    "markupsafe": ("observability/report/page.py",),  # a part of jinja2
    "aiohttp": ("router/",),
    "uvloop": ("router/",),
    "httptools": ("router/",),
    "zmq": ("router/",),
    "kubernetes": ("router/fleet/sources/kubernetes.py",),
    "urllib3": ("router/fleet/sources/kubernetes.py",),
    "grpc": ("router/connections/",),
    "google": ("router/connections/",),  # protobuf
    "etcd3gw": ("router/fleet/sources/etcd.py",),
    "huggingface_hub": ("cache/model_identity.py",),
    "opentelemetry": ("observability/tracing/",),
    "vllm": ("engines/vllm/",),
    "sglang": ("engines/sglang/",),
    "requests": ("engines/sglang/direct_requests.py",),  # SGLang's own client
}
"""Third-party package -> the paths that may import it. Type-checking imports are free."""

IMPURE = set(FOREIGN) - {"msgspec", "xxhash"}

NEVER = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
"""Deserialising with these runs code that a peer or a file chose."""

PURE = (
    *("cache/groups.py", "cache/head_shards.py", "cache/keys.py", "cache/layout.py"),
    *("cache/pages.py", "cache/record_format.py", "copy/base.py"),
    "protocol/",
    *("jobs.py", "life_cycles.py"),
    *(
        "offload/planner.py",
        "offload/index.py",
        "offload/copy_jobs.py",
        "offload/ledger.py",
        "offload/messages.py",
    ),
    *("offload/load_mode.py", "offload/copy_schedule.py", "offload/shared_loads.py"),
    *("offload/retention.py", "offload/hints/"),
    "offload/eviction/",
    *(
        "tiers/messages.py",
        "tiers/planner.py",
        "tiers/lookup.py",
        "tiers/search.py",
        "tiers/writeback.py",
        "tiers/offers.py",
        "tiers/removals.py",
        "tiers/tier_jobs.py",
    ),
    "tiers/cost_model.py",
    *(
        "disaggregation/limits.py",
        "disaggregation/messages.py",
        "disaggregation/leases.py",
        "disaggregation/receives.py",
        "disaggregation/prefill_planner.py",
    ),
    *(
        "disaggregation/prefill_actions.py",
        "disaggregation/prefill_reads.py",
        "disaggregation/decode_actions.py",
        "disaggregation/decode_planner.py",
        "disaggregation/wire_blocks.py",
        "disaggregation/states.py",
    ),
    *("observability/metrics/catalog.py", "observability/metrics/router_catalog.py"),
    *("observability/metrics/model.py", "observability/metrics/rates.py"),
    *("router/policy/", "router/requests/", "router/api_keys.py"),
    *("router/engine_spec.py", "router/options.py", "router/decision.py"),
    "router/fleet/kv_events.py",
    *("router/fleet/pairing.py", "router/fleet/reports.py", "router/fleet/cache_reports.py"),
)
"""Modules that decide and never do: no I/O, no clock, no thread, no tensor. Time and randomness
come in as arguments, which replay needs."""

NOT_IN_PURE = {
    *("asyncio", "concurrent", "multiprocessing", "threading", "queue", "selectors", "select"),
    *("socket", "ssl", "subprocess", "os", "io", "pathlib", "tempfile", "shutil", "mmap"),
    *("time", "datetime", "random", "secrets"),
}
"""What no module of ``PURE`` imports, nor any package of ``FOREIGN`` but msgspec."""

FILE_LINES, CLASS_LINES, CLASS_METHODS, CLASS_ATTRIBUTES = 400, 350, 25, 20
FUNCTION_LINES, COMPLEXITY, PARAMETERS, BROAD_EXCEPTS = 60, 10, 8, 1
"""What is larger needs a line of reason in ``EXCEPTIONS`` of ``test_architecture.py``."""

MOST_FILE_LINES = 600
"""No reason is good enough for a longer file."""


@dataclass(frozen=True)
class Import:
    """One import statement: who imports what. ``local``: inside a function."""

    path: str
    line: int
    target: str
    local: bool

    @property
    def registry(self) -> bool:
        """Whether an ``__init__.py`` loads one of its parts by name when it is asked for."""
        return self.local and self.path.endswith("__init__.py")

    @property
    def deep(self) -> bool:
        """Whether the target lies below a part: ``kvconnect.part.more``."""
        return self.target.count(".") > 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: imports {self.target}"


@dataclass(frozen=True)
class Size:
    """One thing over its budget."""

    budget: str
    place: str
    number: int


# Imports ----------------------------------------------------------------------------------------


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, local: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node with whether it is inside a function; bodies under TYPE_CHECKING left out."""
    for child in ast.iter_child_nodes(node):
        yield child, local
        inside = local or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            yield from walk(ast.Module(child.orelse, []), inside)
        else:
            yield from walk(child, inside)


def imports(path: str, text: str) -> Iterator[Import]:
    for node, local in walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, local)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield Import(path, node.lineno, f"{node.module}.{alias.name}", local)


def imported_tests(found: Iterable[Import]) -> list[str]:
    """Imports of test modules: a helper that two of them need has a module of its own."""
    return [str(item) for item in found if re.match(r"tests\.([a-z_]+\.)*test_", item.target)]


def unit(path: str) -> str:
    """The folder or file right under the package that ``path`` belongs to."""
    return path.split("/")[0].removesuffix(".py")


def layer(name: str) -> int:
    """Number of the layer that holds ``name``; a new part must be given one first."""
    for number, names in enumerate(LAYERS):
        if name in names:
            return number
    raise AssertionError(f"{name!r} stands in no layer: add it to LAYERS")


def part(item: Import) -> str:
    """What an import of the project's own names loads right under the package.

    ``from kvconnect import memory`` names a part, ``from kvconnect import Misuse`` the root.
    """
    name = [*item.target.split("."), "__init__"][1]
    return name if any(name in names for names in LAYERS) or item.deep else "__init__"


def upward_imports(found: Iterable[Import]) -> list[str]:
    """Imports of the project's own parts that go up or sideways."""
    wrong = []
    for item in found:
        if item.target.split(".")[0] != "kvconnect" or item.registry:
            continue
        source, target = unit(item.path), part(item)
        if target == source:
            continue
        if layer(target) > layer(source) or layer(target) == layer(source) > 0:
            wrong.append(str(item))
    return wrong


def upward_in_router(texts: dict[str, str]) -> list[str]:
    """Imports inside ``router/`` that go up or sideways."""
    floor = {name: number for number, names in enumerate(ROUTER_LAYERS) for name in names}
    wrong = []
    for path, text in texts.items():
        if not path.startswith("router/") or path == "router/__init__.py":
            continue
        source = unit(path.removeprefix("router/"))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in router_parts(node):
                    if name != source and floor[name] >= floor[source]:
                        wrong.append(f"{path}:{node.lineno}: imports {name}")
    return wrong


def router_parts(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The parts right under ``router/`` that an import statement loads."""
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for name in [f"{module}{alias.name}" for alias in node.names]:
        if name.startswith("kvconnect.router."):
            yield name.split(".")[2]


def misplaced_packages(found: Iterable[Import]) -> list[str]:
    """Third-party, forbidden and impure imports where they do not belong."""
    wrong = []
    for item in found:
        top = item.target.split(".")[0]
        pure = item.path.startswith(PURE)
        if top in NEVER or (pure and (top in NOT_IN_PURE or top in IMPURE)):
            wrong.append(str(item))
        elif top not in sys.stdlib_module_names and top != "kvconnect":
            places = FOREIGN.get(top, ())
            if not any(item.path.startswith(place) for place in places):
                wrong.append(str(item))
    return wrong


def impure_imports(texts: dict[str, str]) -> list[str]:
    """Imports of pure modules that load a module of the project which is neither pure nor L0."""
    return [
        str(item)
        for path, text in texts.items()
        if path.startswith(PURE)
        for item in imports(path, text)
        if (target := imported_file(item, texts))
        and not target.startswith(PURE)
        and layer(unit(target)) > 0
    ]


def folder_cycles(texts: dict[str, str]) -> list[str]:
    """Folders (and L0 files) that can reach themselves through imports of other folders."""
    graph: dict[str, set[str]] = {}
    for path, text in texts.items():
        source = folder(path)
        for item in imports(path, text):
            target = folder(imported_file(item, texts))
            # A folder and the folders inside it are one thing to their users.
            if target and not item.registry and not f"{source}/".startswith(f"{target}/"):
                graph.setdefault(source, set()).add(target)
    return sorted(name for name in graph if name in reachable(graph, name))


def module_cycles(texts: dict[str, str]) -> list[str]:
    """Modules that import themselves through others when they are loaded."""
    graph = {
        path: {
            target
            for item in imports(path, text)
            if not item.local and (target := imported_file(item, texts)) not in ("", path)
        }
        for path, text in texts.items()
    }
    return sorted(path for path in graph if path in reachable(graph, path))


def folder(path: str) -> str:
    """The folder of ``path``; a file right under the package stands for itself."""
    return path.rpartition("/")[0] or path.removesuffix(".py")


def imported_file(item: Import, texts: Collection[str]) -> str:
    """Path inside the package of the file that an import loads, "" for other packages."""
    parts = item.target.split(".")
    if parts[0] == "kvconnect":
        for end in range(len(parts), 1, -1):
            stem = "/".join(parts[1:end])
            for path in (f"{stem}.py", f"{stem}/__init__.py"):
                if path in texts:
                    return path
    return ""


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [*graph.get(start, ())]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(graph.get(name, ()))
    return seen


# Budgets ----------------------------------------------------------------------------------------

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (  # what ruff's C901 counts; counted here too because a noqa silences ruff
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case),
    *(ast.FunctionDef, ast.AsyncFunctionDef),
)


def lines_of(node: ast.ClassDef | FUNCTIONS) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def attributes(node: ast.ClassDef) -> set[str]:
    """Names stored on ``self`` in any method, and the fields a dataclass or struct declares."""
    stored = {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }
    declared = {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign)
        and isinstance(child.target, ast.Name)
        and "ClassVar" not in ast.unparse(child.annotation)
    }
    return stored | declared


def parameters(node: FUNCTIONS) -> int:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def measured(path: str, text: str) -> Iterator[tuple[Size, int]]:
    """Everything that has a budget, with that budget."""
    yield Size("file lines", path, len(text.splitlines())), FILE_LINES
    stack: list[tuple[ast.AST, str]] = [(ast.parse(text), f"{path}::")]
    while stack:
        parent, prefix = stack.pop()
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, FUNCTIONS | ast.ClassDef):
                stack.append((node, prefix))
                continue
            place = prefix + node.name
            stack.append((node, f"{place}."))
            if isinstance(node, ast.ClassDef):
                methods = [child for child in node.body if isinstance(child, FUNCTIONS)]
                yield Size("class lines", place, lines_of(node)), CLASS_LINES
                yield Size("class methods", place, len(methods)), CLASS_METHODS
                yield Size("class attributes", place, len(attributes(node))), CLASS_ATTRIBUTES
            else:
                branches = sum(isinstance(child, BRANCHES) for child in ast.walk(node))
                yield Size("function lines", place, lines_of(node)), FUNCTION_LINES
                yield Size("complexity", place, branches), COMPLEXITY  # the def itself counts as 1
                yield Size("parameters", place, parameters(node)), PARAMETERS


def over_budget(texts: dict[str, str]) -> dict[tuple[str, str], int]:
    return {
        (size.budget, size.place): size.number
        for path, text in texts.items()
        for size, budget in measured(path, text)
        if size.number > budget
    }


# Names ------------------------------------------------------------------------------------------

FILE_NAMES = {
    "base": "the contract of a seam, beside its variants",
    "messages": "message structs of one folder",
    "stats": "counters, and each engine's way to publish them",
    "tracing": "spans of one engine, or of the router",
    "transport": "one implementation of the transport contract, and its conformance kit",
    "worker": "worker-side part of one folder",
}
"""File names that a convention fixes, which may occur more than twice -> the convention."""


def repeated_classes(texts: dict[str, str]) -> dict[str, list[str]]:
    """Class names that are defined more than once, each with its files."""
    found: dict[str, list[str]] = {}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def repeated_files(texts: Collection[str]) -> dict[str, list[str]]:
    """File names that occur more than twice, without those of ``FILE_NAMES`` and ``__init__``."""
    found: dict[str, list[str]] = {}
    for path in texts:
        found.setdefault(path.rpartition("/")[2].removesuffix(".py"), []).append(path)
    free = {"__init__", *FILE_NAMES}
    return {name: paths for name, paths in found.items() if len(paths) > 2 and name not in free}


# Topics and arguments ---------------------------------------------------------------------------

BANNER = re.compile(r"^ *# .* -{10,}$|(?<=\n\n\n)# .*$(?=(\n#.*)*\n\n)", re.MULTILINE)


def banners(path: str, text: str) -> list[str]:
    """Banners between sections of a module, also comments that stand alone between two of its
    functions or classes: each section is a topic, for a module of its own."""
    return [
        f"{path}:{len(text[: found.start()].splitlines()) + 1}: {found[0]}"
        for found in BANNER.finditer(text)
    ]


def packed_arguments(path: str, text: str) -> list[str]:
    """Calls that unpack a tuple which the same function has written down: two values of it can be
    swapped unseen."""
    return [
        f"{path}:{call.lineno}: {ast.unparse(argument)}"
        for function in ast.walk(ast.parse(text))
        if isinstance(function, FUNCTIONS | ast.Module)
        for call in own_nodes(function)
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Starred)
        and (
            isinstance(argument.value, ast.Tuple | ast.List)
            or (isinstance(argument.value, ast.Name) and argument.value.id in packed(function))
        )
    ]


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module, without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, FUNCTIONS):
            yield child
            yield from own_nodes(child)


def packed(function: ast.AST) -> set[str]:
    """Names to which a function assigns a tuple of several values that it writes down."""
    return {
        target.id
        for node in own_nodes(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


# Calls ------------------------------------------------------------------------------------------


def calls_to_print(path: str, text: str) -> list[str]:
    return [
        f"{path}:{node.lineno}: print"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def unwatched_starts(path: str, text: str) -> Iterator[str]:
    """Threads and tasks that are started without a look at what ends them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("Thread", "Timer", "create_task", "ensure_future"):
                yield f"{path}::{called}"


def broad_excepts(path: str, text: str) -> list[tuple[str, bool]]:
    """Handlers that catch everything, each with whether it says ``# boundary: why``."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type else "BaseException"
        if any(name in ("Exception", "BaseException") for name in caught.strip("()").split(", ")):
            line = text.splitlines()[node.lineno - 1]
            marked = bool(line.partition("# boundary:")[2].strip())
            found.append((f"{path}:{node.lineno}: except {caught}", marked))
    return found
