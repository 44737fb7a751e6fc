"""Where requests go: engines and ranks that pair, models, sources of a prompt. No I/O."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Refused
from kvconnect.router.policy.block_sources import SOURCE_MIN_TOKENS
from kvconnect.router.policy.choice import (
    MODES,
    FailedTargets,
    Mode,
    RoutedRequest,
    RoutingReason,
    choose,
)
from kvconnect.router.policy.expected_ttft import HANDOFF_DECISIONS, Disaggregate
from kvconnect.router.policy.fleet_view import (
    EngineKind,
    EngineView,
    FleetView,
    Role,
    Target,
    TargetLoad,
)
from kvconnect.router.policy.no_choice import Unserved, explain_no_choice
from kvconnect.router.policy.paired_engines import best_group
from kvconnect.router.policy.prefixes import CacheHit
from kvconnect.router.policy.prompt_times import LinearTime, PromptTimes
from kvconnect.router.policy.ranking import (
    RankingPolicy,
    RankingReason,
)
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.requests.apis import APIS

LOAD_AWARE = (RankingPolicy.LEAST_TOKENS, RankingPolicy.CACHE_AWARE)


# Pairs ------------------------------------------------------------------------------------------

ASK = RoutedRequest(0, 100)
GENERATE = next(api for api in APIS if api.path == "/generate")
RULES = RoutingRules()


def engine(index: int, *ranks: int, **more: Any) -> EngineView:
    loads = tuple(TargetLoad(tokens, 0) for tokens in ranks) or (TargetLoad(0, 0),)
    name = more.pop("name", f"w{index}")
    return EngineView(index, more.pop("up", True), loads, name=name, **more)


def chosen(view: FleetView, rules: RoutingRules = RULES, **wish: Any) -> Any:
    return choose(view, ASK._replace(**wish), FailedTargets(), rules)


def test_instances_and_ranks_are_chosen_together_by_the_least_tokens() -> None:
    view = FleetView((engine(0, 5, 9), engine(1, 7, 2)), (engine(0, 3, 3, 1), engine(1, 2)))
    found = chosen(view, RoutingRules(RankingPolicy.LEAST_TOKENS))
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


def test_a_source_may_have_the_other_role() -> None:
    """A decode engine has the KV of its answers, and a prefill engine what it handed off."""
    much = CacheHit(900, 900.0, 900)
    auto = RoutingRules(disaggregate=Disaggregate.AUTO)

    def sources(role: Role, decode: EngineView, alone: Disaggregate) -> tuple[str, str]:
        prefill = engine(0, name="p", share_tickets=("of p",))
        hits = {each: {Target(0): much} if each is role else {} for each in Role}
        view = FleetView((prefill,), (decode,), alone=True)
        found = chosen(view, auto, tokens=1000, hits=hits, disaggregate=alone)
        return found.prefill.source if found.prefill else "", found.decode.source

    never, always = Disaggregate.NEVER, Disaggregate.ALWAYS
    decode = engine(0, name="d", share_tickets=("of d",))
    assert sources(Role.PREFILL, decode, never) == ("", "of p")
    assert sources(Role.DECODE, decode, always) == ("of d", "")
    assert sources(Role.DECODE, decode, never) == ("", "")
    assert sources(Role.PREFILL, decode, always) == ("", "")
    silent = engine(0, name="d")
    assert sources(Role.PREFILL, silent, never) == ("", ""), "it cannot read"
    same = engine(0, name="p", share_tickets=("of p",))
    assert sources(Role.PREFILL, same, never) == ("", ""), "one server, in two roles"
    other = engine(0, name="d", share_tickets=("of d",), version="2", models=frozenset({"m"}))
    assert sources(Role.PREFILL, other, never) == ("", ""), "its KV may be another one"


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
FLEETS = st.lists(st.tuples(st.booleans(), VERSIONS, ENGINES, MODELS, st.booleans()), max_size=4)


@given(FLEETS, FLEETS, st.sampled_from(["", "a"]), st.integers(0, 99), st.booleans())
def test_any_choice_is_a_pair_that_can_hand_over(
    prefill: list[Any], decode: list[Any], model: str, turn: int, single: bool
) -> None:
    def fleet(some: list[Any]) -> tuple[EngineView, ...]:
        return tuple(
            engine(n, up=up, version=version, kind=kind, models=models, confirmed=confirmed)
            for n, (up, version, kind, models, confirmed) in enumerate(some)
        )

    def serves(side: list[Any], one: EngineView) -> bool:
        """SGLang serves the one model of its side under any name."""
        kinds_and_models = {(kind, models) for _, _, kind, models, _ in side}
        any_name = one.kind is EngineKind.SGLANG and len(kinds_and_models) == 1
        return any_name or one.serves(model)

    view = FleetView(fleet(prefill), fleet(decode))
    request = RoutedRequest(turn, 10, model, single=single)
    found = choose(view, request, FailedTargets(), RULES)
    usable = [
        [
            e
            for e in engines
            if e.up and serves(side, e) and e.knowledge is max(each.knowledge for each in engines)
        ]
        for side, engines in ((prefill, view.prefill), (decode, view.decode))
    ]
    both = [(p, d) for p in usable[0] for d in usable[1]]
    pairs = [(p, d) for p, d in both if p.pairs_with(d)]
    if not pairs and view.has_common_model():
        pairs = [(p, d) for p, d in both if p.pairs_with(d, untold=True)]
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


SGLANG = EngineKind.SGLANG
NAMED, UNTOLD = {"kind": SGLANG, "models": frozenset({"a"})}, {"kind": SGLANG}
OTHER, EARLIER = NAMED | {"models": frozenset({"b"})}, NAMED | {"confirmed": False}


def placed(prefill: list[Any], decode: list[Any], model: str) -> set[tuple[int, int]]:
    """Return the pairs that requests for a model go to."""
    sides = (tuple(engine(n, **e) for n, e in enumerate(side)) for side in (prefill, decode))
    view = FleetView(*sides)
    found = [chosen(view, model=model, turn=turn) for turn in range(9)]
    return {(f.prefill.target.engine, f.decode.target.engine) for f in found if f is not None}


@pytest.mark.parametrize(
    ("prefill", "decode", "want"),
    [
        ([NAMED, UNTOLD], [NAMED, UNTOLD], {(0, 0)}),
        ([NAMED, UNTOLD], [NAMED | {"up": False}, UNTOLD], set()),
        ([NAMED, UNTOLD], [EARLIER | {"up": False}, UNTOLD], set()),
        ([NAMED, EARLIER], [EARLIER, NAMED], {(0, 1)}),
        ([NAMED, OTHER], [EARLIER, OTHER], set()),
        ([NAMED], [EARLIER], {(0, 0)}),
        ([EARLIER], [EARLIER, UNTOLD], {(0, 0)}),
        ([UNTOLD, UNTOLD], [UNTOLD], {(0, 0), (1, 0)}),
        ([NAMED], [UNTOLD], {(0, 0)}),
        ([NAMED, OTHER], [UNTOLD], set()),
        ([UNTOLD], [NAMED, OTHER], set()),
    ],
)
def test_an_engine_gets_no_request_while_others_are_known_better(
    prefill: list[Any], decode: list[Any], want: set[tuple[int, int]]
) -> None:
    assert placed(prefill, decode, "a") == want


def test_a_request_that_names_no_model_goes_to_engines_of_one() -> None:
    assert placed([NAMED, UNTOLD], [UNTOLD, NAMED], "") == {(0, 1)}
    assert placed([NAMED, OTHER], [EARLIER, OTHER], "") == {(1, 1)}
    assert placed([NAMED, OTHER], [UNTOLD], "") == set()
    assert placed([EARLIER], [EARLIER], "") == placed([NAMED], [UNTOLD], "") == {(0, 0)}


def test_a_model_that_an_engine_may_still_tell_of_is_not_missing_for_good() -> None:
    view = FleetView(
        (engine(0, **NAMED), engine(1, **UNTOLD)), (engine(0, **NAMED), engine(1, **UNTOLD))
    )
    assert chosen(view, model="b") is None
    assert "serves the model 'b'" in explain_no_choice(view, ASK._replace(model="b"))


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
    prefill = tuple(engine(index, name=f"p{index}") for index in range(2))
    view = FleetView(prefill, (engine(0), engine(1), engine(2)))
    assert {chosen(view, keep=2, turn=turn).decode.target.engine for turn in range(4)} == {2}
    gone = FleetView(view.prefill, (*view.decode[:2], engine(2, up=False)))
    assert chosen(gone, keep=2).decode.target.engine == 0


# Hand-off, or decode alone ----------------------------------------------------------------------

AUTO, NEVER = (RoutingRules(disaggregate=rule) for rule in (Disaggregate.AUTO, Disaggregate.NEVER))
LINE = LinearTime(0.0, 0.001)
ARRIVAL = {Mode.PULL.value: LinearTime(0.05, 0.0)}


def measured(index: int, waiting: int = 0, name: str = "", **more: Any) -> EngineView:
    """An engine that computes 1,000 tokens a second, and to which KV takes 50 ms."""
    times = PromptTimes(LINE, ARRIVAL, {0: waiting})
    return engine(index, name=name or f"d{index}", times=more.pop("times", times), **more)


def way(view: FleetView, rules: RoutingRules = AUTO, **wish: Any) -> tuple[bool, str, Mode]:
    """Whether a prompt is handed off, why, and the mode."""
    found = chosen(view, rules, **wish)
    assert (found.prefill is not None) is found.handoff.handed_off
    assert (found.mode, found.reason) in MODES
    assert (found.handoff.decision, found.handoff.reason) in HANDOFF_DECISIONS
    return found.handoff.handed_off, found.handoff.reason.value, found.mode


def measured_fleet(on_prefill: int = 0, on_decode: int = 0) -> FleetView:
    return FleetView((measured(0, on_prefill, "p"),), (measured(0, on_decode),))


def test_a_prompt_goes_where_its_first_token_is_expected_sooner() -> None:
    alone, handed_off = (False, "sooner", Mode.PLAIN), (True, "sooner", Mode.PULL)
    assert way(measured_fleet()) == alone, "the hand-off takes 50 ms more"
    assert way(measured_fleet(on_decode=40)) == alone
    assert way(measured_fleet(on_decode=60)) == handed_off
    assert way(measured_fleet(on_prefill=60, on_decode=60)) == alone
    hits = {Role.PREFILL: {Target(0): CacheHit(90, 90.0)}}
    assert way(measured_fleet(), hits=hits) == handed_off
    both = {**hits, Role.DECODE: {Target(0): CacheHit(90, 90.0)}}
    assert way(measured_fleet(), hits=both) == alone
    # A copy that is slow to load is worth less: the prefill engine then takes as long as decode.
    slow = {Role.PREFILL: {Target(0): CacheHit(90, 36.0)}}
    assert way(measured_fleet(), hits=slow) == alone


def test_the_rule_and_the_client_decide_where_they_do() -> None:
    view = measured_fleet()
    assert way(view, RULES) == (True, "rule", Mode.PULL)
    assert way(view, NEVER) == (False, "rule", Mode.PLAIN)
    assert way(view, NEVER, disaggregate=Disaggregate.ALWAYS) == (True, "asked", Mode.PULL)
    assert way(view, RULES, disaggregate=Disaggregate.NEVER) == (False, "asked", Mode.PLAIN)
    assert way(view, RULES, disaggregate=Disaggregate.AUTO) == (False, "sooner", Mode.PLAIN)


def test_what_is_not_known_is_handed_off() -> None:
    known = measured(0)
    for prefill, decode in (
        (engine(0, name="p"), known),
        (measured(0, name="p"), engine(0, name="d")),
        (measured(0, name="p"), measured(0, times=PromptTimes(LINE))),
        (measured(0, name="p"), measured(0, times=PromptTimes(LINE, {"push": LINE}))),
    ):
        assert way(FleetView((prefill,), (decode,))) == (True, "no_data", Mode.PULL)
    # Control: what is left out may be taken from the prefill engine.
    untried = measured(0, times=PromptTimes(None, ARRIVAL))
    assert way(FleetView((measured(0, name="p"),), (untried,)))[1] == "sooner"


def test_without_a_hand_off_decode_is_alone() -> None:
    alone = (False, "no_handoff", Mode.PLAIN)
    up, busy = measured(0, name="p"), measured(0, 5000)
    assert way(FleetView((up,), (busy,))) == (True, "sooner", Mode.PULL), "control"
    gone = measured(0, name="p", up=False)
    for view in (
        FleetView((), (busy,), alone=True),
        FleetView((gone,), (busy,), alone=True),
        FleetView((up,), (busy,), {(0, 0)}),
        FleetView((measured(0, name="p", version="1"),), (measured(0, 5000, version="2"),)),
        FleetView((measured(0, 0, "same"),), (measured(0, 5000, "same"),)),
    ):
        assert way(view) == alone
    failed = FailedTargets(handoff_failed=True)
    found = choose(FleetView((up,), (busy,)), ASK, failed, AUTO)
    assert found is not None and found.prefill is None
    # Control: the rule says always.
    view = FleetView((gone,), (busy,))
    assert choose(view, ASK, FailedTargets(), RULES) is None
    assert view.missing() == [Role.PREFILL]
    assert FleetView((gone,), (busy,), alone=True).missing() == []
    assert FleetView((gone,), (measured(0, up=False),), alone=True).missing() == [Role.DECODE]


def test_sglangs_decode_servers_are_never_alone() -> None:
    sglang = {"kind": EngineKind.SGLANG}
    view = FleetView((measured(0, 9000, "p", **sglang),), (measured(0, **sglang),), alone=True)
    for rules in (AUTO, NEVER):
        assert way(view, rules) == (True, "engine", Mode.BOOTSTRAP)
    gone = FleetView((measured(0, name="p", up=False, **sglang),), view.decode, alone=True)
    assert choose(gone, ASK, FailedTargets(), AUTO) is None
    assert explain_no_choice(gone, ASK) == "no prefill engine is up"


def test_nothing_is_decided_where_nothing_can_be_handed_off() -> None:
    for wish in ({"single": False}, {"decode_only": True}):
        assert chosen(measured_fleet(), AUTO, **wish).handoff is None


@pytest.mark.parametrize("rules", [RULES, AUTO])
@pytest.mark.parametrize("keep", [None, 0, 1])
def test_no_engine_hands_off_to_itself(rules: RoutingRules, keep: int | None) -> None:
    busy = PromptTimes(LINE, ARRIVAL, {0: 5000})
    both = tuple(engine(index, load, times=busy) for index, load in enumerate([5, 9]))
    view = FleetView(both, both)
    for turn in range(4):
        found = chosen(view, rules, turn=turn, keep=keep)
        assert found.prefill is None or found.prefill.target != found.decode.target
        assert keep is None or found.decode.target.engine == keep
    # Control: the engine with the fewest tokens would be both.
    apart = tuple(engine(index, load, name=f"p{index}") for index, load in enumerate([5, 9]))
    pair = chosen(FleetView(apart, both), RULES)
    assert pair.prefill.target == pair.decode.target == Target(0)


QUEUE = st.integers(0, 10**5)


@given(QUEUE, QUEUE, QUEUE, QUEUE)
def test_a_longer_queue_never_leads_there(
    prefill: int, decode: int, tokens: int, more: int
) -> None:
    def handed_off(on_prefill: int, on_decode: int) -> bool:
        return way(measured_fleet(on_prefill, on_decode), tokens=tokens)[0]

    assert handed_off(prefill + more, decode) <= handed_off(prefill, decode)
    assert handed_off(prefill, decode + more) >= handed_off(prefill, decode)


@pytest.mark.parametrize("broken", [frozenset(), frozenset({(0, 0)})])
def test_a_broken_pair_does_not_have_all_engines_compared(
    broken: frozenset[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, pairs_with = [0], EngineView.pairs_with

    def count(*of: Any, **how: Any) -> bool:
        compared[0] += 1
        return pairs_with(*of, **how)

    monkeypatch.setattr(EngineView, "pairs_with", count)
    engines = [EngineView(at, True, version="1") for at in range(64)]
    view = FleetView(tuple(engines), tuple(engines), broken)
    group = best_group(view, engines, engines, turn=1)
    assert group is not None
    assert (len(group.prefill), len(group.decode)) == (64 - len(broken), 64)
    assert compared[0] <= 64
