"""Receipts: where the tokens of a prompt came from, whatever happened on the way."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import KVEventBatch

from kvconnect.cache.groups import CacheGroup
from kvconnect.disaggregation.receives import SettledReceive
from kvconnect.engines.vllm.receipts import Receipts
from kvconnect.offload.copy_jobs import CopyJob
from kvconnect.offload.ledger import Owner
from kvconnect.offload.messages import FailedBlock, GroupBlocks
from kvconnect.protocol.options import nonce_of, with_receipt
from kvconnect.router.fleet.kv_events import receipts_in
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, PromptSource, Tier

GROUPS = [CacheGroup(16)]


@pytest.fixture
def stats() -> OffloadingConnectorStats:
    return OffloadingConnectorStats()


@pytest.fixture
def receipts(stats: OffloadingConnectorStats) -> Receipts:
    return Receipts(stats)


def request(prompt: int = 100, output: int = 0, nonce: Any = None) -> Any:
    params = {"kvconnect": {"receipt": nonce}} if nonce is not None else None
    counts = {"num_prompt_tokens": prompt, "num_output_tokens": output}
    return SimpleNamespace(request_id="r", kv_transfer_params=params, **counts)


def load(blocks: int, bad: int | None = None) -> CopyJob:
    """A load of blocks of 16 tokens, of which one is bad."""
    part = GroupBlocks(0, array("q", range(1, blocks + 1)), array("q", range(blocks)))
    job = CopyJob(Owner.LOAD, (part,), 0.0, "r", 16 * blocks)
    if bad is not None:
        failed = FailedBlock(0, part.block_ids[bad], bad, FailureCause.DIGEST)
        job.failures[failed[:3]] = failed
    return job


def sources(receipt: dict[str, Any] | None) -> dict[str, int]:
    """The sources that are not 0, after a check that they add up."""
    assert receipt is not None
    found = {source.value: receipt[source.value] for source in PromptSource}
    assert sum(found.values()) == receipt["prompt"]
    return {name: tokens for name, tokens in found.items() if tokens}


def test_tokens_by_tier(receipts: Receipts) -> None:
    receipts.looked_up(request(), 16, 1.0)
    receipts.looked_up(request(), 32, 1.5)  # it waited for the disk
    receipts.admitted(request(), {Tier.DISK: 16, Tier.HOST: 32}, 48)
    receipts.settled(load(3), 3.0, GROUPS)
    receipt = receipts.finish("r")
    assert sources(receipt) == {"device": 32, "host": 32, "disk": 16, "computed": 20}
    assert receipt is not None and receipt["waited_s"] == 2.0 and "not_loaded" not in receipt
    assert receipts.finish("r") is None


def test_a_hand_off(receipts: Receipts) -> None:
    receipts.looked_up(request(), 16, 1.0)
    receipts.admitted(request(), {}, 83)
    receipts.received([SettledReceive("r", None, False)], 1.25)
    receipt = receipts.finish("r")
    assert sources(receipt) == {"device": 16, "handoff": 83, "computed": 1}
    assert receipt is not None and receipt["waited_s"] == 0.25


def test_what_a_failed_hand_off_did_not_bring_is_computed(receipts: Receipts) -> None:
    receipts.looked_up(request(), 0, 1.0)
    receipts.admitted(request(), {}, 99)
    receipts.received([SettledReceive("r", FailureCause.PEER, False, lost=67)], 2.0)
    receipt = receipts.finish("r")
    assert sources(receipt) == {"handoff": 32, "computed": 68}
    assert receipt is not None and receipt["not_loaded"] == "peer"


def test_blocks_after_a_bad_one_are_computed(receipts: Receipts) -> None:
    receipts.looked_up(request(), 0, 1.0)
    receipts.admitted(request(), {Tier.HOST: 64}, 64)
    receipts.settled(load(4, bad=1), 2.0, GROUPS)
    receipt = receipts.finish("r")
    assert sources(receipt) == {"host": 16, "computed": 84}
    assert receipt is not None and receipt["not_loaded"] == "digest"


def test_what_the_cost_model_declined_is_named_unless_a_load_failed(receipts: Receipts) -> None:
    for bad, named in ((None, "recompute"), (1, "digest")):
        receipts.looked_up(request(), 0, 1.0)
        receipts.admitted(request(), {Tier.HOST: 64}, 64)
        receipts.settled(load(4, bad=bad), 2.0, GROUPS)
        receipt = receipts.finish("r", "recompute")
        assert receipt is not None and receipt["not_loaded"] == named


def test_a_request_that_starts_over_counts_what_it_finds_then(receipts: Receipts) -> None:
    receipts.looked_up(request(), 0, 1.0)
    receipts.admitted(request(), {Tier.HOST: 64}, 64)
    receipts.settled(load(4, bad=0), 2.0, [*GROUPS, CacheGroup(16, window=64)])
    receipts.looked_up(request(), 48, 2.5)
    receipts.admitted(request(), {}, 0)
    receipt = receipts.finish("r")
    assert sources(receipt) == {"device": 48, "computed": 52}
    assert receipt is not None and receipt["waited_s"] == 1.5


def test_a_preemption_after_the_first_token_changes_nothing(receipts: Receipts) -> None:
    receipts.looked_up(request(), 32, 1.0)
    receipts.admitted(request(), {}, 0)
    receipts.looked_up(request(output=3), 96, 9.0)
    receipts.admitted(request(output=3), {Tier.HOST: 4}, 4)
    receipts.settled(load(1, bad=0), 9.5, GROUPS)
    receipt = receipts.finish("r")
    assert sources(receipt) == {"device": 32, "computed": 68}
    assert receipt is not None and receipt["waited_s"] == 0.0


def test_no_receipt_of_a_request_that_never_ran(receipts: Receipts) -> None:
    assert receipts.finish("r") is None
    receipts.looked_up(request(), 32, 1.0)
    assert receipts.finish("r") is None


@given(
    device=st.integers(0, 100), external=st.integers(0, 100), disk=st.integers(0, 100),
    handoff=st.booleans(), lost=st.integers(0, 100),
)  # fmt: skip
def test_sources_always_add_up(
    device: int, external: int, disk: int, handoff: bool, lost: int
) -> None:
    stats = OffloadingConnectorStats()
    receipts = Receipts(stats)
    external = min(external, 100 - device)
    tiers = {Tier.DISK: min(disk, external), Tier.HOST: external - min(disk, external)}
    receipts.looked_up(request(), device, 1.0)
    receipts.admitted(request(), {} if handoff else tiers, external)
    settled = SettledReceive("r", FailureCause.PEER, False, lost=min(lost, external))
    receipts.received([settled], 2.0)
    found = sources(receipts.finish("r"))
    assert min(found.values()) > 0
    assert stats.data["counters"]["prompt_tokens"] == found


RECEIPT = {"prompt": 4}


@pytest.mark.parametrize("asked", [None, {}, {"kvconnect": True}, {"kvconnect": {"receipt": 1}},
                                   {"kvconnect": {"recipe": True}}, {"kvconnect": []}])  # fmt: skip
def test_a_receipt_is_given_to_who_asks(asked: Any) -> None:
    wants = {"kvconnect": {"receipt": True, "unknown": 3}}
    assert with_receipt(None, wants, RECEIPT) == {"kvconnect": {"receipt": RECEIPT}}
    ticket = {"kvconnect_ticket": "t"}
    assert with_receipt(ticket, wants, RECEIPT) == {**ticket, "kvconnect": {"receipt": RECEIPT}}
    assert with_receipt(ticket, wants, None) is ticket
    assert with_receipt(ticket, asked, RECEIPT) is ticket


# Receipts of streams ------------------------------------------------------------------------------

NONCE = "0123456789abcdef" * 2


def published(receipts: Receipts, tiers: Any = None) -> dict[str, Any]:
    """What a router reads in the batch that vLLM would publish now, by nonce."""
    batch = KVEventBatch(ts=1.0, events=receipts.take_events(tiers))  # type: ignore[arg-type]
    return {told.nonce: told.receipt for told in receipts_in(msgspec.msgpack.encode(batch))}


def test_a_stream_s_receipt_is_published_with_its_first_output(receipts: Receipts) -> None:
    asked = request(nonce=NONCE)
    receipts.looked_up(asked, 16, 1.0)
    receipts.admitted(asked, {Tier.HOST: 64}, 64)
    receipts.settled(load(4, bad=2), 2.0, GROUPS)
    assert published(receipts) == {}, "a failed load may make the request start over"
    asked.num_output_tokens = 1
    found = published(receipts)
    assert sources(found[NONCE]) == {"device": 16, "host": 32, "computed": 52}
    assert published(receipts) == {}, "once"
    receipts.settled(load(4, bad=0), 3.0, GROUPS)  # too late to change what was said
    receipts.looked_up(asked, 96, 9.0)  # a preemption
    receipts.admitted(asked, {}, 0)
    assert receipts.finish("r") == found[NONCE], "as in a whole answer"
    assert published(receipts) == {}


def test_a_request_may_end_with_its_first_output(receipts: Receipts) -> None:
    asked = request(nonce=NONCE)
    receipts.looked_up(asked, 16, 1.0)
    receipts.admitted(asked, {}, 0)
    asked.num_output_tokens = 1
    receipt = receipts.finish("r", "late")
    assert receipt is not None and receipt["not_loaded"] == "late"
    assert published(receipts) == {NONCE: receipt}


def test_what_the_tiers_declined_is_published_too(receipts: Receipts) -> None:
    asked = request(nonce=NONCE)
    receipts.looked_up(asked, 0, 1.0)
    receipts.admitted(asked, {}, 0)
    asked.num_output_tokens = 1
    tiers = SimpleNamespace(plan=SimpleNamespace(not_loaded={"r": "recompute"}.get))
    assert published(receipts, tiers)[NONCE]["not_loaded"] == "recompute"


@pytest.mark.parametrize(
    "nonce", [None, True, 1, "", NONCE[1:], NONCE.upper(), NONCE + "\n", [NONCE], {NONCE: NONCE}]
)
def test_nothing_is_published_for_who_has_no_nonce(receipts: Receipts, nonce: Any) -> None:
    asked = request(nonce=nonce)
    receipts.looked_up(asked, 16, 1.0)
    receipts.admitted(asked, {}, 0)
    asked.num_output_tokens = 1
    assert nonce_of(asked.kv_transfer_params) is None
    assert receipts.take_events(None) == []
    assert receipts.finish("r") is not None and receipts.take_events(None) == []
    assert nonce_of({"kvconnect": {"receipt": NONCE}}) == NONCE  # control


def test_nothing_is_published_of_a_request_that_never_ran(receipts: Receipts) -> None:
    receipts.looked_up(request(nonce=NONCE), 16, 1.0)
    assert receipts.finish("r") is None and receipts.take_events(None) == []
    asked = request(nonce=NONCE)
    receipts.looked_up(asked, 16, 1.0)
    receipts.admitted(asked, {Tier.HOST: 64}, 64)
    receipts.looked_up(asked, 16, 2.0)  # it started over, and ended before it was admitted again
    assert receipts.finish("r") is None and receipts.take_events(None) == []
