"""Which tests of this folder cannot hold on a pretended device, and why."""

from __future__ import annotations

STREAMS = "test_cuda_streams.py::"
AT_ONCE = "work that was submitted is over, so nothing is seen to wait"
FAIL = {
    "test_cuda_context.py::test_a_refused_page_lock_breaks_nothing_that_follows": "no CUDA runtime",
    "test_cuda_context.py::test_copies_share_no_stream_with_torch": "torch's streams are no pool",
    "test_cuda_context.py::test_a_copy_goes_on_while_all_of_torchs_streams_are_busy": AT_ONCE,
    "test_cuda_copy.py::test_a_copy_waits_for_its_fence_and_for_nothing_else[dma]": AT_ONCE,
    "test_cuda_copy.py::test_a_copy_waits_for_its_fence_and_for_nothing_else[kernel]": AT_ONCE,
    "test_cuda_executor.py::test_the_device_waits_for_each_layer_of_a_synchronous_load": AT_ONCE,
    f"{STREAMS}test_a_store_follows_the_stream_that_its_fence_was_taken_on": AT_ONCE,
    f"{STREAMS}test_a_store_is_hashed_beside_its_copy": AT_ONCE,
    f"{STREAMS}test_a_digest_delays_no_later_copy[CPU_to_GPU]": AT_ONCE,
    f"{STREAMS}test_a_digest_delays_no_later_copy[GPU_to_CPU]": AT_ONCE,
    f"{STREAMS}test_a_captured_forward_reads_what_was_loaded_before_its_replay": "no graphs",
    "test_kernel_cache.py::test_every_kernel_loads[False]": "CuPy compiles for a device",
    "test_handoff_staging.py::test_each_layer_can_be_read_behind_its_own_fence": AT_ONCE,
}
"""Tests whose bodies run up to what no device in host memory can show."""
LEFT_OUT = {
    "test_cuda_copy.py::test_events_tell_the_time": "nothing but time",
    "test_cuda_copy.py::test_ways_can_be_measured": "nothing but time",
    "test_cuda_copy.py::test_the_time_to_submit_work_does_not_count": "nothing but time",
}
FILES_LEFT_OUT = {
    "test_cuda_faults.py": "processes of their own, of which some lose the device",
    "test_nixl_device.py": "NIXL registers the memory of a device",
    "test_sanitizer.py": "compute-sanitizer",
    "test_sleep.py": "an engine on a GPU",
    "test_vllm_bytes.py": "an engine on a GPU",
}
