"""Where requests go: engines and ranks that pair, models, sources of a prompt. No I/O."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Refused
from kvconnect.router.apis import APIS
from kvconnect.router.body import Prompt
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy import loads as loads_module
from kvconnect.router.policy.choice import (
    SOURCE_MIN_TOKENS,
    FailedTargets,
    Mode,
    RoutingReason,
    RoutingRequest,
    Unserved,
    choose,
    explain_no_choice,
)
from kvconnect.router.policy.fleet_view import (
    Engine,
    FleetView,
    Role,
    Target,
    TargetLoad,
    WorkerView,
)
from kvconnect.router.policy.prefixes import CacheHit
from kvconnect.router.policy.ranking import (
    RankingPolicy,
    RankingReason,
)
from tests.architecture import NOT_IN_PURE, imports

LOAD_AWARE = (RankingPolicy.LEAST_TOKENS, RankingPolicy.CACHE_AWARE)


# Pairs ------------------------------------------------------------------------------------------

ASK = Prompt(single=True, tokens=100)
GENERATE = next(api for api in APIS if api.path == "/generate")
OPTIONS = RouterOptions((), ())


def worker(index: int, *ranks: int, **more: Any) -> WorkerView:
    loads = tuple(TargetLoad(tokens, 0) for tokens in ranks) or (TargetLoad(0, 0),)
    return WorkerView(index, more.pop("up", True), loads, name=f"w{index}", **more)


def chosen(view: FleetView, options: RouterOptions = OPTIONS, **wish: Any) -> Any:
    return choose(
        view, RoutingRequest(**{"prompt": ASK, "turn": 0, **wish}), FailedTargets(), options
    )


def test_instances_and_ranks_are_chosen_together_by_the_least_tokens() -> None:
    view = FleetView((worker(0, 5, 9), worker(1, 7, 2)), (worker(0, 3, 3, 1), worker(1, 2)))
    found = chosen(view)
    assert found.prefill.target == Target(1, 1)
    assert found.decode.target == Target(0, 2)
    assert (found.prefill.why, found.prefill.tokens, found.prefill.hit) == (
        RankingReason.LEAST,
        100,
        0,
    )


def test_the_minimum_token_rank_of_the_engine_whose_turn_it_is() -> None:
    view = FleetView((worker(0, 5, 9), worker(1, 7, 2)), (worker(0),))
    turns = {"prefill_policy": RankingPolicy.ROUND_ROBIN}
    least = RouterOptions((), (), dp_minimum_tokens=True, **turns)
    assert [chosen(view, least, turn=turn).prefill.target for turn in range(4)] == [
        (0, 0),
        (1, 1),
        (0, 0),
        (1, 1),
    ]
    plain = RouterOptions((), (), **turns)
    assert [chosen(view, plain, turn=turn).prefill.target for turn in range(4)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


def test_only_uncached_tokens_count() -> None:
    view = FleetView((worker(0, 0, 0), worker(1, 0)), (worker(0),))
    hits = {Role.PREFILL: {Target(0, 1): CacheHit(64, 64.0, 64)}}
    options = RouterOptions((), (), prefill_policy=RankingPolicy.CACHE_AWARE)
    found = chosen(view, options, hits=hits)
    assert (found.prefill.target, found.prefill.tokens, found.prefill.hit) == ((0, 1), 36, 64)
    assert found.decode.tokens == 100
    long = {Role.PREFILL: {Target(0, 1): CacheHit(640, 640.0, 640)}}
    assert chosen(view, options, hits=long).prefill.tokens == 0, "never negative"


@pytest.mark.parametrize("unified", [True, False])
def test_a_source_is_named_if_it_has_clearly_more(unified: bool) -> None:
    """Of targets that share, it is the one with most to read, the least busy of several."""
    role = Role.DECODE if unified else Role.PREFILL
    options = RouterOptions((), (), **{f"{role.value}_policy": RankingPolicy.CACHE_AWARE})

    def named(*hits: CacheHit, lost: tuple[int, ...] = ()) -> str:
        tickets = [None if index in lost else f"t{index}" for index in range(4)]
        workers = tuple(
            worker(index, load, share_tickets=(tickets[index],))
            for index, load in enumerate([0, 5000, 4000, 5000])  # the first one is chosen
        )
        prefill = () if unified else workers
        decode = workers if unified else (worker(0),)
        view = FleetView(prefill, decode, (), unified)
        found = {Target(index): hit for index, hit in enumerate(hits)}
        wish = {"prompt": Prompt(tokens=1000), "hits": {role: found}}
        choice = chosen(view, options, **wish)
        picked = choice.decode if unified else choice.prefill
        assert picked.target == Target(0)
        assert unified or not choice.decode.source, "what is handed off is not read elsewhere"
        assert picked.options == ({"source": picked.source} if picked.source else {})
        return str(picked.source)

    none, some = CacheHit(), CacheHit(300, 300.0, 300)
    more = CacheHit(300 + SOURCE_MIN_TOKENS, 500.0, 300 + SOURCE_MIN_TOKENS)
    assert named(none, some, more, some) == "t2"
    assert named(some, none, more, none) == "t2"
    assert named(some, none, more._replace(readable=299 + SOURCE_MIN_TOKENS), none) == ""
    assert named(none, more, more, none) == "t2", "the less busy one"
    assert named(more, none, more, none) == ""
    assert named(none, none, none, none) == ""
    assert named(none, some, more, none, lost=(2,)) == "t1"
    assert named(none, some, more, none, lost=(0,)) == "", "the chosen one cannot read"


def test_a_source_is_one_rank_of_an_engine() -> None:
    options = RouterOptions((), (), decode_policy=RankingPolicy.CACHE_AWARE)
    view = FleetView((), (worker(0, 0, 5000, share_tickets=("a", "b")),), (), True)
    hits = {Role.DECODE: {Target(0, 1): CacheHit(900, 900.0, 900)}}
    found = chosen(view, options, prompt=Prompt(tokens=1000), hits=hits).decode
    assert (found.target, found.source) == (Target(0, 0), "b")


def test_versions_and_engines_pair_only_with_their_like() -> None:
    view = FleetView(
        (worker(0, version="1"), worker(1, version="2"), worker(2, engine=Engine.SGLANG)),
        (worker(0, version="2"), worker(1, version="1"), worker(2, engine=Engine.SGLANG)),
    )
    pairs = [chosen(view, turn=turn) for turn in range(6)]
    assert [(p.prefill.target.worker, p.decode.target.worker) for p in pairs[:3]] == [
        (0, 1),
        (1, 0),
        (2, 2),
    ]
    assert [p.mode for p in pairs[:3]] == [Mode.PULL, Mode.PULL, Mode.BOOTSTRAP]
    split = FleetView((worker(0, version="1"),), (worker(0, version="2"),))
    assert chosen(split) is None
    assert "version differ" in explain_no_choice(split, RoutingRequest(ASK, 0))


def test_an_upgrade_gets_requests_by_the_smaller_side() -> None:
    view = FleetView(
        tuple(worker(n, version="1" if n < 3 else "2") for n in range(4)),
        tuple(worker(n, version="1" if n < 2 else "2") for n in range(4)),
    )
    found = Counter(chosen(view, turn=turn).prefill.target.worker >= 3 for turn in range(30))
    assert found == {False: 20, True: 10}


VERSIONS = st.sampled_from(["", "1", "2"])
ENGINES = st.sampled_from(list(Engine))
MODELS = st.sampled_from([frozenset(), frozenset({"a"}), frozenset({"b"}), frozenset({"a", "b"})])
FLEETS = st.lists(st.tuples(st.booleans(), VERSIONS, ENGINES, MODELS), max_size=4)


@given(FLEETS, FLEETS, st.sampled_from(["", "a"]), st.integers(0, 99), st.booleans())
def test_any_choice_is_a_pair_that_can_hand_over(
    prefill: list[Any], decode: list[Any], model: str, turn: int, single: bool
) -> None:
    def fleet(some: list[Any]) -> tuple[WorkerView, ...]:
        return tuple(
            worker(n, up=up, version=version, engine=engine, models=models)
            for n, (up, version, engine, models) in enumerate(some)
        )

    view = FleetView(fleet(prefill), fleet(decode))
    prompt = Prompt(single, 10, model)
    found = chosen(view, prompt=prompt, turn=turn)
    pairs = [
        (p, d)
        for p in view.prefill
        for d in view.decode
        if p.up and d.up and p.pairs_with(d) and p.serves(model) and d.serves(model)
    ]
    if found is None:
        assert not pairs
        try:
            assert explain_no_choice(view, RoutingRequest(prompt, turn))
        except Unserved:
            assert not all(
                any(w.serves(model) for w in side) for side in (view.prefill, view.decode)
            )
    elif found.prefill is None:
        assert not single and view.decode[found.decode.target.worker].up
    else:
        p, d = view.prefill[found.prefill.target.worker], view.decode[found.decode.target.worker]
        assert (p, d) in pairs


def test_models_decide_who_may_serve() -> None:
    view = FleetView(
        (worker(0, models=frozenset({"a"})), worker(1, models=frozenset({"b"}))),
        (worker(0, models=frozenset({"b"})), worker(1, models=frozenset({"a"}))),
    )
    for turn in range(3):
        found = chosen(view, prompt=ASK._replace(model="b"), turn=turn)
        assert (found.prefill.target.worker, found.decode.target.worker) == (1, 0)
    missing = RoutingRequest(ASK._replace(model="c"), 0)
    assert choose(view, missing, FailedTargets(), OPTIONS) is None
    with pytest.raises(Unserved, match="The model `c` does not exist"):
        explain_no_choice(view, missing)
    unknown = FleetView((*view.prefill, worker(2, up=False)), (*view.decode, worker(2, up=False)))
    assert "serves the model 'c'" in explain_no_choice(unknown, missing)
    assert "no prefill engine is up" in explain_no_choice(
        FleetView((), view.decode), RoutingRequest(ASK, 0)
    )


@pytest.mark.parametrize(
    ("engine", "model", "serves"),
    [
        (Engine.SGLANG, "a:adapter", True),
        (Engine.SGLANG, "s3://m:adapter", True),
        (Engine.SGLANG, "b:adapter", False),
        (Engine.SGLANG, "ab", False),
        (Engine.VLLM, "a:adapter", False),
    ],
)
def test_sglang_takes_an_adapters_name_behind_the_models(
    engine: Engine, model: str, serves: bool
) -> None:
    assert worker(0, engine=engine, models=frozenset({"a", "s3://m"})).serves(model) == serves


def test_sglangs_own_requests_go_to_sglang() -> None:
    view = FleetView(
        (worker(0), worker(1, engine=Engine.SGLANG)), (worker(0), worker(1, engine=Engine.SGLANG))
    )
    assert {chosen(view, api=GENERATE, turn=turn).prefill.target.worker for turn in range(4)} == {1}
    several = chosen(view, api=GENERATE, prompt=Prompt(False, 5))
    assert (several.mode, several.reason) == (Mode.BOOTSTRAP, RoutingReason.DEFAULT)


def test_sglang_takes_several_prompts_but_not_several_answers() -> None:
    view = FleetView((worker(0, engine=Engine.SGLANG),), (worker(0, engine=Engine.SGLANG),))
    assert chosen(view, prompt=Prompt(False, 5)).mode is Mode.BOOTSTRAP
    several = Prompt(False, 5, sampled=True)
    assert chosen(view, prompt=several) is None
    with pytest.raises(Refused, match="without n, once for each answer"):
        explain_no_choice(view, RoutingRequest(several, 0))
    mixed = FleetView(view.prefill, (*view.decode, worker(1)))
    assert chosen(mixed, prompt=several).decode.target == Target(1)
    with pytest.raises(Refused):  # vLLM knows no /generate
        explain_no_choice(mixed, RoutingRequest(several, 0, api=GENERATE))
    down = FleetView(view.prefill, (*view.decode, worker(1, up=False)))
    assert chosen(down, prompt=several) is None
    assert "no decode engine of vLLM is up" in explain_no_choice(down, RoutingRequest(several, 0))


def test_the_decode_engine_of_an_earlier_attempt_is_kept_if_it_can_be() -> None:
    view = FleetView((worker(0), worker(1)), (worker(0), worker(1), worker(2)))
    assert {chosen(view, keep=2, turn=turn).decode.target.worker for turn in range(4)} == {2}
    gone = FleetView(view.prefill, (*view.decode[:2], worker(2, up=False)))
    assert chosen(gone, keep=2).decode.target.worker == 0


# Purity -----------------------------------------------------------------------------------------


def test_decisions_do_no_io() -> None:
    folder = Path(loads_module.__file__).parent.parent
    for name in (
        *("policy/choice", "policy/loads", "policy/prefixes", "policy/ranking"),
        *("http/engine_bodies", "body", "apis"),
        *("fleet/kv_events", "fleet/pairing", "fleet/reports"),
    ):
        text = (folder / f"{name}.py").read_text()
        assert ast.parse(text)
        found = {item.target.split(".")[0] for item in imports(name, text)}
        assert not found & NOT_IN_PURE, name
