"""A subscriber to what an engine publishes about its KV cache."""

from __future__ import annotations

import json
import tempfile

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch


def published_at(endpoint: str) -> tuple[str, ...]:
    """Arguments of an engine that publishes its KV events there."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    return ("--kv-events-config", json.dumps(config))


class Subscriber:
    """Collects what the engine publishes about its KV cache."""

    def __enter__(self) -> Subscriber:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._folder = tempfile.TemporaryDirectory(prefix="kvconnect-")
        self._endpoint = f"ipc://{self._folder.name}/events"
        self._socket.connect(self._endpoint)
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close(linger=0)
        self._folder.cleanup()

    def engine_args(self) -> tuple[str, ...]:
        return published_at(self._endpoint)

    def of_host_tier(self) -> tuple[list[BlockStored], list[BlockRemoved]]:
        """Everything published so far about the host tier."""
        events = []
        while self._socket.poll(500):
            _, _, payload = self._socket.recv_multipart()
            events += msgspec.msgpack.decode(payload, type=KVEventBatch).events
        stored = [e for e in events if isinstance(e, BlockStored) and e.medium == "CPU"]
        removed = [e for e in events if isinstance(e, BlockRemoved) and e.medium == "CPU"]
        return stored, removed
