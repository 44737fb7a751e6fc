"""Prefill on one real engine, decode on another: the tokens of a single engine, and no leaks."""

from __future__ import annotations

import secrets
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.engines.models import BLOCK_SIZE, prompt_tokens
from tests.engines.pd import (
    BLOCKS_EACH,
    DEADLINE_S,
    HANDED_OFF,
    LEASE_S,
    LIMITS,
    Pair,
    assert_quiet,
    decode_config,
    one_clean_error,
    pair,
    prefill,
    prefill_config,
    pull,
    push,
    push_params,
    raw,
    received_bytes,
    refused,
    sent_bytes,
    side_by_side,
    standing_ticket,
)
from tests.engines.ranks import until
from tests.engines.scenario import (
    COUNT,
    CROWD_NEW,
    NEW,
    PROMPT,
    block_bytes,
    crowd,
    expected,
    prompts,
    tokens,
)
from tests.engines.server import Answer, Server, kv_transfer

TRANSPORTS = ("tcp", "nixl")
of_one_transport = pytest.mark.parametrize("llama", ["tcp"], indirect=True, scope="module")
"""For tests of what no transport has a part in."""


@pytest.fixture(scope="module", params=TRANSPORTS)
def llama(request: pytest.FixtureRequest) -> Iterator[Pair]:
    want = expected("llama")
    assert len(set(want.fresh)) == COUNT  # else equality would prove little
    way = {"transport": request.param, **LIMITS}
    sending, receiving = prefill_config(digest="full", **way), decode_config(**way)
    with pair(prefill={"connector": sending}, decode={"connector": receiving}) as servers:
        yield servers


def pushing(offer: str) -> Callable[[Server, Server, list[int], int], Answer]:
    return partial(push, offer=offer)


class TestLlama:
    """One pair of engines, one life: the order of these tests matters."""

    def test_pull(self, llama: Pair, request: pytest.FixtureRequest) -> None:
        p, d = llama
        assert tokens([pull(p, d, prompt, NEW) for prompt in prompts()]) == expected("llama").fresh
        for transport in TRANSPORTS:
            used = transport == request.node.callspec.params["llama"]
            name = "vllm:kvconnect_handoff_transport_{}"
            assert d.metric(name.format("peers"), transport=transport) == used
            assert (d.metric(name.format("bytes_per_second"), transport=transport) > 0) == used
        nbytes = COUNT * BLOCKS_EACH * block_bytes("llama")
        assert_quiet(p, d)
        assert sent_bytes(p) == received_bytes(d) == nbytes
        assert d.metric("vllm:kvconnect_handoff_received_requests_total", outcome="done") == COUNT
        assert p.metric("vllm:kvconnect_handoff_sent_requests_total", outcome="done") == COUNT

    def test_push(self, llama: Pair) -> None:
        p, d = llama
        for server in llama:
            server.post("/reset_prefix_cache")
        offer = standing_ticket(p)
        before = received_bytes(d)
        answers = [push(p, d, prompt, NEW, offer) for prompt in prompts()]
        assert tokens(answers) == expected("llama").fresh
        assert_quiet(p, d)
        assert received_bytes(d) - before == COUNT * BLOCKS_EACH * block_bytes("llama")
        operations = d.metric("vllm:kvconnect_transfer_operations_total", transfer_type="RECV")
        assert operations > 2 * COUNT  # pages came layer by layer

    def test_a_prefix_the_decode_engine_has_is_not_sent(self, llama: Pair) -> None:
        p, d = llama
        prompt = prompt_tokens(PROMPT, start=20_000)
        first = pull(p, d, prompt, NEW)
        assert_quiet(p, d)
        before = received_bytes(d)
        again = pull(p, d, prompt, NEW)
        assert again.tokens == first.tokens
        assert_quiet(p, d)
        local = HANDED_OFF // BLOCK_SIZE  # full blocks in the device's prefix cache
        assert received_bytes(d) - before == (BLOCKS_EACH - local) * block_bytes("llama")

    def test_prompts_about_a_block_long(self, llama: Pair) -> None:
        """One token, of which nothing is handed off; less than a block, a whole one, and more."""
        p, d = llama
        lengths = (1, 9, BLOCK_SIZE, BLOCK_SIZE + 1, BLOCK_SIZE + 2)
        asked = [prompt_tokens(length, start=40_000 + 100 * length) for length in lengths]
        want = [p.complete(prompt, NEW).tokens for prompt in asked]  # no hand-off is asked for
        assert len(set(want)) == len(want)
        for hand_off in (pull, pushing(standing_ticket(p))):
            d.post("/reset_prefix_cache")
            before = received_bytes(d)
            assert tokens([hand_off(p, d, prompt, NEW) for prompt in asked]) == want
            assert_quiet(p, d)
            assert received_bytes(d) - before == (0 + 1 + 1 + 1 + 2) * block_bytes("llama")

    @of_one_transport
    @pytest.mark.parametrize("way", ["pull", "push"])
    def test_what_only_one_side_has_computed(self, llama: Pair, way: str) -> None:
        """A full hit on decode but not on prefill, a partial one, and one on prefill alone."""
        p, d = llama
        for server in llama:
            server.post("/reset_prefix_cache")
        offer = standing_ticket(p)
        long = prompt_tokens(PROMPT + 5 * BLOCK_SIZE, start=25_000)
        full, block = PROMPT // BLOCK_SIZE, block_bytes("llama")

        def handed_off(prompt: list[int]) -> tuple[tuple[int, ...], float]:
            before = received_bytes(d)
            hand_off = pull if way == "pull" else pushing(offer)
            found = hand_off(p, d, prompt, NEW).tokens
            assert_quiet(p, d)
            return found, (received_bytes(d) - before) / block

        want = d.complete(long[:PROMPT], NEW).tokens
        assert handed_off(long[:PROMPT]) == (want, BLOCKS_EACH - full)
        found, blocks = handed_off(long)
        assert blocks == BLOCKS_EACH + 5 - full
        assert p.complete(long, NEW).tokens == found
        d.post("/reset_prefix_cache")
        assert handed_off(long) == (found, BLOCKS_EACH + 5)

    def test_many_at_once(self, llama: Pair) -> None:
        p, d = llama
        offer = standing_ticket(p)
        want = expected("llama").fresh

        def one(number: int) -> tuple[int, ...]:
            prompt = prompts()[number % COUNT]
            if number % 2:
                return push(p, d, prompt, NEW, offer).tokens
            return pull(p, d, prompt, NEW).tokens

        # A cache holds four requests. Four pulls whose blocks wait on one side, and four pushes
        # that hold the other side's, would wait for one another until a deadline; seven cannot.
        with ThreadPoolExecutor(7) as pool:
            found = list(pool.map(one, range(4 * COUNT)))
        assert found == [want[number % COUNT] for number in range(4 * COUNT)]
        assert_quiet(p, d)

    @of_one_transport
    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"kvconnect_ticket": None}, "ticket"),
            ({"kvconnect_ticket": "x" * 9000}, "ticket"),
            ({"kvconnect_ticket": 7}, "ticket"),
            ({"transfer_id": "../../etc"}, "params"),
            ({"do_remote_decode": True}, "params"),
        ],
    )
    def test_bad_parameters_are_one_clean_error(
        self, llama: Pair, change: dict[str, Any], field: str
    ) -> None:
        """Also those of a client that brings its own: they are never an address."""
        p, d = llama
        before = refused(d, field)
        params = {**push_params(secrets.token_hex(16), standing_ticket(p)), **change}
        invented = {"remote_host": "192.0.2.1", "remote_port": 1, "tp_size": 10**9}
        with one_clean_error():
            d.complete(prompts()[0], NEW, kv_transfer_params={**params, **invented})
        assert refused(d, field) == before + 1
        assert_quiet(p, d)

    @of_one_transport
    def test_tickets_are_for_one_prompt_once(self, llama: Pair) -> None:
        """When a request fails, vLLM tells the other side to let its blocks go; so each try here
        has a ticket of its own."""
        p, d = llama
        prompt = prompts()[0]
        before, others = refused(d, "ticket"), refused(p, "prompt")
        d.post("/reset_prefix_cache")
        params = prefill(p, prompt)
        text = params["kvconnect_ticket"]
        changed = text[:40] + ("A" if text[40] != "A" else "B") + text[41:]
        with one_clean_error():
            d.complete(prompt, NEW, kv_transfer_params={**params, "kvconnect_ticket": changed})
        for other in (prompt[:-5], [*prompt[:-1], 7]):  # shorter; as long
            with one_clean_error():
                d.complete(other, NEW, kv_transfer_params=prefill(p, prompt))
        with one_clean_error():
            d.complete(prompt, NEW, kv_transfer_params=prefill(p, prompt), cache_salt="other")
        assert refused(d, "ticket") == before + 1
        params = prefill(p, prompt)
        answer = d.complete(prompt, NEW, kv_transfer_params=params)
        assert answer.tokens == expected("llama").fresh[0]
        d.post("/reset_prefix_cache")
        with one_clean_error():  # a replay
            d.complete(prompt, NEW, kv_transfer_params=params)
        assert_quiet(p, d)
        assert refused(p, "prompt") == others + 3

    @of_one_transport
    def test_several_prompts_in_one_request(self, llama: Pair) -> None:
        """They share one transfer id, or one ticket, which is for one prompt. Decode computes the
        other one."""
        p, d = llama
        twice, both = [prompts()[0]] * 2, [prompts()[0], prompts()[1]]
        wanted = {"do_remote_decode": True, "transfer_id": secrets.token_hex(16)}
        raw(p, twice, 1, kv_transfer_params=wanted)  # type: ignore[arg-type]
        assert refused(p, "params") == 1  # which of them a reader gets must not be a matter of luck
        params = prefill(p, prompts()[0])
        reply = raw(d, both, NEW, kv_transfer_params=params)  # type: ignore[arg-type]
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        found = [tuple(choice["token_ids"]) for choice in choices]
        assert found == list(expected("llama").fresh[:2])
        self.alive(llama)

    @of_one_transport
    def test_a_prefill_that_nobody_fetches_is_given_back(self, llama: Pair) -> None:
        p, d = llama
        before = p.metric("vllm:kvconnect_handoff_expired_leases_total")
        params = prefill(p, prompts()[2])
        assert p.metric("vllm:kv_cache_usage_perc") > 0
        assert_quiet(p)
        assert p.metric("vllm:kvconnect_handoff_expired_leases_total") == before + 1
        with one_clean_error():
            d.complete(prompts()[2], NEW, kv_transfer_params=params)
        assert_quiet(p, d)

    @of_one_transport
    def test_a_prefill_that_never_comes_is_an_error_in_time(self, llama: Pair) -> None:
        p, d = llama
        started = time.monotonic()
        with one_clean_error():
            d.complete(
                prompts()[3],
                NEW,
                kv_transfer_params=push_params(secrets.token_hex(16), standing_ticket(p)),
            )
        assert time.monotonic() - started < 4 * DEADLINE_S
        self.alive(llama)

    @of_one_transport
    def test_several_answers_to_one_prompt(self, llama: Pair) -> None:
        """Each is a request of its own in the engines; a proxy passes the ticket on as it is."""
        p, d = llama
        d.post("/reset_prefix_cache")
        prompt, before = prompts()[0], received_bytes(d)
        twice = {"n": 2, "temperature": 1.0, "top_k": 1}
        wanted = {"do_remote_decode": True}
        params = raw(p, prompt, 1, kv_transfer_params=wanted, **twice)["kv_transfer_params"]
        answer = raw(d, prompt, NEW, kv_transfer_params=params, **twice)
        found = [tuple(choice["token_ids"]) for choice in answer["choices"]]
        assert found == [expected("llama").fresh[0]] * 2
        assert received_bytes(d) - before == BLOCKS_EACH * block_bytes("llama")
        self.alive(llama)

    @of_one_transport
    @pytest.mark.parametrize("mode", ["keep", "wait"])
    def test_a_pause_ends_though_hand_offs_wait_for_the_engine(
        self, llama: Pair, mode: str
    ) -> None:
        p, d = llama
        for server in llama:
            server.post("/reset_prefix_cache")
        offer, ticket = standing_ticket(p), prefill(p, prompts()[0])
        transfer = secrets.token_hex(16)
        d.post(f"/pause?mode={mode}")
        with ThreadPoolExecutor(3) as pool:
            pulled = pool.submit(d.complete, prompts()[0], NEW, kv_transfer_params=ticket)
            params = push_params(transfer, offer)
            pushed = pool.submit(d.complete, prompts()[1], NEW, kv_transfer_params=params)
            deadline = time.monotonic() + 60
            while d.metric("vllm:num_requests_waiting") < 2:  # by the step that each of them costs
                assert time.monotonic() < deadline
                time.sleep(0.05)
            d.post(f"/pause?mode={mode}")
            p.post(f"/pause?mode={mode}")  # waits for the lease, which is not renewed for ever
            prefilling = pool.submit(prefill, p, prompts()[1], transfer)
            for _ in range(20):  # the request comes meanwhile
                p.post(f"/pause?mode={mode}")
            for server in llama:
                server.post("/resume")
            assert pushed.result().tokens == expected("llama").fresh[1]
            with one_clean_error():
                pulled.result()
            prefilling.result()
        self.alive(llama)

    @of_one_transport
    def test_prompt_logprobs_are_computed_here(self, llama: Pair) -> None:
        """They need the whole prompt's output, so the hand-off is declined."""
        p, d = llama
        before = received_bytes(d)
        answer = d.complete(
            prompts()[0], NEW, kv_transfer_params=prefill(p, prompts()[0]), prompt_logprobs=1
        )
        assert answer.tokens == expected("llama").fresh[0]
        transfer = secrets.token_hex(16)
        answer = d.complete(
            prompts()[1],
            NEW,
            kv_transfer_params=push_params(transfer, standing_ticket(p)),
            prompt_logprobs=1,
        )
        assert answer.tokens == expected("llama").fresh[1]
        assert received_bytes(d) == before
        self.alive(llama)

    @of_one_transport
    def test_a_rejected_request_lets_the_other_side_go(self, llama: Pair) -> None:
        p, d = llama
        expired = p.metric("vllm:kvconnect_handoff_expired_leases_total")
        params = prefill(p, prompts()[0])
        with pytest.raises(urllib.error.HTTPError) as failed:
            d.complete(prompts()[0], 100_000, kv_transfer_params=params)
        with failed.value as error:
            assert error.code == 400
        assert_quiet(p, d)
        assert p.metric("vllm:kvconnect_handoff_expired_leases_total") == expired

    def test_clients_that_hang_up(self, llama: Pair) -> None:
        p, d = llama
        d.post("/reset_prefix_cache")
        offer = standing_ticket(p)
        for number, prompt in enumerate(prompts()):
            transfer = secrets.token_hex(16)
            prefilling = threading.Thread(target=prefill, args=(p, prompt, transfer))
            if number % 2:
                prefilling.start()
            d.abort(prompt, number % 3, kv_transfer_params=push_params(transfer, offer))
            if number % 2:
                prefilling.join()
        for number, prompt in enumerate(prompts()):
            wanted = {"do_remote_decode": True, "transfer_id": secrets.token_hex(16)}
            p.abort(prompt, number % 2, kv_transfer_params=wanted)
        self.alive(llama)

    def test_a_decode_engine_that_is_full_gets_there(self, llama: Pair) -> None:
        """Three of four requests fit, until their answers have grown: then one is preempted. The
        fourth waits in the queue, while the other side holds its blocks."""
        p, d = llama
        many = [prompt_tokens(500, start=700 * n + 31_000) for n in range(4)]  # 16 of 63 blocks
        want = [p.complete(prompt, 400).tokens for prompt in many]  # no hand-off is asked for
        p.post("/reset_prefix_cache")
        preempted = d.metric("vllm:num_preemptions_total")
        expired = p.metric("vllm:kvconnect_handoff_expired_leases_total")
        wanted = received_bytes(d) + 3 * 16 * block_bytes("llama")
        with ThreadPoolExecutor(4) as pool:

            def decode(prompt: list[int], params: dict[str, Any]) -> Future[Answer]:
                return pool.submit(d.complete, prompt, 400, kv_transfer_params=params)

            params = list(pool.map(lambda prompt: prefill(p, prompt), many[:3]))
            asked = [decode(*each) for each in zip(many[:3], params, strict=True)]
            until(lambda: received_bytes(d) == wanted, "three have their blocks")
            asked.append(decode(many[3], prefill(p, many[3])))
            until(lambda: d.metric("vllm:num_requests_waiting") > 0, "the fourth one waits")
            assert tokens([future.result() for future in asked]) == want
        assert d.metric("vllm:num_preemptions_total") > preempted
        assert p.metric("vllm:kvconnect_handoff_expired_leases_total") == expired
        self.alive(llama)

    def test_a_decode_engine_that_dies(self, llama: Pair) -> None:
        p, d = llama
        offer = standing_ticket(p)
        transfer = secrets.token_hex(16)
        with ThreadPoolExecutor(2) as pool:
            dying = pool.submit(
                d.complete, prompts()[4], NEW, kv_transfer_params=push_params(transfer, offer)
            )
            time.sleep(0.5)
            d.kill()
            prefill(p, prompts()[4], transfer)
            with pytest.raises(OSError):
                dying.result()
        time.sleep(LEASE_S)
        assert_quiet(p)
        d.restart()
        self.alive(llama)

    def test_a_prefill_engine_that_dies_and_comes_back(self, llama: Pair) -> None:
        p, d = llama
        if d.process.poll() is not None:
            d.__enter__()
        offer, params = standing_ticket(p), prefill(p, prompts()[5])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(
                d.complete,
                prompts()[6],
                NEW,
                kv_transfer_params=push_params(secrets.token_hex(16), offer),
            )
            time.sleep(0.5)
            p.kill()
            with one_clean_error():
                waiting.result()
        with one_clean_error():
            d.complete(prompts()[5], NEW, kv_transfer_params=params)
        with p:
            with one_clean_error():  # the old incarnation's
                d.complete(prompts()[5], NEW, kv_transfer_params=params)
            self.alive(llama)

    def alive(self, llama: Pair) -> None:
        """Everything still works, and nothing is held."""
        p, d = llama
        assert_quiet(p, d)
        d.post("/reset_prefix_cache")
        assert pull(p, d, prompts()[7], NEW).tokens == expected("llama").fresh[7]
        assert_quiet(p, d)


@pytest.mark.parametrize("model", ["mistral", "gemma3", "lfm2"])
def test_other_attention_kinds(model: str) -> None:
    """Windows, several groups and states; the host tier beside it on both sides."""
    # vLLM's convolutions round otherwise for one token than for many, so later tokens may differ.
    new = 1 if model == "lfm2" else NEW
    want = [answer[:new] for answer in expected(model).fresh]
    sending = prefill_config(digest="full", host_bytes="64MiB")
    receiving = decode_config(digest="full", host_bytes="64MiB")
    with pair(model, {"connector": sending}, {"connector": receiving}) as (p, d):
        offer = standing_ticket(p)
        assert tokens([pull(p, d, prompt, new) for prompt in prompts()[:4]]) == want[:4]
        pushed = [push(p, d, prompt, new, offer) for prompt in prompts()[4:]]
        assert tokens(pushed) == want[4:]
        assert_quiet(p, d)
        assert received_bytes(d) == sent_bytes(p) > 0
        for server in (p, d):  # what was computed, and what came, is in the host tier as well
            assert server.metric("vllm:kvconnect_host_blocks_used") > 0


def test_latent_attention() -> None:
    """In bfloat16 the shapes of the computation show. With one token more than whole blocks, an
    engine that has the blocks computes what the decode engine of a hand-off does."""
    asked = prompts(length=PROMPT // BLOCK_SIZE * BLOCK_SIZE + 1)
    with Server("deepseek_v2", blocks=256) as single:
        for prompt in asked:
            single.complete(prompt, NEW)
        want = [single.complete(prompt, NEW).tokens for prompt in asked]
    with pair("deepseek_v2") as (p, d):
        offer = standing_ticket(p)
        assert tokens([pull(p, d, prompt, NEW) for prompt in asked[:4]]) == want[:4]
        assert tokens([push(p, d, prompt, NEW, offer) for prompt in asked[4:]]) == want[4:]
        assert_quiet(p, d)
        assert received_bytes(d) == sent_bytes(p) > 0


def test_a_failed_hand_off_is_recomputed_where_that_is_the_policy() -> None:
    """Same bad tickets, one answer each; with one KV group, and with several."""
    connector = kv_transfer(role="kv_both", host_bytes="off", **LIMITS)
    engines = [Server(model, connector) for model in ("llama", "gemma3")]
    want = [expected(engine.model).fresh for engine in engines]

    def recomputes(d: Server, right: list[tuple[int, ...]]) -> None:
        params = push_params(secrets.token_hex(16), "forged")
        answer = d.complete(prompts()[0], NEW, kv_transfer_params=params)
        assert answer.tokens == right[0]
        # Its own standing ticket: nobody prefills.
        lost = push_params(secrets.token_hex(16), standing_ticket(d))
        answer = d.complete(prompts()[1], NEW, kv_transfer_params=lost)
        assert answer.tokens == right[1]
        assert d.metric("vllm:kvconnect_handoff_failures_total", cause="refused") == 1
        late = [
            d.metric("vllm:kvconnect_handoff_failures_total", cause=cause)
            for cause in ("gone", "deadline")  # whichever side gives up first
        ]
        assert sum(late) == 1
        assert_quiet(d)

    with side_by_side(*engines), ThreadPoolExecutor(len(engines)) as pool:  # each waits for long
        list(pool.map(recomputes, engines, want))


def test_both_roles_in_one_engine_with_a_host_tier() -> None:
    """Blocks that come back from the host tier are handed off; so are those of a decode engine
    that was preempted."""
    want = expected("llama")
    some = slice(5, 21)  # of a crowd: 60 of 63 blocks before they grow
    connector = kv_transfer(role="kv_both", host_bytes="64MiB", digest="full", **LIMITS)
    with pair(prefill={"connector": connector}, decode={"connector": connector}) as (p, d):
        for prompt in prompts():  # more than fit: the first ones go to the host tier
            p.complete(prompt, 1)
        p.settle()
        loaded = p.metric("vllm:kvconnect_hit_tokens_total", tier="host")
        found = [pull(p, d, prompt, NEW) for prompt in prompts()]
        assert tokens(found) == want.fresh
        assert p.metric("vllm:kvconnect_hit_tokens_total", tier="host") > loaded
        preempted = d.metric("vllm:num_preemptions_total")
        crowded = crowd()[some]
        with ThreadPoolExecutor(16) as pool:
            params = list(pool.map(lambda prompt: prefill(p, prompt), crowded))
            answers = list(
                pool.map(
                    lambda n: d.complete(crowded[n], CROWD_NEW, kv_transfer_params=params[n]),
                    range(16),
                )
            )
        assert tokens(answers) == want.crowd[some]
        assert d.metric("vllm:num_preemptions_total") > preempted
        assert_quiet(p, d)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("digest", ["off", "full"])
def test_negative_control_swapped_pages_change_tokens_or_are_caught(
    digest: str, transport: str
) -> None:
    """Without digests two swapped pages give other tokens, so equality of tokens proves
    something; with digests they are found."""
    way = {"digest": digest, "transport": transport}
    sending = prefill_config("SwapsPages", "tests.engines.faulty", **way)
    receiving = decode_config(**way)
    with pair(prefill={"connector": sending}, decode={"connector": receiving}) as (p, d):
        if digest == "off":
            found = tokens([pull(p, d, prompt, NEW) for prompt in prompts()])
            pairs = zip(found, expected("llama").fresh, strict=True)
            assert sum(a != b for a, b in pairs) >= COUNT / 2
        else:
            for prompt in prompts()[:2]:
                with one_clean_error():
                    pull(p, d, prompt, NEW)
            assert d.metric("vllm:kvconnect_handoff_failures_total", cause="digest") == 2
            assert d.metric("vllm:kvconnect_handoff_digest_failed_blocks_total") > 0
        assert_quiet(p, d)


def test_auto_measures_both_transports_and_takes_the_faster() -> None:
    sending, receiving = prefill_config(transport="auto"), decode_config(transport="auto")
    with pair(prefill={"connector": sending}, decode={"connector": receiving}) as (p, d):
        for _ in range(2):  # before the measurement is over, and after it
            found = tokens([pull(p, d, prompt, NEW) for prompt in prompts()])
            assert found == expected("llama").fresh
            p.post("/reset_prefix_cache")
            d.post("/reset_prefix_cache")
        name = "vllm:kvconnect_handoff_transport_{}"
        rates = {t: d.metric(name.format("bytes_per_second"), transport=t) for t in TRANSPORTS}
        peers = {t: d.metric(name.format("peers"), transport=t) for t in TRANSPORTS}
        assert min(rates.values()) > 0
        assert peers == {t: float(rates[t] == max(rates.values())) for t in TRANSPORTS}
        assert_quiet(p, d)


def test_a_connection_under_the_floor_is_refused() -> None:
    receiving = decode_config(min_rate="100TB", **LIMITS)
    with pair(decode={"connector": receiving}) as (p, d):
        with one_clean_error():
            pull(p, d, prompts()[0], NEW)
        assert refused(d, "rate") > 0
        assert_quiet(p, d)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "transport"), [(2, 1, "tcp"), (1, 2, "tcp"), (2, 1, "nixl")]
)
def test_other_tensor_parallelism(prefill_tp: int, decode_tp: int, transport: str) -> None:
    want = expected("llama")
    sending, receiving = prefill_config(transport=transport), decode_config(transport=transport)
    prefill = {"tp": prefill_tp, "connector": sending}
    decode = {"tp": decode_tp, "connector": receiving}
    with pair(prefill=prefill, decode=decode) as (p, d):
        offer = standing_ticket(p)
        assert tokens([pull(p, d, prompt, NEW) for prompt in prompts()[:4]]) == want.fresh[:4]
        pushed = [push(p, d, prompt, NEW, offer) for prompt in prompts()[4:]]
        assert tokens(pushed) == want.fresh[4:]
        assert_quiet(p, d)
        assert received_bytes(d) == sent_bytes(p) == COUNT * BLOCKS_EACH * block_bytes("llama")
