"""What vLLM's own tests of its connectors try, and which tests here try the same of KVConnect.

vLLM's tests are not in its wheel, and most of them look into ``NixlConnector``. So their cases are
tried by tests of this project. Left out are cases of vLLM's own scheduler and of other packages,
such as limits on loads in flight and connectors that vLLM's hybrid cache manager does not serve.
"""

from __future__ import annotations

from typing import NamedTuple

FOLDER = "tests/v1"  # of vLLM's repository

_HANDOFF = "engines/test_handoff.py"
_PAIR = f"{_HANDOFF}::TestLlama"
_OFFLOAD = "engines/test_offload.py"
_ANY_ORDER = "engines/test_overlap.py::test_any_order_of_events"
_RAISES = "engines/test_faults.py::test_a_load_that_raises_is_recomputed_once"
_SHORT = f"{_PAIR}::test_prompts_about_a_block_long"
_ONE_SIDE = f"{_PAIR}::test_what_only_one_side_has_computed"
_DECODE = "unit/disaggregation/test_decode_planner.py"
_MISMATCH = "unit/protocol/test_negotiation.py::test_a_mismatch_names_field_and_both_values"
_BESIDE = "engines/test_multi_connector.py::test_beside_another_connector"


class Case(NamedTuple):
    """``file`` is vLLM's, below ``FOLDER``; ``tests`` are ours, below ``tests``."""

    file: str
    text: str
    tests: tuple[str, ...]


_EDGES = "kv_connector/nixl_integration/test_edge_cases.py"
_SWEEP = "kv_connector/nixl_integration/test_accuracy.py"
_UNIT = "kv_connector/unit"
_PREFILL = f"{_UNIT}/test_remote_prefill_lifecycle.py"
_SENDING = f"{_UNIT}/test_remote_decode_lifecycle.py"
_NIXL = f"{_UNIT}/test_nixl_connector.py"
_RECOVERY = f"{_UNIT}/test_kv_load_failure_recovery.py"
_INVALID = f"{_UNIT}/test_invalid_blocks_correctness.py"
_MULTI = f"{_UNIT}/test_multi_connector.py"
_OFFLOADING = f"{_UNIT}/offloading_connector/test_scheduler.py"

CASES = (
    Case(_EDGES, "a prompt shorter than a block", (_SHORT,)),
    Case(_EDGES, "a full hit on decode, none on prefill", (_ONE_SIDE,)),
    Case(_EDGES, "a partial hit on decode", (_ONE_SIDE,)),
    Case(
        _SWEEP,
        "answers as of one engine: other tensor parallelism, latent and windowed attention",
        (
            f"{_HANDOFF}::test_other_tensor_parallelism",
            f"{_HANDOFF}::test_latent_attention",
            f"{_HANDOFF}::test_other_attention_kinds",
        ),
    ),
    Case(
        "kv_connector/nixl_integration/spec_decode_acceptance_test.sh",
        "speculative decoding",
        ("engines/test_handoff_modes.py::test_speculative_decoding",),
    ),
    Case(_PREFILL, "a request waits, its KV comes, it goes on", (f"{_PAIR}::test_pull",)),
    Case(
        _PREFILL,
        "beside requests that compute their prompts",
        ("engines/test_fleet.py::test_mixed_requests_get_the_tokens_of_a_single_engine",),
    ),
    Case(_PREFILL, "no hits on blocks that have not come", (_ANY_ORDER,)),
    Case(_PREFILL, "a prompt of whole blocks", (_SHORT,)),
    Case(
        _PREFILL,
        "no room to receive, or to go on",
        (f"{_PAIR}::test_a_decode_engine_that_is_full_gets_there",),
    ),
    Case(
        _SENDING,
        "blocks are held until they are sent",
        ("unit/disaggregation/test_leases.py::test_blocks_return_when_every_worker_has_answered",),
    ),
    Case(_SENDING, "a prompt shorter than a block", (_SHORT,)),
    Case(_SENDING, "a hit on prefill: all blocks are sent", (_ONE_SIDE,)),
    Case(_NIXL, "several transfers from one engine at once", (f"{_PAIR}::test_many_at_once",)),
    Case(
        _NIXL,
        "connecting holds nothing up",
        ("unit/transport/test_tcp.py::test_orders_before_a_peer_is_up_wait_for_it",),
    ),
    Case(_NIXL, "engines that do not fit refuse one another", (_MISMATCH,)),
    Case(
        _NIXL,
        "a hand-shake or a transfer fails",
        (
            f"{_DECODE}::test_no_connection_is_a_failure_of_everything",
            f"{_DECODE}::test_a_lost_peer_ends_the_job_but_not_before_the_others_are_quiet",
        ),
    ),
    Case(
        _NIXL,
        "a prefill that nobody fetches",
        (f"{_PAIR}::test_a_prefill_that_nobody_fetches_is_given_back",),
    ),
    Case(_NIXL, "requests that are aborted", (f"{_PAIR}::test_clients_that_hang_up",)),
    Case(
        _NIXL,
        "statistics of several workers",
        ("engines/test_connector.py::test_stats_merge_as_vllm_merges_them",),
    ),
    Case(
        _NIXL,
        "registered memory is that of the caches",
        ("engines/test_connector.py::test_geometry_of_one_allocation",),
    ),
    Case(
        _NIXL,
        "nothing is left after a shutdown",
        (
            "unit/transport/test_tcp.py::test_nothing_is_left_after_close",
            "unit/transport/test_nixl.py::test_pages_move_and_threads_end",
        ),
    ),
    Case(_RECOVERY, "a load fails, inside a step or beside it", (_RAISES,)),
    Case(_RECOVERY, "requests that share blocks of a failed load", (_RAISES,)),
    Case(
        _RECOVERY,
        "failures that come one after the other",
        ("unit/offload/test_copy_jobs.py::test_the_last_worker_settles_and_failures_are_merged",),
    ),
    Case(
        _RECOVERY,
        "a load fails with several KV groups",
        (
            "engines/test_faults.py::test_a_load_that_raises_starts_a_windowed_request_over_once",
            f"{_HANDOFF}::test_a_failed_hand_off_is_recomputed_where_that_is_the_policy",
        ),
    ),
    Case(
        f"{_UNIT}/test_error_propagation.py",
        "the policy `fail`: one error, nothing is left",
        (
            f"{_PAIR}::test_bad_parameters_are_one_clean_error",
            f"{_PAIR}::test_a_prefill_that_never_comes_is_an_error_in_time",
        ),
    ),
    Case(
        _INVALID,
        "failed blocks are nobody's hit",
        (
            "engines/test_faults.py::test_a_flipped_byte_is_caught_and_recomputed",
            "engines/test_overlap.py::test_another_connector_s_failed_load_spoils_nothing_here",
        ),
    ),
    Case(
        f"{_UNIT}/test_kv_connector_lifecycle.py",
        "a step without a forward pass",
        (
            "engines/test_connector_roles.py::"
            "test_stores_survive_a_step_that_ends_without_asking_for_them",
        ),
    ),
    Case(_MULTI, "all connectors keep, the first that has it loads", (_BESIDE,)),
    Case(_MULTI, "preemptions reach all connectors", (_ANY_ORDER,)),
    Case(
        _MULTI,
        "several connectors answer",
        (_BESIDE, "engines/test_overlap.py::test_two_connectors_that_hand_off"),
    ),
    Case(
        _MULTI,
        "messages of several workers add up",
        ("engines/test_connector_roles.py::test_hellos_of_several_workers_add_up",),
    ),
    Case(
        _OFFLOADING,
        "full blocks are stored, and loaded when the device has forgotten them",
        (
            f"{_OFFLOAD}::TestLlama::test_stored_bytes_are_those_of_every_full_block",
            f"{_OFFLOAD}::TestLlama::test_evicted_prompts_come_back_from_host",
        ),
    ),
    Case(
        _OFFLOADING,
        "a preempted request comes back",
        (
            f"{_OFFLOAD}::TestLlama::test_many_at_once_with_preemption",
            "engines/test_connector_roles.py::test_a_preempted_request_is_stored_from_its_new_blocks",
        ),
    ),
    Case(_OFFLOADING, "requests look up one prefix at once", (_ANY_ORDER,)),
    Case(
        _OFFLOADING,
        "requests are aborted while they load",
        (f"{_OFFLOAD}::TestLlama::test_aborts_at_any_point_leave_nothing_behind",),
    ),
    Case(
        f"{_UNIT}/offloading_connector/test_events.py",
        "events of stored and removed blocks",
        (f"{_OFFLOAD}::test_a_full_tier_with_events",),
    ),
    Case(
        "kv_offload/cpu/test_manager.py",
        "eviction in order, never of blocks in use",
        (
            "unit/offload/test_eviction.py::test_lru_is_exact",
            "unit/offload/test_index.py::test_slots_in_use_are_not_evicted",
        ),
    ),
    Case(
        "kv_offload/e2e/test_stress.py",
        "stores and loads of a lower tier at once",
        (
            "contract/test_stores.py::test_disk",
            "contract/test_remote_stores.py::test_objects_in_files",
        ),
    ),
)


def section() -> list[str]:
    """Return the lines of docs/compatibility.md about these cases."""
    lines = [
        "## Cases of vLLM's own tests",
        "",
        f"vLLM's files are below `{FOLDER}` of its repository, KVConnect's tests below `tests`.",
        "The table was made by reading both. KVConnect's tests are part of `make test`.",
        "",
        "| vLLM's file | Case | KVConnect's tests |",
        "|---|---|---|",
    ]
    for case in CASES:
        tests = ", ".join(f"`{test}`" for test in case.tests)
        lines.append(f"| `{case.file}` | {case.text} | {tests} |")
    return lines
