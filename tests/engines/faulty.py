"""Connectors that break on purpose, loaded through ``kv_connector_module_path``."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Any

from kvconnect.copy import make_copier
from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.engines.vllm.messages import StepInstructions
from kvconnect.engines.vllm.translate import cache_groups
from kvconnect.offload import layer_loads
from kvconnect.transport import page_io
from kvconnect.transport.base import OutgoingPages, Unit
from kvconnect.transport.nixl.send import OutboundWrites
from kvconnect.transport.tcp.page_path import ConnectionContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvconnect.copy.base import Copier


class FlipsByte(KVConnect):
    """Flips one byte of the second block of each load, in the arena, before it is loaded."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        assert isinstance(connector_metadata, StepInstructions)
        for load in connector_metadata.offload.loads:
            for slot in load.parts[0].slots[1:2]:
                # The high byte of a float32: sign and exponent.
                self.worker.tier.store.view(slot)[3] ^= 0x7F
        super().bind_connector_metadata(connector_metadata)


class LoadsOldStates(KVConnect):
    """Overwrites each state that is loaded with one that was stored before it, in the arena."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        groups = cache_groups(self._kv_cache_config)
        self.states = {number for number, group in enumerate(groups) if group.states}
        self.stored: dict[int, list[int]] = {number: [] for number in self.states}
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        assert isinstance(connector_metadata, StepInstructions)
        work, view = connector_metadata.offload, self.worker.tier.store.view
        for group, slots in self._states_of(work.loads):
            for slot in slots:
                before = self.stored[group].index(slot) - 1
                view(slot)[:] = view(self.stored[group][before])
        for group, slots in self._states_of(work.stores):
            self.stored[group] += slots
        super().bind_connector_metadata(connector_metadata)

    def _states_of(self, jobs: Sequence[Any]) -> list[tuple[int, Sequence[int]]]:
        parts = [part for job in jobs for part in job.parts if part.group in self.states]
        return [(part.group, part.slots) for part in parts]


class ForgetsDrafts(KVConnect):
    """Empties the second half of each block that is loaded, in the arena: the layers of a draft
    model that is as large as the model itself."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        assert isinstance(connector_metadata, StepInstructions)
        parts = (part for load in connector_metadata.offload.loads for part in load.parts)
        for slot in (slot for part in parts for slot in part.slots):
            view = self.worker.tier.store.view(slot)
            view[len(view) // 2 :] = bytes(len(view) - len(view) // 2)
        super().bind_connector_metadata(connector_metadata)


class LoadRaises(KVConnect):
    """Every load raises in the copier."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.worker.make_copier = _broken_copier
        super().register_kv_caches(kv_caches)


class LayersComeLate(KVConnect):
    """Each layer of a load comes by itself, long after the one before it, and nothing but the
    hook of the layer waits for it."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        layer_loads.PIECE_BYTES = 1
        self.worker.make_copier = _slow_copier
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...


class NobodyWaits(LayersComeLate):
    """And the hook does not, either."""

    def wait_for_layer_load(self, layer_name: str) -> None: ...


class SwapsPages(KVConnect):
    """What it sends arrives with its first and last wire block swapped, as a broken wire might
    have it: their digests are those of the right order.

    The last block is partly filled. Two full ones swapped would change nothing: attention sums
    over positions, and keys carry their own.
    """

    def register_kv_caches(self, kv_caches: Any) -> None:
        page_io.send_pages = send_swapped
        OutboundWrites.send = _send_swapped_pages  # type: ignore[method-assign]
        ConnectionContext.digests = _digests_unswapped  # type: ignore[method-assign]
        super().register_kv_caches(kv_caches)


_send_pages = page_io.send_pages
_send, _digests = OutboundWrites.send, ConnectionContext.digests
_DIGEST = 8  # bytes


def send_swapped(sock: Any, head: bytes, piece: Any, *rest: Any) -> bytes:
    found = _send_pages(sock, head, piece._replace(ids=_swapped(piece.ids)), *rest)
    # Every block has a digest, or none has.
    return found[-_DIGEST:] + found[_DIGEST:-_DIGEST] + found[:_DIGEST]


def _send_swapped_pages(outbound: OutboundWrites, order: OutgoingPages) -> None:
    _send(outbound, order._replace(ids=_swapped(order.ids)))


def _digests_unswapped(
    context: ConnectionContext, unit: Unit, number: int, first: int, ids: array[int], *rest: Any
) -> bytes:
    return _digests(context, unit, number, first, _swapped(ids), *rest)


def _swapped(ids: array[int]) -> array[int]:
    return array("q", [ids[-1], *ids[1:-1], ids[0]]) if len(ids) > 1 else ids


def _slow_copier(*args: Any) -> Copier:
    copier = make_copier(*args)
    enqueue_runs = copier.enqueue_runs

    def enqueue_late(*args: Any) -> None:
        time.sleep(0.03)
        enqueue_runs(*args)

    copier.enqueue_runs = enqueue_late  # type: ignore[method-assign]
    return copier


def _broken_copier(*args: Any) -> Copier:
    copier = make_copier(*args)

    def load(group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        raise RuntimeError(f"injected: load of {len(slots)} slots of group {group}")

    def enqueue_runs(group: int, block_ids: Sequence[int], slots: Sequence[int], _: Any) -> None:
        load(group, block_ids, slots)

    copier.load = load  # type: ignore[method-assign]
    copier.enqueue_runs = enqueue_runs  # type: ignore[method-assign]
    return copier
