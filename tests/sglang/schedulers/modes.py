"""The pairs of engines that runs are made with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.sglang.schedulers.engine import Shape
from tests.sglang.schedulers.workload import Rates

PREFILL = Shape("prefill")
DECODE = Shape("decode")
_WITHOUT_OVERLAP = ("--disable-overlap-schedule",)
_PLAIN_PREFILL = replace(
    PREFILL,
    flags=_WITHOUT_OVERLAP,
    env=(("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "false"),),
)
_PLAIN_DECODE = replace(DECODE, flags=_WITHOUT_OVERLAP)
_LAYERWISE = replace(PREFILL, env=(("KVCONNECT_LAYERWISE", "1"),))
_RADIX = replace(DECODE, flags=("--disaggregation-decode-enable-radix-cache",))
_TIGHT = replace(DECODE, tokens=160)


@dataclass(frozen=True)
class Mode:
    """One pair of engines. ``must_see``: what its runs exist for."""

    prefill: Shape = PREFILL
    decode: Shape = DECODE
    rates: Rates = field(default_factory=Rates)
    must_see: tuple[str, ...] = ("decode length", "decode abort", "prefill abort")


MODES = {
    "overlap": Mode(),
    "plain": Mode(_PLAIN_PREFILL, _PLAIN_DECODE),
    "layers": Mode(_LAYERWISE, must_see=("prefill cached",)),
    "tight": Mode(
        decode=_TIGHT,
        rates=Rates(most_open=12, most_new=60),
        must_see=("retracted", "most waiting for memory"),
    ),
    "retracts": Mode(rates=Rates(retracts=0.03), must_see=("recomputed",)),
    "radix": Mode(decode=_RADIX, must_see=("decode cached",)),
    "samples": Mode(rates=Rates(samples=0.4), must_see=("samples",)),
    "ranks": Mode(replace(PREFILL, tp=2), _RADIX, must_see=("decode cached",)),
    "wide-decode": Mode(decode=replace(DECODE, tp=2)),
    "stages": Mode(replace(PREFILL, pp=2)),
}
