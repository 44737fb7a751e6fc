"""Direction and size are tests: who may import whom, and how big a thing may grow.

The rules stand in ``architecture.py``; ``EXCEPTIONS`` is the only way around a budget, with a
reason. Every checker also runs on small bad examples, so one that has gone blind fails here.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from textwrap import dedent

import pytest

from tests.architecture import (
    BROAD_EXCEPTS,
    FILE_NAMES,
    MOST_FILE_LINES,
    banners,
    broad_excepts,
    calls_to_print,
    folder_cycles,
    imported_tests,
    imports,
    impure_imports,
    misplaced_packages,
    module_cycles,
    over_budget,
    packed_arguments,
    repeated_classes,
    repeated_files,
    unwatched_starts,
    upward_imports,
    upward_in_router,
)

PACKAGE = Path(__file__).resolve().parents[1] / "kvconnect"

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("class methods", "engines/vllm/connector.py::KVConnect"): (
        "vLLM's connector interface asks for this many hooks in one class; each forwards one call"
    ),
    ("class attributes", "settings/fields.py::Settings"): (
        "one field for each setting that users may write"
    ),
    ("file lines", "engines/sglang/backend.py"): (
        "SGLang's interface of a transfer backend: one method for each of its calls, each contained"
    ),
    ("file lines", "testing/transport.py"): (
        "one check for each promise of the transports' contract, and the pair that all of them use"
    ),
}
"""(budget, place) -> the reason why it may be larger. A row that is not needed any more fails."""

# The package ------------------------------------------------------------------------------------

TEXTS = {
    path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
IMPORTS = [item for path, text in TEXTS.items() for item in imports(path, text)]


def test_imports_go_strictly_downward() -> None:
    assert upward_imports(IMPORTS) == []


def test_imports_inside_the_router_go_down() -> None:
    assert upward_in_router(TEXTS) == []


def test_no_test_imports_another_one() -> None:
    tests = {path.as_posix(): path.read_text() for path in Path(__file__).parent.rglob("*.py")}
    assert imported_tests(item for path in tests for item in imports(path, tests[path])) == []
    # Control: a helper is no test.
    (bad, _) = both = list(imports("a.py", "import tests.unit.cache.test_keys, tests.fakes.engine"))
    assert imported_tests(both) == [str(bad)]


def test_packages_are_imported_only_where_they_belong() -> None:
    assert misplaced_packages(IMPORTS) == []


def test_pure_modules_import_only_pure_modules() -> None:
    assert impure_imports(TEXTS) == []


def test_no_folder_cycles() -> None:
    assert folder_cycles(TEXTS) == []


def test_no_module_imports_itself_through_others() -> None:
    assert module_cycles(TEXTS) == []


def test_budgets_hold_but_for_the_listed_exceptions() -> None:
    found = over_budget(TEXTS)
    assert found.keys() == EXCEPTIONS.keys()
    assert all(EXCEPTIONS.values())
    assert [k for k, n in found.items() if k[0] == "file lines" and n > MOST_FILE_LINES] == []


def test_only_the_command_line_prints() -> None:
    printing = [line for path, text in TEXTS.items() for line in calls_to_print(path, text)]
    assert [line for line in printing if not line.startswith("commands/")] == []


def test_broad_excepts_are_few_and_marked() -> None:
    found = [item for path, text in TEXTS.items() for item in broad_excepts(path, text)]
    assert [place for place, marked in found if not marked] == []
    assert len(found) <= BROAD_EXCEPTS, found


def test_a_class_name_stands_for_one_class() -> None:
    assert repeated_classes(TEXTS) == {}


def test_a_file_name_occurs_at_most_twice() -> None:
    assert repeated_files(TEXTS) == {}
    # A name that no longer needs its place in the table is found.
    used = [path.rpartition("/")[2].removesuffix(".py") for path in TEXTS]
    assert {name for name in FILE_NAMES if used.count(name) < 3} == set()


def test_a_module_has_one_topic_and_no_argument_is_packed() -> None:
    found = [banners(path, text) + packed_arguments(path, text) for path, text in TEXTS.items()]
    assert [*chain.from_iterable(found)] == []


UNWATCHED = {
    "threads.py::Thread",  # supervises threads
    "router/supervisor.py::create_task",  # supervises tasks
    "router/http/client_connection.py::create_task",  # looks at how they end, as the callback
    "router/http/attempt.py::create_task",  # these wait for the task where they start it
    "router/connections/pool.py::ensure_future",
    "router/connections/grpc_connection.py::create_task",  # its callback looks at how it ended
    "router/fleet/handoff_probes.py::create_task",
    "router/fleet/watch.py::ensure_future",
}
"""Where a thread or a task may be started; everybody else uses ``threads`` and ``supervise``."""


def test_threads_and_tasks_are_supervised() -> None:
    started = {
        place
        for path, text in TEXTS.items()
        if not path.startswith("testing/")
        for place in unwatched_starts(path, text)
    }
    assert started == UNWATCHED


# Negative controls: each checker must see what it is for ----------------------------------------


def flagged(path: str, code: str) -> list[str]:
    found = list(imports(path, dedent(code)))
    return upward_imports(found) + misplaced_packages(found)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("offload/index.py", "from kvconnect.tiers.planner import TierPlan"),
        ("cache/keys.py", "from kvconnect import offload"),
        ("offload/index.py", "import kvconnect.engines.vllm"),
        ("disaggregation/leases.py", "from kvconnect import tracing"),
        ("protocol/codec.py", "from kvconnect.observability.tracing.otel import Tracer"),
        ("router/tracing.py", "from opentelemetry import trace"),
        ("offload/index.py", "from kvconnect import Misuse"),
        ("offload/index.py", "def f():\n    from kvconnect.disaggregation import agent"),
        ("offload/copy_executor.py", "from kvconnect.observability.metrics.catalog import ROWS"),
        ("errors.py", "import kvconnect.offload.index"),
        ("offload/index.py", "import time"),
        ("offload/index.py", "def f():\n    import threading"),
        ("offload/index.py", "import torch"),
        ("cache/layout.py", "from torch import Tensor"),
        ("offload/host_arena.py", "import vllm"),
        ("engines/sglang/connector.py", "from vllm.config import VllmConfig"),
        ("engines/vllm/worker.py", "import sglang"),
        ("transport/tcp.py", "import nixl"),
        ("observability/metrics/catalog.py", "import prometheus_client"),
        ("offload/copy_executor.py", "import pickle"),
        ("offload/host_arena.py", "import requests"),
        ("tiers/backends/__init__.py", "def f():\n    import vllm"),
        ("tiers/planner.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
    ],
)
def test_a_bad_import_is_flagged(path: str, code: str) -> None:
    assert flagged(path, code)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("offload/index.py", "from kvconnect.types import JobId"),
        ("offload/index.py", "from kvconnect.offload.eviction import EvictionPolicy"),
        ("memory.py", "from kvconnect.errors import ConfigError"),
        ("offload/index.py", "if TYPE_CHECKING:\n    import torch\n    import kvconnect.cli"),
        (
            "tiers/backends/__init__.py",
            "def make():\n    from kvconnect.offload.copy_executor import Executor",
        ),
        ("offload/host_arena.py", "import mmap\nimport torch"),
        ("cli.py", "from kvconnect import memory"),
        ("engines/vllm/worker.py", "from vllm.config import VllmConfig\nimport torch"),
    ],
)
def test_a_good_import_is_not_flagged(path: str, code: str) -> None:
    assert flagged(path, code) == []


@pytest.mark.parametrize(
    ("path", "code", "wrong"),
    [
        ("router/policy/choice.py", "from kvconnect.router.requests.body import Prompt", True),
        ("router/policy/choice.py", "from kvconnect.router import options", True),
        ("router/decision.py", "def f():\n    import kvconnect.router.http.reply", True),
        (
            "router/decision.py",
            "if TYPE_CHECKING:\n    from kvconnect.router.fleet import engines",
            True,
        ),
        ("router/metrics.py", "from kvconnect.router.decision import Decision", True),
        ("router/http/reply.py", "from kvconnect.router.http.services import Services", False),
        ("router/http/reply.py", "from kvconnect.router.policy.choice import Mode", False),
    ],
)
def test_an_import_inside_the_router_is_flagged_if_it_goes_up(
    path: str, code: str, wrong: bool
) -> None:
    assert bool(upward_in_router({path: code})) == wrong


def test_a_pure_module_that_imports_an_impure_one_is_flagged() -> None:
    texts = {"offload/index.py": "from kvconnect.offload.host_arena import HostArena"}
    assert impure_imports(texts | {"offload/host_arena.py": ""})
    assert not impure_imports(texts | {"offload/host_arena/planner.py": "", "errors.py": ""})


def test_a_part_without_a_layer_is_flagged() -> None:
    with pytest.raises(AssertionError, match="stands in no layer"):
        flagged("helpers.py", "from kvconnect.types import JobId")


def test_a_cycle_is_flagged() -> None:
    good = {
        "copy/__init__.py": "from kvconnect.copy.base import Copier",
        "copy/base.py": "from kvconnect.errors import Misuse",
        "errors.py": "",
        "types.py": "from kvconnect.errors import Misuse",
    }
    assert folder_cycles(good) == []
    assert folder_cycles(good | {"errors.py": "from kvconnect.types import JobId"}) == [
        "errors",
        "types",
    ]
    across = {
        "engines/vllm/worker.py": "from kvconnect.engines.sglang import worker",
        "engines/sglang/worker.py": "from kvconnect.engines.vllm.worker import Worker",
    }
    assert folder_cycles(across) == ["engines/sglang", "engines/vllm"]


def test_a_module_that_imports_itself_is_flagged() -> None:
    texts = {
        "offload/index.py": "from kvconnect.offload.jobs import JobBook",
        "offload/jobs.py": "from kvconnect.offload import index",
    }
    assert module_cycles(texts) == ["offload/index.py", "offload/jobs.py"]
    late = {"offload/jobs.py": "def f():\n    from kvconnect.offload import index"}
    assert module_cycles(texts | late) == []


@pytest.mark.parametrize(
    ("budget", "number", "code"),
    [
        ("file lines", 401, "x = 1\n" * 401),
        ("class lines", 351, "class A:\n" + "    x = 1\n" * 350),
        (
            "class methods",
            26,
            "class A:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(26)),
        ),
        (
            "class attributes",
            21,
            "class A:\n    z: int\n    def f(self):\n"
            + "".join(f"        self.a{i} = {i}\n" for i in range(20)),
        ),
        ("function lines", 61, "def f():\n" + "    x = 1\n" * 60),
        ("complexity", 11, "def f(x):\n" + "    if x: pass\n" * 10),
        ("parameters", 9, "class A:\n    def f(self, a, b, c, d, *, e, f, g, h, i): ..."),
    ],
)
def test_a_thing_over_its_budget_is_flagged(budget: str, number: int, code: str) -> None:
    assert [(name, size) for (name, _), size in over_budget({"a.py": code}).items()] == [
        (budget, number)
    ]


@pytest.mark.parametrize(
    "code",
    [
        "x = 1\n" * 400,
        "class A:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(25)),
        "def f(x):\n" + "    if x: pass\n" * 9,
        "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...",
    ],
)
def test_a_thing_at_its_budget_is_not_flagged(code: str) -> None:
    assert over_budget({"a.py": code}) == {}


def test_a_banner_is_flagged() -> None:
    banner = f"# Events {'-' * 80}"
    assert banners("a.py", f"x = 1\n\n{banner}\n") == [f"a.py:3: {banner}"]
    assert banners("a.py", f"class A:\n    {banner}\n") == [f"a.py:2:     {banner}"]
    assert banners("a.py", "# Events: - what comes\n# ---\n") == []
    alone = "# What comes.\n# And goes.\n"
    assert banners("a.py", f"def f(): ...\n\n\n{alone}\n\ndef g(): ...\n") == [
        "a.py:4: # What comes."
    ]
    assert banners("a.py", f"def f(): ...\n\n\n{alone}def g(): ...\n") == []
    assert banners("a.py", f"X = 1\n\n{alone}\nY = 2\n") == []


@pytest.mark.parametrize(
    ("code", "argument"),
    [
        ("f(*(a, b), c)", "*(a, b)"),
        ("f(*[a, b])", "*[a, b]"),
        ("def g():\n    at = a, b\n    return [F(*at) for x in y]", "*at"),
        ("class A:\n    def g(self):\n        at = a, b\n        self.f(c, *at)", "*at"),
    ],
)
def test_packed_arguments_are_flagged(code: str, argument: str) -> None:
    assert [line.partition(": ")[2] for line in packed_arguments("a.py", code)] == [argument]


@pytest.mark.parametrize(
    "code",
    [
        "f(*names)",
        "f(*map(g, names))",
        "values = (*(a, b), *(c, d))",
        "def g(at):\n    f(*at)\ndef h():\n    at = a, b",
        "def g():\n    at = [h(x) for x in y]\n    f(*at)",
    ],
)
def test_arguments_that_nobody_packed_are_not_flagged(code: str) -> None:
    assert packed_arguments("a.py", code) == []


def test_print_is_flagged() -> None:
    assert calls_to_print("a.py", "def f():\n    print('x')") == ["a.py:2: print"]


@pytest.mark.parametrize(
    ("handler", "broad", "marked"),
    [
        ("except Exception:", True, False),
        ("except:", True, False),
        ("except (ValueError, BaseException) as e:", True, False),
        ("except Exception:  # boundary:", True, False),
        ("except Exception:  # boundary: the job fails, the worker lives", True, True),
        ("except ValueError:", False, False),
    ],
)
def test_a_broad_except_is_flagged(handler: str, broad: bool, marked: bool) -> None:
    found = broad_excepts("a.py", f"try:\n    f()\n{handler}\n    pass")
    assert [mark for _, mark in found] == ([marked] if broad else [])


def test_a_repeated_class_name_is_flagged() -> None:
    texts = {"a.py": "class A: ...\nclass B: ...", "b.py": "def f():\n    class A: ..."}
    assert repeated_classes(texts) == {"A": ["a.py", "b.py"]}
    assert repeated_classes({"a.py": "class A: ...\nclass A: ..."}) == {"A": ["a.py", "a.py"]}


def test_a_file_name_used_three_times_is_flagged() -> None:
    thrice = ["a/spans.py", "b/spans.py", "c/spans.py"]
    free = [f"{folder}/{name}.py" for folder in "abc" for name in ("__init__", "base")]
    assert repeated_files([*thrice, *free]) == {"spans": thrice}
    assert repeated_files([*thrice[:2], *free]) == {}


def test_starts_that_nobody_watches_are_found() -> None:
    code = "t = threading.Thread(target=f)\nasyncio.create_task(g())\nself.submit(h)"
    assert list(unwatched_starts("a.py", code)) == ["a.py::Thread", "a.py::create_task"]
