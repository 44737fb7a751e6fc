"""Every name, signature and field of vLLM that KVConnect uses, in the installed version and in the
other ones that it supports. Of those, ``tests/engine_api`` has digests, made from their wheels."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconnect.engine_versions import SUPPORTED_VLLM
from scripts.engine_api.check import problems
from scripts.engine_api.digest import digest, parts
from scripts.engine_api.uses import uses_of

vllm = pytest.importorskip("vllm")
pytest.importorskip("mypy")

DIGESTS = Path(__file__).resolve().parents[1] / "engine_api"
FIX = "see docs/engine-versions.md; is the digest older than what KVConnect uses?"


def committed(version: str) -> str:
    return (DIGESTS / f"vllm-{version}.txt").read_text()


@pytest.fixture(scope="module")
def installed() -> str:
    return digest(Path(vllm.__file__).parents[1], "vllm")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_the_installed_version_has_what_kvconnect_uses(
    installed: str, tmp_path: Path, cache: Path
) -> None:
    assert problems(installed, "vllm", tmp_path, cache) == []


def test_the_last_supported_version_has_what_kvconnect_uses(tmp_path: Path, cache: Path) -> None:
    last = "{}.{}".format(*SUPPORTED_VLLM[1])
    assert problems(committed(last), "vllm", tmp_path, cache) == [], FIX


CHANGES = {
    # In the engine's source: what is there instead, and what the check must say.
    "def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int)": (
        "def get_num_new_matched_tokens(self, request: Request, local_tokens: int, more: int)",
        '"get_num_new_matched_tokens" incompatible with supertype',
    ),
    "    connector.update_connector_output(any)": (
        "    connector.update_connector_output(any, any)",
        'Too many arguments for "update_connector_output"',
    ),
    "    connector.take_events()": (
        "    connector.take_more_events()",
        '"KVConnect" has no attribute "take_more_events"',
    ),
    "    scheduled_spec_decode_tokens: ": (
        "    scheduled_draft_tokens: ",
        'has no attribute "scheduled_spec_decode_tokens"',
    ),
    "def get_current_attn_backends(vllm_config: ": (
        "def get_current_attn_backends(layers: int, vllm_config: ",
        'Missing positional argument "vllm_config" in call to "get_current_attn_backends"',
    ),
    "    FULL = ": ("    WHOLE = ", '"type[CUDAGraphMode]" has no attribute "FULL"'),
    "class MLAAttentionSpec(": (
        "class LatentSpec(",
        'has no attribute "MLAAttentionSpec"',
    ),
}


def test_a_change_in_the_engine_is_found(tmp_path: Path, cache: Path) -> None:
    """Negative control: each of these changes is one that a new version could bring."""
    text = committed("0.33")
    for old, (new, _) in CHANGES.items():
        assert text.count(old), old
        text = text.replace(old, new)
    found = "\n".join(problems(text, "vllm", tmp_path, cache))
    assert [said for _, said in CHANGES.values() if said not in found] == []


def parameters(node: ast.FunctionDef) -> list[str]:
    of = node.args
    more = [a.arg for a in (of.vararg, of.kwarg) if a]
    return sorted([*(a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)), *more])


def untrue(thing: object, node: ast.stmt, place: str) -> Iterator[str]:
    """Yield where a definition in the digest is not that of the object."""
    if isinstance(node, ast.ClassDef) and inspect.isclass(thing):
        fields = {field.name for field in getattr(thing, "__dataclass_fields__", {}).values()}
        for child in node.body:
            if isinstance(child, ast.FunctionDef):
                member = inspect.getattr_static(thing, child.name, None)
                yield from untrue(member, child, f"{place}.{child.name}")
            elif isinstance(child, ast.AnnAssign) and dataclasses.is_dataclass(thing):
                name = ast.unparse(child.target)
                if name not in fields and not ast.unparse(child.annotation).startswith("ClassVar"):
                    yield f"{place}.{name} is no field"
    elif isinstance(node, ast.FunctionDef) and "overload" not in map(
        ast.unparse, node.decorator_list
    ):
        function = getattr(thing, "__func__", thing)
        if inspect.isfunction(function):
            found = sorted(inspect.signature(inspect.unwrap(function)).parameters)
            if found != parameters(node):
                yield f"{place}{found}: the digest has {parameters(node)}"
        elif thing is None:
            yield f"{place} is missing"


def test_the_digest_is_true_of_the_installed_version(installed: str) -> None:
    wrong, checked = [], 0
    modules = uses_of("vllm").modules
    for name, text in parts(installed):
        if name not in modules:
            continue
        module = importlib.import_module(name)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                checked += 1
                wrong += untrue(getattr(module, node.name, None), node, f"{name}.{node.name}")
    assert wrong == []
    assert checked > 100
