"""Reads SGLang's runtime: this rank, its share of host memory, and settings to refuse."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from kvconnect import engine_versions, memory
from kvconnect.engines.sglang import model_format
from kvconnect.engines.sglang.plugin import LAYERWISE, is_layerwise
from kvconnect.engines.sglang.plugin import check as check_flags
from kvconnect.engines.sglang.translate import Model
from kvconnect.errors import ConfigError, Incompatible
from kvconnect.settings import Settings, find_settings
from kvconnect.settings.host_memory import check_fits, share_of_host_bytes
from kvconnect.settings.summary import start_line
from kvconnect.transport.tcp.shared_port import SharedPort
from kvconnect.types import Rank

logger = logging.getLogger(__name__)

SPARE_S = 5.0
"""A dropped transfer must end this many seconds before SGLang reuses its pages."""

BOOTSTRAP_LIMIT = envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.name
"""Name of the setting of :func:`bootstrap_s`."""

PORT = SharedPort()
"""Where this process listens: SGLang makes the storage backend and the hand-offs apart."""


def check(server_args: ServerArgs) -> None:
    """Refuse, at start, settings that this backend does not serve.

    Raises:
        ConfigError: the message names the flag, its value and the fix.
    """
    parallel = get_parallel()
    sizes = {"attention-context-parallel-size": parallel.attn_cp_size}
    sizes["decode-context-parallel-size"] = parallel.attn_dcp_size
    for flag, size in sizes.items():
        if size > 1:
            raise ConfigError(f"--{flag}", size, "this transfer backend serves 1 only")
    if parallel.enable_kv_cache_sharding:
        raise ConfigError("--enable-kv-cache-sharding", True, "leave it out with this backend")
    if server_args.enable_hisparse:
        raise ConfigError("--enable-hisparse", True, "leave it out: pages land on the device only")
    if envs.SGLANG_DISAGG_STAGING_BUFFER.get():
        fix = "unset it: heads are sliced on the way by this backend itself"
        raise ConfigError("SGLANG_DISAGG_STAGING_BUFFER", "1", fix)
    _check_release()
    if is_layerwise() and server_args.disaggregation_enable_kv_checksum:
        # SGLang's digest is of the cache's page, where another request has computed the same one.
        fix = "unset it, or leave out --disaggregation-enable-kv-checksum"
        raise ConfigError(LAYERWISE, "1", fix)
    check_flags(server_args)


def _check_release() -> None:
    """Refuse settings with which SGLang reuses pages while another engine may write to them."""
    held = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE
    if not held.get():
        fix = "unset it: an aborted request's pages would be used again while some still land"
        raise ConfigError(held.name, "0", fix)
    limit = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT
    if not SPARE_S < limit.get() < math.inf:
        fix = f"use more than {SPARE_S:.0f} seconds: a transfer has to end before that (30 is good)"
        raise ConfigError(limit.name, limit.get(), fix)


def transport(name: str, server_args: ServerArgs) -> str:
    """Return the transport to use where ``name`` is set: TCP if SGLang's memory saver is on.

    Raises:
        ConfigError: NIXL is set, and the memory saver frees and reallocates memory: network cards
            would go on using the old memory.
    """
    if not server_args.enable_memory_saver or name == "tcp":
        return name
    if name == "nixl":
        fix = 'use "tcp" with --enable-memory-saver: registered memory must stay where it is'
        raise ConfigError("transport", name, fix)
    logger.info("kvconnect: pages go over tcp: --enable-memory-saver takes memory away from NIXL")
    return "tcp"


def calls_layers_once(server_args: ServerArgs) -> bool:
    """Whether a forward calls each attention layer once, for all of the batch. With elastic expert
    parallelism, SGLang runs a forward again after a rank is lost."""
    again = server_args.elastic_ep_backend is not None
    return not (server_args.enable_two_batch_overlap or again)


def compares_media(server_args: ServerArgs) -> bool:
    """Whether the same media have the same hashes here as on other servers. A server whose media an
    encoder server computes hashes embeddings, others hash pixels."""
    return not (server_args.language_only or envs.SGLANG_MM_SKIP_COMPUTE_HASH.get())


def model(args: Any, server_args: ServerArgs, is_mla: bool) -> Model:
    """Return the facts that SGLang's transfer arguments lack.

    Raises:
        Incompatible: a device other than CUDA or the CPU.
    """
    if server_args.device not in ("cuda", "cpu"):
        raise Incompatible(f"device {server_args.device!r}: KV is handed off from cuda and cpu")
    parallel = get_parallel()
    config = ModelConfig.from_server_args(server_args)
    one_head = is_mla or getattr(args, "is_hybrid_mla_backend", False)
    layers = get_pp_indices(config.num_hidden_layers, args.pp_rank, parallel.pp_size)
    return Model(
        name=str(server_args.model_path),
        dtype=str(config.dtype).removeprefix("torch."),
        rank=Rank(parallel.attn_tp_rank, parallel.attn_tp_size, args.pp_rank, parallel.pp_size),
        kv_heads=1 if one_head else config.get_total_num_kv_heads(),
        layers=(layers[0], layers[1]),
        is_mla=one_head,
        device=-1 if server_args.device == "cpu" else args.gpu_id,
        architecture=model_format.architecture(config),
        quantization=model_format.quantization(config),
        scales=model_format.scales(),
        state_dtypes=model_format.states(config),
    )


def rank_number() -> int:
    """Return this rank's number among those of all data-parallel replicas, from 0 on."""
    parallel = get_parallel()
    own = parallel.pp_rank * parallel.tp_size + parallel.tp_rank  # also numbers attention DP ranks
    return int((parallel.dp_rank or 0) * parallel.tp_size * parallel.pp_size + own)


def bootstrap_s() -> float:
    """Return how many seconds a request may wait until its partner is known."""
    return float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())


def patience_s() -> float:
    """Return how many seconds SGLang lets one side wait for the other."""
    return float(
        max(
            bootstrap_s(),
            envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(),
        )
    )


def quiet_s() -> float:
    """Return the seconds in which a dropped transfer must end: SGLang then reuses its pages."""
    return float(envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get())


def own_settings(extra: Mapping[str, Any]) -> Settings:
    """Return the settings in ``extra``, and those that it lacks from elsewhere; the first rank logs
    them.

    Raises:
        ConfigError: as :func:`~kvconnect.settings.find_settings`.
    """
    settings = find_settings(extra, os.environ).settings
    if rank_number() == 0:
        engine = f"SGLang {engine_versions.installed('sglang')}"
        logger.info("%s", start_line(settings, engine))
    return settings


def worker_share(settings: Settings) -> int:
    """Return this worker's part of the engine's host memory in bytes.

    Raises:
        ConfigError: there is none, or this machine's engines together want more than it has.
    """
    parallel = get_parallel()
    engines: int = parallel.dp_size
    there = memory.total_bytes()
    total = share_of_host_bytes(settings, memory_bytes=there, engines=engines)
    if not total:
        raise ConfigError("host_bytes", "off", "there is no other tier yet; give it a size")
    check_fits(total * engines, memory_bytes=there, what=f"in this machine for {engines} engines")
    # A node's workers share what the engine has on that node.
    workers: int = max(1, parallel.tp_size * parallel.pp_size // parallel.nnodes)
    return total // workers
