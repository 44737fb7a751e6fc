"""Pytest plugin: ``kvconnect._native`` is the file that KVCONNECT_SANITIZED names."""

import importlib.util
import os
import sys

_file = os.environ["KVCONNECT_SANITIZED"]
_spec = importlib.util.spec_from_file_location("kvconnect._native", _file)
assert _spec and _spec.loader
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules["kvconnect._native"] = _module
import kvconnect  # noqa: E402  # `from kvconnect import _native` looks at the attribute

kvconnect._native = _module  # type: ignore[attr-defined]
