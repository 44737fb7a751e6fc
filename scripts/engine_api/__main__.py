"""Prints what KVConnect uses of an engine: names, signatures, fields, and the engine's calls of the
connector. With --check, prints what KVConnect expects and the engine does not have.

    python -m scripts.engine_api vllm WHEEL >tests/engine_api/vllm-0.33.txt
    python -m scripts.engine_api vllm .venv/lib/python3.11/site-packages --check

docs/engine-versions.md says what to do with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from scripts.engine_api.check import problems
from scripts.engine_api.digest import digest
from scripts.engine_api.fields import request_text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.engine_api")
    parser.add_argument("package", choices=["vllm", "sglang"])
    parser.add_argument("where", type=Path, help="a wheel, or the folder that has the package")
    parser.add_argument("--check", action="store_true", help="print what is missing instead")
    parser.add_argument("--fields", action="store_true", help="print requests' fields instead")
    options = parser.parse_args()
    if options.fields:
        sys.stdout.write(request_text(options.where, options.package))
        return 0
    if options.check and options.package != "vllm":
        parser.error("--check knows vllm only: much of SGLang has no types")
    text = digest(options.where, options.package)
    if not options.check:
        sys.stdout.write(text)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = problems(text, options.package, Path(folder))
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
