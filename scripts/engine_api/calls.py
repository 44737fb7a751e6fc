"""An engine's calls of its connector, as source text that a type checker reads.

The checker then says which of them KVConnect does not accept.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from scripts.engine_api.sources import Sources

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1"
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
COMPOSITE = f"{CONNECTORS}.multi_connector"
RECEIVERS = {
    *("connector", "kv_connector", "connector_cls", "connector_class", "kv_transfer_group"),
    *("get_kv_transfer_group()", "c"),
}
HEAD = (
    "from typing import Any\n\nfrom kvconnect.engines.vllm.connector import KVConnect\n\n\n"
    "def calls(connector: KVConnect, any: Any) -> None:\n"
)


def is_receiver(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.removeprefix("self.") in RECEIVERS


def methods(sources: Sources) -> set[str]:
    module = sources.module(BASE[0])
    assert module is not None, f"{BASE[0]} is gone"
    (base,) = module.defined[BASE[1]]
    assert isinstance(base, ast.ClassDef)
    return {child.name for child in base.body if isinstance(child, ast.FunctionDef)}


def calls(sources: Sources) -> str:
    """Return each way in which the engine calls its connector, with the file that does."""
    known = methods(sources)
    found: dict[str, str] = {}
    for name in sources.names():
        if name.startswith(CONNECTORS) and name != COMPOSITE:
            continue
        text = sources.text(name)
        if "connector" in text or "kv_transfer_group" in text:
            for line in called(ast.parse(text), known):
                found.setdefault(line, name)
    return HEAD + "".join(f"    {line}  # {name}\n" for line, name in sorted(found.items()))


def called(tree: ast.AST, known: set[str]) -> Iterable[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in known or not is_receiver(node.func.value):
            continue
        plain = ["*any" if isinstance(a, ast.Starred) else "any" for a in node.args]
        named = [f"{k.arg}=any" if k.arg else "**any" for k in node.keywords]
        yield f"connector.{node.func.attr}({', '.join([*plain, *named])})"
