"""Servers without a model, engine or process, for benchmarks and what else starts
:class:`tests.engines.server.Process`: prompts are answered at once, and blocks are looked up in
caches as large as the server's settings say.

The settings of KVConnect are read as the engine reads them, and the name of a metric must be one
that is documented, so that a benchmark which has not followed a change fails here.
"""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from benchmarks.link import LOOPBACK
from kvconnect.settings import Settings, check_settings, find_settings
from kvconnect.types import PromptSource
from tests.engines import server as real
from tests.engines.load import Admin
from tests.engines.models import BLOCK_SIZE
from tests.engines.scenario import block_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs"
METRICS = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("metrics.md", "router.md"))
LINKER = "--unified-cache-external-linker-config"
TOKEN_S = 0.0005
"""Between two tokens of a stream, so that it lasts."""

Key = int
"""Of all tokens up to the end of a block, and the salt."""
Blocks = OrderedDict[Key, None]


@dataclass
class Caches:
    """What one engine keeps, and what it has counted."""

    device_blocks: int
    host_blocks: int
    block_bytes: int
    asks: tuple[int, ...] = ()
    """Ports of the peers that it asks."""
    device: Blocks = field(default_factory=OrderedDict)
    host: Blocks = field(default_factory=OrderedDict)
    pinned: set[Key] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def keep(self, keys: list[Key]) -> None:
        """Keep blocks on the device and in host memory; what is oldest goes."""
        for kept, room in ((self.device, self.device_blocks), (self.host, self.host_blocks)):
            for key in keys:
                kept[key] = None
                kept.move_to_end(key)
            unpinned = (key for key in list(kept) if key not in self.pinned)
            for key in itertools.islice(unpinned, max(0, len(kept) - room)):
                del kept[key]

    def look_up(
        self,
        prompt: list[int],
        salt: str | None = None,
        hints: Mapping[str, Any] = MappingProxyType({}),
        peers: Sequence[Caches] = (),
    ) -> Counter[str]:
        """Return how many tokens came from where, and keep all blocks."""
        keys = [hash(salt)]
        for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
            keys.append(hash((keys[-1], *prompt[end - BLOCK_SIZE : end])))
        del keys[0]
        found: Counter[str] = Counter()
        for key in keys[: (len(prompt) - 1) // BLOCK_SIZE]:
            if key in self.device:
                source = PromptSource.DEVICE
            elif key in self.host:
                source = PromptSource.HOST
            elif any(key in peer.host for peer in peers):
                source = PromptSource.PEER
            else:
                break
            found[source.value] += BLOCK_SIZE
        found[PromptSource.COMPUTED.value] = len(prompt) - found.total()
        if "pin" in hints:
            self.pinned |= {*keys}
        self.keep(keys)
        if "drop" in hints:
            for key in keys:
                self.device.pop(key, None)
                self.host.pop(key, None)
        return found


def answer(prompt: list[int], count: int) -> list[int]:
    """Return the tokens that continue a prompt."""
    seed = zlib.crc32(repr(prompt).encode())
    return [(seed + 7 * n) % 2000 for n in range(count)]


class Reply(io.BytesIO):
    """An answer. Lines of a stream come one after the other."""

    headers: Mapping[str, str] = {}

    def __iter__(self) -> Iterator[bytes]:
        for line in self.getvalue().splitlines(keepends=True):
            time.sleep(TOKEN_S)
            yield line


class Fleet:
    """All servers of a test that run."""

    def __init__(self) -> None:
        self._ports = itertools.count(1)
        self._lock = threading.Lock()
        self.caches: dict[int, Caches] = {}
        self.shares: dict[int, Caches] = {}
        """By the port at which peers ask."""

    def enter(self, process: real.Process) -> real.Process:
        process.port = process.port or next(self._ports)
        process.command()
        process.environment()
        model = getattr(process, "model", None)
        if model:
            self.caches[process.port] = self._caches(process, block_bytes(model))
        return process

    def workers(self) -> list[dict[str, Any]]:
        """Return what an administrator sees: one engine answers all."""
        return [{"number": 0, "url": f"http://127.0.0.1:{port}"} for port in self.caches]

    def leave(self, process: real.Process, *_: object) -> None:
        self.caches.pop(process.port, None)

    def _caches(self, process: Any, each: int) -> Caches:
        config = settings(process)
        device = getattr(process, "blocks", getattr(process, "tokens", 0) // BLOCK_SIZE)
        host = config.host_bytes if config else 0
        host = host // each if isinstance(host, int) else 0
        found = Caches(device, host, each)
        if config and (peers := config.cache_peers):
            found.asks = tuple(int(one.rpartition(":")[2]) for one in peers.ask)
            if peers.listen != "off":
                self.shares[int(peers.listen.rpartition(":")[2])] = found
        return found

    def open(self, client: Any, path: str, body: dict[str, Any], **_: str) -> Reply:
        """Answer a request."""
        if path.startswith("/flush_cache"):
            self.caches[client.port].device.clear()
        if path.startswith("/reset_prefix_cache"):
            caches = self.caches[client.port]
            caches.device.clear()
            if "reset_external=true" in path:
                caches.host.clear()
            return _json({"success": True})
        if path in ("/v1/completions", "/generate"):
            time.sleep(TOKEN_S)  # who asks without a pause would keep the interpreter from others
            with self._lock:
                return self._completion(self._engine(client), path == "/generate", body)
        return _json({})

    def _engine(self, client: Any) -> Any:
        """Return the engine that answers: behind a router, one that decodes."""
        for name in ("decode", "engines", "servers"):
            if behind := getattr(client, name, None):
                return behind[-1] if isinstance(behind, list) else behind
        return client

    def _completion(self, engine: Any, generate: bool, body: dict[str, Any]) -> Reply:
        caches = self.caches[engine.port]
        params = body.get("kv_transfer_params") or {}
        prompts = body["input_ids"] if generate else body["prompt"]
        if isinstance(prompts, str):
            prompts = [*prompts.encode()]
        many = prompts if isinstance(prompts[0], list) else [prompts]
        count = body["sampling_params"]["max_new_tokens"] if generate else body["max_tokens"]
        hints = params.get("kvconnect", {})
        peers = [self.shares[port] for port in caches.asks if port in self.shares]
        for prompt in many:
            sources = caches.look_up(prompt, body.get("cache_salt"), hints, peers)
        tokens = [answer(prompt, count) for prompt in many]
        if params.get("do_remote_prefill"):
            moved = -(-(len(many[0]) - 1) // BLOCK_SIZE) * caches.block_bytes
            caches.counts["received"] += moved
        cached = len(many[-1]) - sources[PromptSource.COMPUTED.value]
        caches.counts["cached"] += cached
        if generate:
            whole = {"output_ids": tokens[0], "meta_info": {"cached_tokens": cached}}
            return (
                Reply(b"data: " + json.dumps(whole).encode())
                if body.get("stream")
                else _json(whole)
            )
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        given = {
            "do_remote_prefill": True,
            "kvconnect_card": "card",
            "kvconnect": {"receipt": {**sources, "prompt": len(many[0])}},
        }
        choices = [{"index": n, "token_ids": found} for n, found in enumerate(tokens)]
        if not body.get("stream"):
            return _json({"choices": choices, "usage": usage, "kv_transfer_params": given})
        chunks: list[dict[str, Any]] = [{"choices": [{"token_ids": [one]}]} for one in tokens[0]]
        chunks.append({"choices": [], "usage": usage})
        return Reply(b"".join(b"data: " + json.dumps(one).encode() + b"\n" for one in chunks))

    def metric(self, client: Any, name: str, **_: str) -> float:
        """Return the value of a metric; KVConnect's have to be documented."""
        if "kvconnect" in name and name.removeprefix("vllm:") not in METRICS:
            raise KeyError(f"{name} is not documented")
        counts = self.caches[client.port].counts if client.port in self.caches else Counter()
        if name == "vllm:prompt_tokens_cached_total":
            return counts["cached"]
        if name.endswith(("transfer_bytes_total", "bytes_transferred_sum")):
            return counts["received"]
        return float(name.endswith("tier_available"))


class LoopbackLink:
    """Stands in for :class:`benchmarks.link.Link`, which not every machine permits."""

    ends = (LOOPBACK, LOOPBACK)

    def __enter__(self) -> LoopbackLink:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shape(self, bits_per_s: float | None) -> None: ...


def settings(process: Any) -> Settings | None:
    """Return the settings of KVConnect that a server was given.

    Raises:
        ConfigError: they are not settings of KVConnect.
    """
    if connector := getattr(process, "connector", None):
        found = json.loads(connector)
        if found["kv_connector"] == "KVConnect":
            return check_settings(found["kv_connector_extra_config"])
    elif LINKER in getattr(process, "args", ()):
        linker = json.loads(process.args[process.args.index(LINKER) + 1])
        return check_settings(linker["linker_extra_config"])
    elif "KVCONNECT_CONFIG" in process.environment():
        return find_settings({}, process.environment()).settings
    return None


def _json(value: object) -> Reply:
    return Reply(json.dumps(value).encode())


def use_model_servers(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Have all servers that are started from now on be without a model."""
    fleet = Fleet()
    for owner, name, work in (
        (real.Process, "__enter__", fleet.enter),
        (real.Process, "__exit__", fleet.leave),
        (real.Process, "pids", lambda process: []),
        (real.Process, "kill", fleet.leave),
        (real.Client, "open", fleet.open),
        (real.Client, "metric", fleet.metric),
        (real.Client, "abort", lambda client, *_, **__: None),
        (Admin, "drain", lambda admin, *_: None),
        (Admin, "add", lambda admin, *_: 0),
        (Admin, "workers", lambda admin: fleet.workers()),
    ):
        monkeypatch.setattr(owner, name, _method(work))
    return fleet


def _method(work: Any) -> Any:
    """Return a function, which becomes a method where a bound one would not."""
    return lambda *args, **kwargs: work(*args, **kwargs)
