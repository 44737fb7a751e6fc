"""Settings that every test with an engine shares."""

from __future__ import annotations

import os

# Threads and ranks spin while they wait for one another. Where they outnumber the cores, or share
# them with other work, a step takes a hundred times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
