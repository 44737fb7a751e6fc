"""The table of docs/upgrade.md: two engines that differ in one thing, and what becomes of it.

Each line is what the code's own comparisons say of two engines that are equal but for that thing:
of the protocol's versions, their workers' greetings, both sides' prompts, and the names of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvconnect.cache.keys import scope_of, seed_of, tenant_of
from kvconnect.cache.record_format import RecordFormat, page_names
from kvconnect.errors import Refused
from kvconnect.protocol.codec import PROTOCOL, common_protocol
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.messages import GroupHello, HandoffHello
from kvconnect.protocol.negotiation import negotiate
from kvconnect.protocol.prompts import difference, identify
from kvconnect.protocol.topology import head_range
from kvconnect.types import Rank

CONNECT, REQUEST = "when they connect", "at the request"
FOUND, OTHER = "found", "not found"
_TYPES = ("dtype", "cache_dtype", "compute_dtype", "quantization")


@dataclass(frozen=True)
class Engine:
    """One side of a hand-off, and what names the blocks that it stores.

    Attributes:
        version: first and last version of the protocol that it speaks.
        files: digest of the weights' files.
        declared: version of the weights, declared after an update; they are then no files any more.
        form: what is compared by name.
        ids, adapter, media, salt: of the request as this side has read it.
    """

    version: tuple[int, int] = PROTOCOL
    software: str = "0.3"
    files: str = "6b1f"
    declared: str = ""
    form: tuple[tuple[str, Any], ...] = (
        ("model", "llama"),
        ("architecture", "51d7"),
        ("dtype", "bfloat16"),
        ("cache_dtype", "auto"),
        ("packing", ""),
        ("tokens_ahead", 0),
    )
    layers: int = 2
    block_tokens: int = 32
    kv_heads: int = 8
    window: int | None = None
    row_bytes: int = 256
    splittable: bool = True
    tp: int = 1
    ids: tuple[int, ...] = tuple(range(100))
    adapter: str = ""
    media: str = ""
    salt: str = ""

    def hello(self) -> HandoffHello:
        """Return the greeting of its first worker."""
        first, end = head_range(0, self.tp, self.kv_heads)
        files = "" if self.declared else self.files
        group = GroupHello(
            block_tokens=self.block_tokens,
            page_tokens=self.block_tokens,
            window=self.window,
            layers=[f"layers.{number}" for number in range(self.layers)],
            kv_heads=self.kv_heads,
            heads=end - first,
            row_bytes=self.row_bytes,
            order="HNC",
            splittable=self.splittable,
        )
        return HandoffHello(
            protocol=self.version,
            software=self.software,
            engine_id="engine",
            epoch=1,
            rank=Rank(0, self.tp, 0, 1),
            identity=Identity(weights=Weights(files=files, version=self.declared)),
            format=dict(self.form),
            groups=[group],
        )

    def stored(self) -> tuple[object, ...]:
        """Return what names the first block of the prompt in a store that engines share."""
        form = dict(self.form)
        records = RecordFormat(
            model=f"{form['model']} {form['architecture']} {self.files} {self.declared}",
            dtype=" ".join(str(form.get(name)) for name in _TYPES),
            layers=tuple(range(self.layers)),
            tokens=self.block_tokens,
            heads=self.kv_heads,
            unit=1,
            row=(self.row_bytes // 2, self.row_bytes // 2),
        )
        names = page_names(self.ids, self.block_tokens, seed_of(self.salt))
        scope = scope_of(self.adapter.encode(), b"")
        return records.fingerprint, tenant_of(self.salt), scope, names


BASE = Engine()


def with_form(**values: Any) -> Engine:
    return replace(BASE, form=tuple({**dict(BASE.form), **values}.items()))


_EIGHT_BITS = {"cache_dtype": "fp8", "dtype": "uint8"}
LINES: dict[str, Engine | tuple[Engine, Engine]] = {
    "weights: other files": replace(BASE, files="d2a9"),
    "weights: one side was updated, to a declared version": replace(BASE, declared="step-200"),
    "model": with_form(model="qwen"),
    "configuration of the model": with_form(architecture="8c02"),
    "chat template or tokenizer": replace(BASE, ids=(*range(99), 7)),
    "adapter": replace(BASE, adapter="poet"),
    "image or other media": replace(BASE, media="image"),
    "salt": replace(BASE, salt="tenant"),
    "`--dtype`": with_form(dtype="float16"),
    "`--dtype`, with an 8-bit cache on both": (
        with_form(**_EIGHT_BITS, compute_dtype="bfloat16"),
        with_form(**_EIGHT_BITS, compute_dtype="float16"),
    ),
    "`--kv-cache-dtype`": with_form(cache_dtype="fp8"),
    "`--quantization` of weights that have none": with_form(quantization="fp8"),
    "block size, one divides the other": replace(BASE, block_tokens=64),
    "block size, neither divides the other": replace(BASE, block_tokens=48),
    "block size, pages that are packed as a whole": (
        replace(BASE, splittable=False),
        replace(BASE, splittable=False, block_tokens=64),
    ),
    "number of KV heads": replace(BASE, kv_heads=4),
    "tensor parallelism": replace(BASE, tp=2),
    "layers: decode has one that prefill has not": replace(BASE, layers=3),
    "sliding window": replace(BASE, window=128),
    "bytes of a token": replace(BASE, row_bytes=512),
    "page packing": with_form(packing="amx"),
    "speculative decoding": with_form(tokens_ahead=2),
    "version of KVConnect, same protocol": replace(BASE, software="0.3.1"),
    "version of KVConnect, older protocol": replace(
        BASE, version=(PROTOCOL[0] - 1, PROTOCOL[1] - 1), software="0.2"
    ),
}
"""What differs -> the decode side, where the prefill side is :data:`BASE`; or both sides."""
OWN_FORM = {"image or other media", "sliding window", "page packing", "speculative decoding"}
"""Where blocks have names, or a form, of one kind of engine, which depend on this too."""


def outcome(prefill: Engine, decode: Engine) -> tuple[str, str]:
    """Return when a hand-off is refused, and in which words; twice "" if it is not. Versions are
    compared by a connection's handshake, before the greetings: the words are decode's."""
    try:
        common_protocol(decode.version, prefill.version)
        negotiate(decode.hello(), prefill.hello())
    except Refused as refused:
        return CONNECT, f"`{refused.field}`: {refused}"
    context = [(each.adapter, each.media, each.salt) for each in (prefill, decode)]
    text = difference(identify(prefill.ids, context[0]), identify(decode.ids, context[1]))
    return (REQUEST, f"`prompt`: {text}") if text else ("", "")


def table() -> str:
    """Return a line for each difference."""
    rows = [
        "| engines differ in | a hand-off is | in these words | blocks that the other stored |",
        "|---|---|---|---|",
    ]
    for what, line in LINES.items():
        prefill, decode = line if isinstance(line, tuple) else (BASE, line)
        when, words = outcome(prefill, decode)
        verdict = f"refused {when}" if when else "made"
        stored = FOUND if prefill.stored() == decode.stored() else OTHER
        stored = OTHER if what in OWN_FORM else stored
        rows.append(f"| {what} | {verdict} | {words} | {stored} |")
    return "\n".join(rows)
