"""What a worker knows of its weights: digests of parameters, and what updates leave of it."""

from __future__ import annotations

import pytest
import torch

from kvconnect.engines import loaded_weights
from kvconnect.engines.loaded_weights import LoadedWeights, generation_of, parameters_digest
from kvconnect.protocol.identity import Weights


class Model:
    """A model's parameters, which a trainer changes."""

    def __init__(self) -> None:
        self.parameters: list[torch.Tensor] | None = [torch.arange(64.0), torch.ones(3, 5)]

    def change(self) -> None:
        assert self.parameters is not None
        self.parameters[1][2, 4] += 1

    def started(self, **known: str) -> LoadedWeights:
        weights = LoadedWeights(Weights(**known), lambda: self.parameters)
        weights.start()
        return weights


def test_a_digest_covers_every_byte_of_small_models_types_and_shapes() -> None:
    base = torch.arange(12, dtype=torch.int32)
    digests = {
        parameters_digest(tensors)
        for tensors in (
            [base],
            [base.view(3, 4)],
            [base.view(torch.float32)],
            [base.flip(0)],
            [base[:6], base[6:]],
            [torch.cat((base[:-1], torch.tensor([99], dtype=torch.int32)))],
        )
    }
    assert len(digests) == 6
    assert parameters_digest([base.clone()]) in digests
    assert parameters_digest([]) == parameters_digest([torch.empty(0)]) == ""


def test_a_digest_is_of_what_a_tensor_spans_however_it_lies() -> None:
    whole = torch.randn(6, 8)
    turned = whole.t()
    assert parameters_digest([turned]) == parameters_digest([whole.clone().t()])
    changed = whole.clone()
    changed[5, 7] += 1
    assert parameters_digest([changed.t()]) != parameters_digest([turned])
    tied = torch.nn.Parameter(whole)
    assert parameters_digest([tied, tied]) != parameters_digest([tied])


def test_large_models_are_sampled_and_each_tensor_from_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded_weights, "_SAMPLES", 4)
    monkeypatch.setattr(loaded_weights, "_SAMPLE_BYTES", 64)
    tensors = [torch.zeros(1000), torch.zeros(1000)]
    before = parameters_digest(tensors)
    tensors[1][0] = 1
    assert parameters_digest(tensors) != before
    tensors[1][0] = 0
    tensors[1] += torch.arange(1000) % 10 == 0  # a tenth of them
    assert parameters_digest(tensors) != before
    tensors[1].zero_()
    tensors[1][100] = 1  # the documented limit: one value between two samples
    assert parameters_digest(tensors) == before


def test_a_look_forgets_what_is_known_of_other_weights_only() -> None:
    model = Model()
    weights = model.started(files="f", version="1")
    start = weights.known
    assert start.parameters
    weights.look()
    assert weights.known == start  # slept, or reset
    model.change()
    weights.look()
    assert (weights.known.files, weights.known.version) == ("", "")
    assert weights.known.parameters not in ("", start.parameters)
    weights.look("2")
    assert weights.known.version == "2"


def test_a_version_that_is_declared_with_new_parameters_is_of_those() -> None:
    model = Model()
    weights = model.started(files="f", version="1")
    model.change()
    weights.look("2")
    assert (weights.known.files, weights.known.version) == ("", "2")


def test_engines_that_were_updated_alike_know_the_same() -> None:
    models = Model(), Model()
    one, other = (model.started(files=name) for model, name in zip(models, "ab", strict=True))
    for model, weights in zip(models, (one, other), strict=True):
        weights.updating()
        assert weights.known == Weights()
        model.change()
        weights.updated(version="2")
    assert one.known == other.known and one.known.version == "2"


def test_parameters_that_cannot_be_read_are_unknown_and_not_equal() -> None:
    model = Model()
    weights = model.started(files="f")
    known = weights.known
    model.parameters = None  # asleep
    weights.look()
    assert weights.known == known
    weights.updated()
    assert weights.known == Weights()
    model.parameters = [torch.empty(3, device="meta")]
    weights.look()
    assert weights.known == Weights()


@pytest.mark.parametrize("unreadable", [[], [torch.empty(3, device="meta")]])
def test_weights_that_cannot_be_compared_are_unknown_from_a_reset_on(
    unreadable: list[torch.Tensor],
) -> None:
    model = Model()
    for compared in (True, False):  # True: control
        model.parameters = [torch.ones(3)] if compared else unreadable
        weights = model.started(files="f", version="of the files")
        weights.start()  # as the worker greets once more
        assert weights.known.files == "f"
        weights.look()
        assert weights.known.files == ("f" if compared else "")
        assert (weights.known == Weights()) != compared
        weights.look("2")
        assert weights.known.version == "2"
        weights.look()  # a declared version is of all weights, until another one is declared
        assert weights.known.version == "2"
        weights.updated(files="g")
        assert weights.known.version == ""
        weights.look()
        assert weights.known.files == ("g" if compared else "")


def test_generations_are_of_what_the_weights_are() -> None:
    start = Weights(files="a", parameters="p")
    assert generation_of(start, start) == b""
    assert generation_of(start, Weights(files="a", version="1", parameters="q")) == b""
    assert generation_of(Weights(parameters="p"), Weights(version="1", parameters="p")) == b""
    assert generation_of(start, Weights(files="b", parameters="p")) != b""
    updated = Weights(version="1", parameters="q")
    assert generation_of(start, updated) == generation_of(Weights(files="b"), updated) != b""
    assert generation_of(start, updated) != generation_of(start, Weights(version="2"))
    assert generation_of(start, Weights()) != generation_of(start, Weights()) != b""
