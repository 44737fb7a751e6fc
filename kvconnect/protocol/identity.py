"""Which weights a worker computes KV with. Both sides of a connection compare them before KV moves:
KV of other weights has the same form, and another meaning."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Text = Annotated[str, Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]

MIX = "mix_weights"
"""Name of the setting that allows other weights."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker knows of one model's weights; empty where it does not know.

    Attributes:
        files: digest of the files that were loaded.
        version: as declared by who made or updated the weights.
        parameters: digest of the loaded parameters. Each rank has another part of them.
    """

    files: _Text = ""
    version: _Text = ""
    parameters: _Text = ""

    def __str__(self) -> str:
        known = (f"{name} {value}" for name in _KINDS if (value := getattr(self, name)))
        return ", ".join(known) or "unknown"


_KINDS = ("files", "version", "parameters")
"""What is compared: the first that both sides know."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of a worker's model, and of its draft model if it has one. ``mixes_weights``: its
    engine takes KV of other weights on purpose."""

    weights: Weights = Weights()
    draft: Weights = Weights()
    mixes_weights: bool = False


def other_weights(ours: Identity, theirs: Identity, *, same_part: bool) -> tuple[str, str] | None:
    """Return both sides' weights as text if they are others, or cannot be compared; else None.

    ``same_part``: both workers have the same part of the model, so that their parameters can be
    compared. Draft models are compared where both sides have one.
    """
    found = _difference(ours.weights, theirs.weights, same_part=same_part)
    nothing = Weights()
    if found is None and nothing not in (ours.draft, theirs.draft):
        found = _difference(ours.draft, theirs.draft, same_part=same_part)
        return found and (f"draft {found[0]}", f"draft {found[1]}")
    return found


def _difference(ours: Weights, theirs: Weights, *, same_part: bool) -> tuple[str, str] | None:
    for name in _KINDS if same_part else _KINDS[:-1]:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine and other:
            return None if mine == other else (f"{name} {mine}", f"{name} {other}")
    return str(ours), str(theirs)
