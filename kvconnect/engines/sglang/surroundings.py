"""What SGLang's runtime says of the rank that this process is, and what cannot be served."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from kvconnect.engines.sglang.flags import check as check_flags
from kvconnect.engines.sglang.translate import Model
from kvconnect.errors import ConfigError, Incompatible
from kvconnect.types import Rank


def check(server_args: ServerArgs) -> None:
    """Refuse what this backend does not serve, at start.

    Raises:
        ConfigError: naming the flag, its value and the fix.
    """
    parallel = get_parallel()
    sizes = {"attention-context-parallel-size": parallel.attn_cp_size}
    sizes["decode-context-parallel-size"] = parallel.attn_dcp_size
    for flag, size in sizes.items():
        if size > 1:
            raise ConfigError(f"--{flag}", size, "this transfer backend serves 1 only")
    if parallel.enable_kv_cache_sharding:
        raise ConfigError("--enable-kv-cache-sharding", True, "leave it out with this backend")
    if envs.SGLANG_DISAGG_STAGING_BUFFER.get():
        fix = "unset it: heads are sliced on the way by this backend itself"
        raise ConfigError("SGLANG_DISAGG_STAGING_BUFFER", "1", fix)
    check_flags(server_args)


def model(args: Any, server_args: ServerArgs, is_mla: bool) -> Model:
    """Return what SGLang's transfer arguments leave out.

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
    )


def rank_number(args: Any) -> int:
    """Return a number for this rank that no other rank of its engine on this machine has."""
    parallel = get_parallel()
    ranks = parallel.attn_tp_size * parallel.pp_size
    return int(
        (args.system_dp_rank or 0) * ranks
        + args.pp_rank * parallel.attn_tp_size
        + parallel.attn_tp_rank
    )


def patience_s() -> float:
    """Return for how long SGLang lets one side wait for the other."""
    return float(
        max(
            envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(),
            envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(),
        )
    )


def quiet_s() -> float:
    """Return within how many seconds a dropped transfer must have ended: SGLang gives its pages
    away after that."""
    return float(envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get())
