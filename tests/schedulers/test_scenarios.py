"""Situations that random runs meet rarely, with vLLM's schedulers and a model of fingerprints.

Costs are counted in lines of Python that run, never in seconds.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import pytest
from vllm.lora.request import LoRARequest

from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.offload.copy_executor import FinishedCopy
from kvconnect.offload.eviction import s3fifo
from kvconnect.offload.host_tier import HostTier
from kvconnect.tiers import search
from kvconnect.types import TransferType
from tests.schedulers.checks import WrongStep, WrongTokens, check_at_rest, watch_cost_model
from tests.schedulers.engine import Engine, Prompt
from tests.schedulers.fleets import Pair
from tests.schedulers.shapes import EngineShape
from tests.schedulers.workload import running, tokens

BLOCK = 16  # tokens
ROOMY = 400  # device blocks, so many that no store has to wait for another, however slow copies are


@contextmanager
def made(seed: int = 1, **shape: Any) -> Iterator[Engine]:
    engine = Engine(EngineShape(**shape), Random(seed))
    with running(engine):
        yield engine


def disk(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of an engine with a disk."""
    there = {"path": str(folder), "capacity": "64MiB"}
    return {"disk": there, "load_when": "always", "wait_s": 30.0, "deadline_s": 60.0, **settings}


def lines_of(run: Callable[[], object], *folders: str) -> int:
    """Return how many lines of KVConnect's Python this thread runs in files of these folders."""
    count = 0

    def local(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def called(frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        return local if any(f"/kvconnect/{folder}" in path for folder in folders) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


# Right tokens -----------------------------------------------------------------------------------


def test_a_load_that_fails_after_a_reset_stores_nothing_of_former_weights() -> None:
    shared = tokens(Random(2), 6 * BLOCK)
    with made(settings={"sync_load_bytes": 0, "digest": "full"}) as engine:
        engine.run("first", Prompt(shared, new=1))
        engine.drain()
        assert engine.forget_device()
        engine.faults.copy_gate.close()
        engine.add("loads", Prompt([*shared, *tokens(Random(3), 40)], new=1))
        engine.step()
        hashes = engine.scheduler.requests["loads"].block_hashes
        slot = engine.connector.scheduler.plan.index.slot_of(0, hashes[3])
        assert slot is not None
        engine.workers[0].worker.tier.store.view(slot)[3] ^= 0x7F  # the blocks before it are valid
        # The caller goes on although vLLM says that blocks are in use.
        assert engine.reset("new") is False
        engine.change_weights("new")
        engine.model.exempt.add("loads")
        engine.faults.copy_gate.open()
        engine.drain()
        assert engine.forget_device()
        engine.run("new", Prompt([*shared, 5], new=1))
        engine.drain()
        assert engine.counts["failed_blocks", "digest"] >= 1
        check_at_rest(engine)


@pytest.mark.parametrize("shared_by", [1, 2])
@pytest.mark.parametrize("ends", ["in the step", "after it"])
def test_what_a_load_inside_a_step_did_not_fill_is_found_by_nobody(
    ends: str, shared_by: int
) -> None:
    """vLLM names its blocks before they are filled, and has the request compute those that were
    not. This one ends before."""
    shared = tokens(Random(2), 6 * BLOCK)
    settings = {"sync_load_bytes": 1 << 30, "digest": "full"}
    with made(blocks=ROOMY, settings=settings) as engine:
        engine.run("first", Prompt(shared, new=1))
        engine.drain()
        assert engine.forget_device()
        engine.add("loads", Prompt([*shared, *tokens(Random(3), 40)], new=4))
        if shared_by == 2:
            engine.add("second", Prompt([*shared, *tokens(Random(4), 40)], new=4))
        hashes = engine.scheduler.requests["loads"].block_hashes
        index = engine.connector.scheduler.plan.index
        slot = index.slot_of(0, hashes[3])
        assert slot is not None
        engine.workers[0].worker.tier.store.view(slot)[3] ^= 0x7F  # the blocks before it are valid
        if ends == "in the step":
            engine.to_abort.append("loads")
        engine.step()
        if ends == "after it":
            engine.abort("loads")
        engine.drain()
        engine.run("again", Prompt([*shared, 5], new=1))
        engine.drain()
        assert engine.forget_device()
        engine.run("from the host", Prompt([*shared, 6], new=1))
        engine.drain()
        check_at_rest(engine)
        assert 1 <= engine.counts["failed_blocks", "digest"] <= shared_by


@pytest.mark.parametrize("together", [True, False])
def test_a_prefix_is_loaded_once_for_all_that_arrive_together(together: bool) -> None:
    """Control: without a name for what is loaded, each one loads it."""
    shared, others = tokens(Random(2), 6 * BLOCK), 8
    with made(blocks=ROOMY, settings={"sync_load_bytes": 0}) as engine:
        engine.run("first", Prompt(shared, new=1))
        engine.drain()
        assert engine.forget_device()
        plan, pool = engine.connector.scheduler.plan, engine.scheduler.kv_cache_manager.block_pool
        plan._finds_loaded = together
        free = pool.get_num_free_blocks()
        engine.faults.copy_gate.close()
        for number in range(others):
            own = tokens(Random(3 + number), 20)
            engine.add(f"shares-{number}", Prompt([*shared, *own], new=2))
        engine.step()
        loads = 1 if together else others
        assert free - pool.get_num_free_blocks() == 6 * loads
        engine.faults.copy_gate.open()
        engine.drain()
        assert engine.counts["hit_tokens", "host"] == 6 * BLOCK * loads
        check_at_rest(engine)


@pytest.mark.parametrize("moved", [False, True])
def test_a_state_is_stored_only_from_the_block_that_holds_it(moved: bool) -> None:
    """vLLM may free a block that it offers before it builds the step."""
    shared = tokens(Random(2), 6 * BLOCK)
    with made(kind="states", blocks=ROOMY) as engine:
        manager = engine.scheduler.kv_cache_manager
        take, other = manager.take_boundary_state_offloads, ROOMY - 1

        def offered() -> dict[str, list[tuple[int, int, int]]]:
            return {
                req_id: [(group, other if moved else block, end) for group, block, end in states]
                for req_id, states in take().items()
            }

        with patch.object(manager, "take_boundary_state_offloads", offered):
            engine.run("first", Prompt([*shared, 5], new=1))
            engine.drain()
        assert engine.forget_device()
        engine.run("again", Prompt([*shared, 6], new=1))
        engine.drain()
        found = engine.counts.get(("prompt_tokens", "host"), 0)
        assert found == (0 if moved else 6 * BLOCK)
        check_at_rest(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("settings", [{}, {"spill": "reused"}])
def test_weights_that_change_after_a_reset_neither_load_nor_write_former_names(
    overlap: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A trainer pauses, which resets; the workers find the former weights; it updates these, and
    no step runs before the next requests."""
    prompt, other = (Prompt(tokens(Random(n), 6 * BLOCK + 1), new=1) for n in (2, 3))
    shape = {"blocks": ROOMY, "overlap": overlap, "settings": disk(tmp_path, **settings)}
    with made(**shape) as engine:
        for number in range(3):  # with "reused", what is loaded is written
            engine.run(f"before-{number}", prompt)
            engine.drain()
            assert engine.forget_device()
        assert engine.reset()
        engine.drain()  # the workers have looked
        engine.change_weights("new")
        engine.add("loads", prompt)
        engine.add("stores", other)
        engine.drain()
        for number in range(2):
            assert engine.forget_device()
            engine.run(f"again-{number}", other)
            engine.drain()
        check_at_rest(engine)
        assert not engine.counts.get(("prompt_tokens", "disk"))
    with made(**shape) as engine:  # another engine, with the weights of before
        engine.run("found", prompt)
        engine.drain()
        assert engine.counts["prompt_tokens", "disk"] == 6 * BLOCK
        engine.run("not-found", other)
        engine.drain()
        assert engine.counts["prompt_tokens", "disk"] == 6 * BLOCK


def test_a_pause_that_cannot_reset_harms_nobody() -> None:
    """vLLM refuses to reset while a load is under way. Its request goes on after the pause."""
    prompt = Prompt(tokens(Random(2), 130), new=3)
    with made(settings={"sync_load_bytes": 0}) as engine:
        engine.run("first", prompt)
        engine.drain()
        assert engine.forget_device()
        engine.add("loads", prompt)
        engine.step()
        engine.pause()
        engine.drain()
        assert engine.reset("new", running=True) is False
        engine.resume()
        engine.step_until(lambda: engine.answers["loads"].reason is not None)
        engine.drain()
        check_at_rest(engine)
        assert engine.counts["prompt_tokens", "host"] > 0


@pytest.mark.parametrize("push", [False, True])
def test_an_adapter_whose_weights_nobody_knows_is_not_handed_off(
    push: bool, tmp_path: Path
) -> None:
    """As one that a trainer sends as tensors: each engine computes the prompt with its own."""
    unknown = LoRARequest("poet", 1, str(tmp_path / "nowhere"))
    prompt = Prompt(tokens(Random(2), 4 * BLOCK + 1), new=3, adapter=unknown)
    with made(blocks=ROOMY) as prefill, made(2, blocks=ROOMY) as decode:
        pair = Pair(prefill, decode, Random(4))
        pair.ask_standing_ticket()
        pair.start(prompt, push)
        pair.drain()
        engines = [prefill, decode] if push else [prefill]  # by pull, there is no ticket
        for engine in engines:
            assert engine.counts["handoff_refused", "params"] == 1
        assert not decode.counts.get(("prompt_tokens", "handoff"))
        for engine in (prefill, decode):
            assert {str(answer.reason) for answer in engine.answers.values()} <= {"length"}
            check_at_rest(engine)


@pytest.mark.parametrize("params", ["text", 7, ["list"]])
def test_parameters_that_are_no_object_do_not_end_the_core(params: object) -> None:
    with made() as engine:
        engine.add("odd", Prompt([1, 2, 3], new=1, params={"kvconnect": {}}))
        request = engine.scheduler.requests["odd"]
        request.kv_transfer_params = params
        engine.connector.on_new_request(request)
        request.kv_transfer_params = None  # vLLM itself wants an object or nothing
        engine.drain()


def test_ranks_with_the_same_kv_keep_it_once(tmp_path: Path) -> None:
    prompt = Prompt(tokens(Random(2), 6 * BLOCK + 1), new=1)
    with made(tp=4, blocks=ROOMY, slots=20, settings=disk(tmp_path)) as engine:
        halves = [worker.worker for worker in engine.workers]
        copied = [copies_of(half.tier) for half in halves]
        for req_id in ("first", "second"):
            engine.run(req_id, prompt)
            engine.drain()
            assert engine.forget_device()
        check_at_rest(engine)
        assert [half.tier.store.num_slots for half in halves] == [20] * 4
        assert [half._tiers is not None for half in halves] == [True, False] * 2
        block = engine.shape.slot_bytes
        assert engine.connector.scheduler._slot_bytes == 2 * block
    stored, loaded = TransferType.GPU_TO_CPU, TransferType.CPU_TO_GPU
    assert [moved[stored] for moved in copied] == [6 * block, 0, 6 * block, 0]
    assert [moved[loaded] for moved in copied] == [6 * block] * 4


def test_of_ranks_with_the_same_kv_those_that_store_wait_for_a_disk(tmp_path: Path) -> None:
    with made(tp=4, blocks=ROOMY, slots=20, settings=disk(tmp_path)) as engine:
        halves = [worker.worker for worker in engine.workers]
        news = [Mock(wraps=half._news) for half in halves]
        for half, each in zip(halves, news, strict=True):
            half._news = each
        engine.faults.store_gate.close()
        engine.add("r", Prompt(tokens(Random(3), 6 * BLOCK + 1), new=1))
        for _ in range(4):
            engine.step()
        engine.faults.store_gate.open()
        engine.drain()
    assert [each.wait.called for each in news] == [True, False] * 2


def copies_of(tier: HostTier) -> Counter[TransferType]:
    """Count the bytes that a tier copies from now on."""
    counted, poll = Counter[TransferType](), tier.poll

    def count() -> list[FinishedCopy]:
        done = poll()
        for each in done:
            counted[each.kind] += each.nbytes
        return done

    tier.poll = count  # type: ignore[method-assign]
    return counted


# What is learned of steps -----------------------------------------------------------------------


def test_steps_without_tokens_are_not_taken_for_others(tmp_path: Path) -> None:
    prompts = [Prompt(tokens(Random(n), 100), new=4) for n in range(4)]
    with made(settings=disk(tmp_path, load_when="faster")) as engine:
        tiers = vars(engine.connector.scheduler.tiers)
        (model,) = (value for value in tiers.values() if hasattr(value, "prefilled"))
        with patch.object(model, "prefilled", Mock(wraps=model.prefilled)) as learned:
            for number, prompt in enumerate(prompts):
                engine.faults.store_gate.close()  # the next request waits for its look-up
                engine.add(f"r{number}", prompt)
                for _ in range(4):
                    engine.step()
                engine.faults.store_gate.open()
                engine.drain()
        assert learned.call_count > 0
        # Control: the time of another step is seen.
        watch_cost_model(engine.connector.scheduler, [7])
        with pytest.raises(WrongStep):
            model.prefilled(8, 0.1, 0.0)


# Features that stay on --------------------------------------------------------------------------


def test_a_window_does_not_push_full_attention_out_of_a_look_up(tmp_path: Path) -> None:
    """A look-up that may ask for few keys still finds a prompt of which a disk has everything."""
    shape = {"kind": "windows", "blocks": ROOMY, "slots": 240, "settings": disk(tmp_path)}
    prompt = Prompt(tokens(Random(2), 30 * BLOCK), new=1)
    with made(**shape) as engine:
        engine.run("first", prompt)
        engine.drain()
    with made(**shape) as engine, patch.object(search, "MAX_KEYS", 40):
        engine.run("again", prompt)
        engine.drain()
        assert engine.counts.get(("prompt_tokens", "disk"), 0) >= 25 * BLOCK


def test_requests_that_share_a_prefix_pin_it_once(tmp_path: Path) -> None:
    """Many requests wait with a common prefix in host memory, and each reads its end from disk."""
    prefix, requests = tokens(Random(2), 8 * BLOCK), 5
    prompts = [[*prefix, *tokens(Random(n), 2 * BLOCK)] for n in range(requests)]
    settings = disk(tmp_path)
    with made(blocks=ROOMY, settings=settings) as engine:
        for number, prompt in enumerate(prompts):
            engine.run(f"r{number}", Prompt(prompt, new=1))
        engine.drain()
    with made(blocks=ROOMY, slots=80, settings=settings) as engine:
        engine.run("prefix", Prompt(prefix, new=1))
        engine.drain()
        assert engine.forget_device()
        engine.faults.store_gate.close()
        for number, prompt in enumerate(prompts):
            engine.add(f"r{number}", Prompt(prompt, new=1))
        engine.step()
        engine.faults.store_gate.open()
        engine.drain()
        assert not engine.counts.get(("tier_decisions", "no_space"))
        assert engine.counts["prompt_tokens", "disk"] >= requests * BLOCK


# Costs on the scheduler's thread ----------------------------------------------------------------


def test_a_step_without_news_costs_little() -> None:
    """Eight requests decode, and no block is full: three hundred lines of Python, all told."""
    with made(blocks=ROOMY, slots=400) as engine:
        for number in range(8):
            engine.add(f"r{number}", Prompt(tokens(Random(number), 2 * BLOCK + 3), new=60))
        for _ in range(14):
            engine.step()
        folders = ("engines/", "offload/", "disaggregation/", "peers/")
        costs = [lines_of(engine.step, *folders) for _ in range(10)]
        assert min(costs) <= 300 < max(costs), costs  # control: some steps store blocks


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_stores_cost_the_same_however_many_slots_wait_for_the_disk(
    policy: str, tmp_path: Path
) -> None:
    few, many = (_eviction_lines(policy, slots, tmp_path / str(slots)) for slots in (64, 640))
    assert many <= 2 * few, (few, many)


def _eviction_lines(policy: str, slots: int, folder: Path) -> float:
    """Return what an evicted block costs on average, in a tier of which the disk holds a quarter,
    while its slots are used anew. One of the evictions meets what the disk holds."""
    shape = {"blocks": ROOMY, "slots": slots, "settings": disk(folder, policy=policy)}
    stores = slots // 8
    with made(**shape) as engine:
        engine.faults.store_gate.close()

        def store(first: int) -> None:
            for number in range(first, first + stores):
                prompt = tokens(Random(number), 8 * BLOCK)
                engine.run(f"r{number}", Prompt(prompt, new=1, skips_cache=True))

        def evicted() -> float:
            return sum(n for (name, _), n in engine.counts.items() if name == "evicted_blocks")

        store(0)
        before = evicted()
        lines = lines_of(lambda: store(stores), "offload/eviction/")
        # Where copies are slow, some blocks are not stored, so these are fewer than all slots.
        assert evicted() - before >= slots // 4
        return lines / (evicted() - before)


def test_a_request_that_waits_costs_the_same_however_long_its_prompt_is(tmp_path: Path) -> None:
    few, many = (_waiting_lines(blocks, tmp_path / str(blocks)) for blocks in (8, 48))
    assert many <= 1.2 * few, (few, many)


def _waiting_lines(blocks: int, folder: Path) -> int:
    """Return what ten steps cost in which a request waits for the end of its prompt, of which so
    many blocks are in host memory."""
    shape = {"blocks": ROOMY, "slots": 320, "step_tokens": 64, "settings": disk(folder)}
    prefix = tokens(Random(1), blocks * BLOCK)
    prompt = Prompt([*prefix, *tokens(Random(2), 2 * BLOCK)], new=1)
    with made(**shape) as engine:
        engine.run("first", prompt)
        engine.drain()
    with made(**shape) as engine:
        engine.run("prefix", Prompt(prefix, new=1))
        engine.drain()
        assert engine.forget_device()
        engine.faults.read_gate.close()
        engine.add("waits", prompt)
        engine.step_until(lambda: engine.faults.read_gate.reached)
        engine.step()

        def steps() -> None:
            for _ in range(10):
                engine.step()

        cost = lines_of(steps, "tiers/planner", "tiers/lookup", "cache/groups", "offload/index")
        assert engine.live() == ["waits"]
        engine.faults.read_gate.open()
        engine.drain()
        assert engine.counts["prompt_tokens", "disk"] >= 2 * BLOCK
        return cost


class CountingDeque(deque[int]):
    """Counts the items that removals look at."""

    looked_at: ClassVar[int] = 0

    def remove(self, item: int) -> None:
        CountingDeque.looked_at += self.index(item) + 1
        super().remove(item)


def test_a_drop_costs_the_same_however_many_slots_there_are() -> None:
    with patch.object(s3fifo, "deque", CountingDeque, create=True):
        few, many = (_dropped(slots) for slots in (64, 640))
    assert many <= 2 * few + 16, (few, many)


def _dropped(slots: int) -> int:
    """Return how many items a drop of some blocks looks at, in a full tier."""
    drop = {"kvconnect": {"drop": True}}
    with made(slots=slots, settings={"policy": "s3fifo"}) as engine:
        for number in range(slots // 8):
            engine.run(f"r{number}", Prompt(tokens(Random(number), 8 * BLOCK), new=1))
        engine.drain()
        before = CountingDeque.looked_at
        last = tokens(Random(slots // 8 - 1), 8 * BLOCK)
        engine.run("drops", Prompt(last, new=1, params=drop))
        engine.drain()
        return CountingDeque.looked_at - before


def test_wrong_tokens_are_seen_in_scenarios_too() -> None:
    """Control of the first scenario: a reset that the connector ignores."""
    shared = tokens(Random(2), 6 * BLOCK)
    with made() as engine, patch.object(KVConnect, "reset_cache", lambda _: True):
        engine.run("first", Prompt(shared, new=1))
        engine.drain()
        assert engine.reset("new")
        with pytest.raises(WrongTokens):
            engine.run("new", Prompt([*shared, 5], new=1))
