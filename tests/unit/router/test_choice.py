"""Where requests go: engines and ranks that pair, models, sources of a prompt. No I/O."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Refused
from kvconnect.router.policy.choice import (
    SOURCE_MIN_TOKENS,
    FailedTargets,
    Mode,
    RoutedRequest,
    RoutingReason,
    RoutingRules,
    Unserved,
    choose,
    explain_no_choice,
)
from kvconnect.router.policy.fleet_view import (
    EngineKind,
    EngineView,
    FleetView,
    Role,
    Target,
    TargetLoad,
)
from kvconnect.router.policy.prefixes import CacheHit
from kvconnect.router.policy.ranking import (
    RankingPolicy,
    RankingReason,
)
from kvconnect.router.requests.apis import APIS

LOAD_AWARE = (RankingPolicy.LEAST_TOKENS, RankingPolicy.CACHE_AWARE)


# Pairs ------------------------------------------------------------------------------------------

ASK = RoutedRequest(0, 100)
GENERATE = next(api for api in APIS if api.path == "/generate")
RULES = RoutingRules()


def engine(index: int, *ranks: int, **more: Any) -> EngineView:
    loads = tuple(TargetLoad(tokens, 0) for tokens in ranks) or (TargetLoad(0, 0),)
    return EngineView(index, more.pop("up", True), loads, name=f"w{index}", **more)


def chosen(view: FleetView, rules: RoutingRules = RULES, **wish: Any) -> Any:
    return choose(view, ASK._replace(**wish), FailedTargets(), rules)


def test_instances_and_ranks_are_chosen_together_by_the_least_tokens() -> None:
    view = FleetView((engine(0, 5, 9), engine(1, 7, 2)), (engine(0, 3, 3, 1), engine(1, 2)))
    found = chosen(view)
    assert found.prefill.target == Target(1, 1)
    assert found.decode.target == Target(0, 2)
    assert (found.prefill.why, found.prefill.tokens, found.prefill.hit) == (
        RankingReason.LEAST,
        100,
        0,
    )


def test_the_minimum_token_rank_of_the_engine_whose_turn_it_is() -> None:
    view = FleetView((engine(0, 5, 9), engine(1, 7, 2)), (engine(0),))
    least = RoutingRules(RankingPolicy.ROUND_ROBIN, dp_minimum_tokens=True)
    assert [chosen(view, least, turn=turn).prefill.target for turn in range(4)] == [
        (0, 0),
        (1, 1),
        (0, 0),
        (1, 1),
    ]
    plain = RoutingRules(RankingPolicy.ROUND_ROBIN)
    assert [chosen(view, plain, turn=turn).prefill.target for turn in range(4)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


def test_only_uncached_tokens_count() -> None:
    view = FleetView((engine(0, 0, 0), engine(1, 0)), (engine(0),))
    hits = {Role.PREFILL: {Target(0, 1): CacheHit(64, 64.0, 64)}}
    rules = RoutingRules(RankingPolicy.CACHE_AWARE)
    found = chosen(view, rules, hits=hits)
    assert (found.prefill.target, found.prefill.tokens, found.prefill.hit) == ((0, 1), 36, 64)
    assert found.decode.tokens == 100
    long = {Role.PREFILL: {Target(0, 1): CacheHit(640, 640.0, 640)}}
    assert chosen(view, rules, hits=long).prefill.tokens == 0, "never negative"


@pytest.mark.parametrize("unified", [True, False])
def test_a_source_is_named_if_it_has_clearly_more(unified: bool) -> None:
    """Of targets that share, it is the one with most to read, the least busy of several."""
    role = Role.DECODE if unified else Role.PREFILL
    rules = RoutingRules(**{role.value: RankingPolicy.CACHE_AWARE})

    def named(*hits: CacheHit, lost: tuple[int, ...] = ()) -> str:
        tickets = [None if index in lost else f"t{index}" for index in range(4)]
        engines = tuple(
            engine(index, load, share_tickets=(tickets[index],))
            for index, load in enumerate([0, 5000, 4000, 5000])  # the first one is chosen
        )
        prefill = () if unified else engines
        decode = engines if unified else (engine(0),)
        view = FleetView(prefill, decode, (), unified)
        found = {Target(index): hit for index, hit in enumerate(hits)}
        wish = {"tokens": 1000, "hits": {role: found}}
        choice = chosen(view, rules, **wish)
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
    rules = RoutingRules(decode=RankingPolicy.CACHE_AWARE)
    view = FleetView((), (engine(0, 0, 5000, share_tickets=("a", "b")),), (), True)
    hits = {Role.DECODE: {Target(0, 1): CacheHit(900, 900.0, 900)}}
    found = chosen(view, rules, tokens=1000, hits=hits).decode
    assert (found.target, found.source) == (Target(0, 0), "b")


def test_versions_and_engines_pair_only_with_their_like() -> None:
    view = FleetView(
        (engine(0, version="1"), engine(1, version="2"), engine(2, kind=EngineKind.SGLANG)),
        (engine(0, version="2"), engine(1, version="1"), engine(2, kind=EngineKind.SGLANG)),
    )
    pairs = [chosen(view, turn=turn) for turn in range(6)]
    assert [(p.prefill.target.engine, p.decode.target.engine) for p in pairs[:3]] == [
        (0, 1),
        (1, 0),
        (2, 2),
    ]
    assert [p.mode for p in pairs[:3]] == [Mode.PULL, Mode.PULL, Mode.BOOTSTRAP]
    split = FleetView((engine(0, version="1"),), (engine(0, version="2"),))
    assert chosen(split) is None
    assert "version differ" in explain_no_choice(split, ASK)


def test_an_upgrade_gets_requests_by_the_smaller_side() -> None:
    view = FleetView(
        tuple(engine(n, version="1" if n < 3 else "2") for n in range(4)),
        tuple(engine(n, version="1" if n < 2 else "2") for n in range(4)),
    )
    found = Counter(chosen(view, turn=turn).prefill.target.engine >= 3 for turn in range(30))
    assert found == {False: 20, True: 10}


VERSIONS = st.sampled_from(["", "1", "2"])
ENGINES = st.sampled_from(list(EngineKind))
MODELS = st.sampled_from([frozenset(), frozenset({"a"}), frozenset({"b"}), frozenset({"a", "b"})])
FLEETS = st.lists(st.tuples(st.booleans(), VERSIONS, ENGINES, MODELS), max_size=4)


@given(FLEETS, FLEETS, st.sampled_from(["", "a"]), st.integers(0, 99), st.booleans())
def test_any_choice_is_a_pair_that_can_hand_over(
    prefill: list[Any], decode: list[Any], model: str, turn: int, single: bool
) -> None:
    def fleet(some: list[Any]) -> tuple[EngineView, ...]:
        return tuple(
            engine(n, up=up, version=version, kind=kind, models=models)
            for n, (up, version, kind, models) in enumerate(some)
        )

    def serves(side: list[Any], one: EngineView) -> bool:
        """SGLang serves the one model of its side under any name."""
        kinds_and_models = {(kind, models) for _, _, kind, models in side}
        any_name = one.kind is EngineKind.SGLANG and len(kinds_and_models) == 1
        return any_name or one.serves(model)

    view = FleetView(fleet(prefill), fleet(decode))
    request = RoutedRequest(turn, 10, model, single=single)
    found = choose(view, request, FailedTargets(), RULES)
    pairs = [
        (p, d)
        for p in view.prefill
        for d in view.decode
        if p.up and d.up and p.pairs_with(d) and serves(prefill, p) and serves(decode, d)
    ]
    if found is None:
        assert not pairs
        try:
            assert explain_no_choice(view, request)
        except Unserved:
            assert not all(
                any(serves(some, w) for w in side)
                for some, side in ((prefill, view.prefill), (decode, view.decode))
            )
    elif found.prefill is None:
        assert not single and view.decode[found.decode.target.engine].up
    else:
        p, d = view.prefill[found.prefill.target.engine], view.decode[found.decode.target.engine]
        assert (p, d) in pairs


def test_models_decide_who_may_serve() -> None:
    view = FleetView(
        (engine(0, models=frozenset({"a"})), engine(1, models=frozenset({"b"}))),
        (engine(0, models=frozenset({"b"})), engine(1, models=frozenset({"a"}))),
    )
    for turn in range(3):
        found = chosen(view, model="b", turn=turn)
        assert (found.prefill.target.engine, found.decode.target.engine) == (1, 0)
    missing = ASK._replace(model="c")
    assert choose(view, missing, FailedTargets(), RULES) is None
    with pytest.raises(Unserved, match="The model `c` does not exist"):
        explain_no_choice(view, missing)
    unknown = FleetView((*view.prefill, engine(2, up=False)), (*view.decode, engine(2, up=False)))
    assert "serves the model 'c'" in explain_no_choice(unknown, missing)
    assert "no prefill engine is up" in explain_no_choice(FleetView((), view.decode), ASK)


@pytest.mark.parametrize(
    ("kind", "model", "serves"),
    [
        (EngineKind.SGLANG, "a:adapter", True),
        (EngineKind.SGLANG, "s3://m:adapter", True),
        (EngineKind.SGLANG, "b:adapter", False),
        (EngineKind.SGLANG, "ab", False),
        (EngineKind.VLLM, "a:adapter", False),
    ],
)
def test_sglang_takes_an_adapters_name_behind_the_models(
    kind: EngineKind, model: str, serves: bool
) -> None:
    assert engine(0, kind=kind, models=frozenset({"a", "s3://m"})).serves(model) == serves


@pytest.mark.parametrize(
    ("kind", "models", "served"),
    [
        (EngineKind.SGLANG, ("a", "a"), True),
        (EngineKind.SGLANG, ("a", "b"), False),
        (EngineKind.VLLM, ("a", "a"), False),
    ],
)
def test_sglang_serves_its_one_model_under_any_name(
    kind: EngineKind, models: tuple[str, str], served: bool
) -> None:
    side = tuple(engine(n, kind=kind, models=frozenset({m})) for n, m in enumerate(models))
    view, asked = FleetView(side, side), ASK._replace(model="default")
    if served:
        assert chosen(view, model="default").mode is Mode.BOOTSTRAP
        return
    assert choose(view, asked, FailedTargets(), RULES) is None
    with pytest.raises(Unserved, match="The model `default` does not exist"):
        explain_no_choice(view, asked)


def test_sglangs_own_requests_go_to_sglang() -> None:
    view = FleetView(
        (engine(0), engine(1, kind=EngineKind.SGLANG)),
        (engine(0), engine(1, kind=EngineKind.SGLANG)),
    )
    assert {
        chosen(view, kinds=GENERATE.kinds, turn=turn).prefill.target.engine for turn in range(4)
    } == {1}
    several = chosen(view, kinds=GENERATE.kinds, single=False)
    assert (several.mode, several.reason) == (Mode.BOOTSTRAP, RoutingReason.DEFAULT)


def test_sglang_takes_several_prompts_but_not_several_answers() -> None:
    view = FleetView((engine(0, kind=EngineKind.SGLANG),), (engine(0, kind=EngineKind.SGLANG),))
    assert chosen(view, single=False).mode is Mode.BOOTSTRAP
    several = ASK._replace(single=False, sampled=True)
    assert choose(view, several, FailedTargets(), RULES) is None
    with pytest.raises(Refused, match="without n, once for each answer"):
        explain_no_choice(view, several)
    mixed = FleetView(view.prefill, (*view.decode, engine(1)))
    assert choose(mixed, several, FailedTargets(), RULES).decode.target == Target(1)
    with pytest.raises(Refused):  # vLLM knows no /generate
        explain_no_choice(mixed, several._replace(kinds=GENERATE.kinds))
    down = FleetView(view.prefill, (*view.decode, engine(1, up=False)))
    assert choose(down, several, FailedTargets(), RULES) is None
    assert "no decode engine of vLLM is up" in explain_no_choice(down, several)


def test_the_decode_engine_of_an_earlier_attempt_is_kept_if_it_can_be() -> None:
    view = FleetView((engine(0), engine(1)), (engine(0), engine(1), engine(2)))
    assert {chosen(view, keep=2, turn=turn).decode.target.engine for turn in range(4)} == {2}
    gone = FleetView(view.prefill, (*view.decode[:2], engine(2, up=False)))
    assert chosen(gone, keep=2).decode.target.engine == 0
