"""How a vLLM engine's parts learn of its weights, from the calls that change them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvconnect.engines.vllm import weights
from kvconnect.engines.vllm.messages import LookAtWeights, LookedAtWeights
from kvconnect.engines.vllm.weights import EngineWeights, WorkerWeights
from kvconnect.protocol.identity import Identity, Weights


class Worker:
    """The methods of vLLM's worker that change weights. ``fails``: a reload raises."""

    _weight_update_is_draft = False
    fails = False

    def get_kv_connector_handshake_metadata(self) -> str:
        return "metadata"

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def discard(self, tags: tuple[str, ...]) -> None: ...

    def start_weight_update(self) -> None:
        self._weight_update_is_draft = False

    def start_draft_weight_update(self) -> None:
        self._weight_update_is_draft = True

    def finish_weight_update(self) -> None: ...

    def reset_weights(self) -> None: ...

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        if self.fails:
            raise RuntimeError("no such file")


class Core:
    version = ""

    def set_weight_version(self, weight_version: str) -> None:
        self.version = weight_version


class Part:
    """A connector's part; it keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def weights_updating(self, *, draft: bool) -> None:
        self.told.append(f"updating {draft}")

    def weights_updated(self, *, draft: bool, from_files: bool) -> None:
        self.told.append(f"updated {draft} {from_files}")

    def weights_awake(self) -> None:
        self.told.append("awake")

    def weights_declared(self, version: str) -> None:
        self.told.append(version)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    found = Part()
    monkeypatch.setattr(weights, "Worker", type("MyWorker", (Worker,), {}))
    monkeypatch.setattr(weights, "EngineCore", type("MyCore", (Core,), {}))
    monkeypatch.setattr(weights._PresentWorker, "get", staticmethod(lambda: None))
    monkeypatch.setattr(weights._PresentWorker, "asleep", False)
    weights.follow_worker(found)
    weights.follow_worker(found)  # idempotent
    weights.follow_core(found)
    return found


def test_each_way_of_updating_is_told_once_and_in_order(part: Part) -> None:
    worker: Any = weights.Worker()
    assert worker.get_kv_connector_handshake_metadata() == "metadata"
    assert weights._PresentWorker.get() is worker
    worker.start_weight_update()
    worker.finish_weight_update()
    worker.start_draft_weight_update()
    worker.finish_weight_update()
    worker.reload_weights()
    worker.reload_weights(weights_path="/new")
    worker.reload_weights([("name", None)])
    worker.reload_weights(weights_iterator=[])
    assert part.told == [
        *("updating False", "updated False False", "updating True", "updated True False"),
        *("updating False", "updated False True") * 2,
        *("updating False", "updated False False") * 2,
    ]
    core: Any = weights.EngineCore()
    core.set_weight_version("12")
    assert core.version == part.told[-1] == "12"


def test_after_a_failed_reload_nothing_is_known(part: Part) -> None:
    worker: Any = weights.Worker()
    worker.fails = True
    with pytest.raises(RuntimeError, match="no such file"):
        worker.reload_weights()
    assert part.told == ["updating False"]


def test_weights_are_not_read_while_they_sleep(part: Part) -> None:
    worker: Any = weights.Worker()
    worker.sleep(2)
    assert weights._PresentWorker.asleep
    worker.wake_up(["kv_cache"])
    assert weights._PresentWorker.asleep and not part.told
    worker.wake_up(["weights"])
    assert not weights._PresentWorker.asleep and part.told == ["awake"]
    worker.discard(("weights",))
    assert weights._PresentWorker.asleep
    worker.wake_up()
    assert not weights._PresentWorker.asleep


A, B, P = Identity(weights=Weights(files="a")), Identity(weights=Weights(version="2")), (0, 0)
Q = (0, 1)


def test_an_engine_names_blocks_by_the_weights_that_all_workers_have() -> None:
    engine = EngineWeights()
    engine.greet({P: A, Q: A})
    assert engine.take() is None
    engine.look(reset=True)
    engine.look("2")
    engine.look()  # a reset and a declared version before one step are one order
    assert engine.pending and engine.take() == LookAtWeights(1, "2", reset=True)
    assert not engine.on_reports({P: LookedAtWeights(1, A)}) and engine.settled() is None
    assert not engine.on_reports({Q: LookedAtWeights(1, A)}) and engine.settled() == b""

    assert engine.on_reports({P: LookedAtWeights(1, B), Q: LookedAtWeights(1, B)})  # told; no order
    assert engine.settled() is None
    engine.look()
    assert engine.take() == LookAtWeights(2, "")
    engine.on_reports(
        {P: LookedAtWeights(1, B), Q: LookedAtWeights(1, B)}
    )  # of a step before the order
    assert engine.settled() is None
    engine.on_reports({P: LookedAtWeights(2, B), Q: LookedAtWeights(2, B)})
    name = engine.settled()
    assert name
    other = EngineWeights()
    other.greet({P: Identity(weights=Weights(files="b"))})  # other files and ranks
    other.look()
    other.take()
    other.on_reports({P: LookedAtWeights(1, B)})
    assert other.settled() == name


def test_names_are_settled_again_only_when_no_kv_of_former_weights_is_left() -> None:
    engine = EngineWeights()
    engine.greet({P: A, Q: A})

    def answered(version: str = "", *, reset: bool, mixed: bool) -> bytes | None:
        engine.look(version, reset=reset)
        order = engine.take()
        assert order is not None and order.reset is reset
        engine.on_reports(
            {P: LookedAtWeights(order.number, B, mixed), Q: LookedAtWeights(order.number, B)}
        )
        return engine.settled()

    assert answered("2", reset=False, mixed=True) is None
    name = answered(reset=True, mixed=False)
    assert name and answered("2", reset=False, mixed=False) == name  # control


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("how", ["updating", "updated", "look"])
def test_kv_of_former_weights_is_there_until_a_reset(
    part: Part, monkeypatch: pytest.MonkeyPatch, how: str, computed: bool
) -> None:
    monkeypatch.setattr(weights, "_start_weights", lambda _: (Weights(files="a"), Weights()))
    monkeypatch.setattr(weights, "_files", lambda *_: "")
    worker: Any = weights.Worker()
    model = torch.nn.Linear(2, 2)
    worker.get_model = lambda: model
    worker.get_kv_connector_handshake_metadata()
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_eplb=False), load_config=None, model_config=None
    )
    loaded = WorkerWeights(config, mixes=False)
    loaded.start()
    loaded.computed = computed
    loaded.look("2")
    assert not loaded.mixed, "the weights are the same"
    with torch.no_grad():
        model.weight += 1
    if how == "updating":
        loaded.updating(draft=False)
    elif how == "updated":
        loaded.updated(draft=False, from_files=False)
    else:
        loaded.look()
    assert loaded.mixed is computed
    loaded.look("3")
    assert loaded.mixed is computed
    loaded.look(reset=True)
    assert not loaded.mixed


def test_ranks_that_know_parameters_alone_name_them_together() -> None:
    def name(*digests: str) -> bytes | None:
        engine = EngineWeights()
        places = [(0, rank) for rank in range(len(digests))]
        engine.greet(dict.fromkeys(places, A))
        engine.look()
        engine.take()
        found = [Identity(weights=Weights(parameters=digest)) for digest in digests]
        engine.on_reports(
            {place: LookedAtWeights(1, it) for place, it in zip(places, found, strict=True)}
        )
        return engine.settled()

    assert name("p", "q") == name("p", "q") != name("p", "r")
    assert name("p", "q") != name("q", "p")


@pytest.mark.parametrize("eplb", [False, True])
def test_a_reset_names_blocks_anew_where_experts_move_and_no_version_is_declared(
    part: Part, monkeypatch: pytest.MonkeyPatch, eplb: bool
) -> None:
    """Without experts that move, the parameters are compared: names stay (control)."""
    start = Weights(files="a"), Weights()
    monkeypatch.setattr(weights, "_start_weights", lambda _: start)
    worker: Any = weights.Worker()
    model = torch.nn.Linear(2, 2)
    worker.get_model = lambda: model
    worker.get_kv_connector_handshake_metadata()
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=eplb))
    loaded, engine = WorkerWeights(config, mixes=False), EngineWeights()
    loaded.start()
    engine.greet({P: loaded.identity})

    def reset(version: str = "") -> bytes | None:
        engine.look(version)
        order = engine.take()
        assert order is not None
        loaded.look(order.version)
        engine.on_reports({P: LookedAtWeights(order.number, loaded.identity)})
        return engine.settled()

    first, second = reset(), reset()
    assert (first == second == b"") != eplb and first is not None
    assert (first != second) == eplb, "each reset may be of other weights"
    if eplb:
        assert loaded.identity.weights == Weights()
        assert reset("2") == reset() != b""
