"""The CUDA driver as it is called here, over a stub that checks calls as the driver does."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from kvconnect import cuda
from kvconnect.copy.driver import OwnEvent
from kvconnect.cuda import CudaContext, check, has_context, load_driver
from kvconnect.disaggregation import staging
from kvconnect.errors import ConfigError, Incompatible, Misuse, TransferFailed
from kvconnect.offload import host_arena
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.streams import CudaStreams
from kvconnect.transport.base import MemoryRegion
from kvconnect.transport.nixl import agent as agents
from kvconnect.transport.nixl import worker as nixl_worker
from kvconnect.transport.nixl.worker import NixlWorker
from kvconnect.types import TransferType
from tests.fakes import torch_streams
from tests.fakes.stub_driver import StubDriver

PAGE = mmap.PAGESIZE
PACKAGE = Path(cuda.__file__).parent
LEAST, GREATEST, NON_BLOCKING = 0, -5, 1
OUT_OF_MEMORY, NO_CONTEXT = 2, 201
LOST = 700  # an illegal access: every call answers it from then on


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return StubDriver(monkeypatch)


def in_new_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(work).result()


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libnothing-of-that-name.so.1")
    with pytest.raises(Incompatible, match=r"the CUDA driver does not load: libnothing"):
        load_driver()


def test_a_status_is_an_error() -> None:
    check(0, "cuInit")
    with pytest.raises(TransferFailed, match="cuInit failed with CUDA error 700"):
        check(700, "cuInit")


# Contexts ---------------------------------------------------------------------------------------


def test_a_thread_has_a_context_once_it_entered_one(stub: StubDriver) -> None:
    context = CudaContext(0)
    assert not in_new_thread(has_context)  # negative control

    def enter() -> bool:
        context.enter()
        return has_context()

    assert in_new_thread(enter)
    assert not has_context()  # of this thread
    with pytest.raises(TransferFailed, match="CUDA error 101"):
        CudaContext(9)


def test_other_calls_leave_a_thread_the_context_that_it_had(stub: StubDriver) -> None:
    memory = bytearray(2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def use() -> list[bool]:
        seen, context = [], CudaContext(1)
        for call in (context.stream, lambda: context.lock(address, 8)):
            call()
            seen.append(has_context())
        stub.refuse("cuMemHostUnregister", LOST)
        with pytest.raises(TransferFailed, match=str(LOST)):
            context.unlock(address)
        return [*seen, has_context()]

    assert in_new_thread(use) == [False, False, False]


class Recorder:
    """Stands for NIXL's agent: notes whether those who call it have a context."""

    contexts: ClassVar[list[bool]] = []

    def __init__(self, backend: str, areas: object, *, local: bool, owner: str) -> None:
        self.contexts.append(has_context())
        self.offer = SimpleNamespace()

    def close(self) -> None:
        self.contexts.append(has_context())


def contexts_of_a_nixl_worker(monkeypatch: pytest.MonkeyPatch, device: int) -> list[bool]:
    """Return who had a context: an agent's first start and steps, slow work, and the start of an
    agent in another one's place."""
    monkeypatch.setattr(nixl_worker, "NixlAgent", Recorder)
    monkeypatch.setattr(Recorder, "contexts", [])
    worker = in_new_thread(
        lambda: NixlWorker("UCX", [MemoryRegion(0, 8), MemoryRegion(0, 8, device)], local=True)
    )
    seen = Recorder.contexts
    done = threading.Event()

    def work() -> None:
        seen.append(has_context())
        done.set()

    worker.prepare(work, pytest.fail)
    assert done.wait(60)
    over = threading.Event()
    worker.call(lambda agent: seen.append(has_context()))
    worker.renew(worker.offer, "a test", over.set)
    assert over.wait(60)
    worker.close()
    return seen


def test_every_thread_of_nixl_has_the_context_of_the_cache(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = contexts_of_a_nixl_worker(monkeypatch, device=1)
    assert len(seen) == 6 and all(seen)


def test_without_entering_no_thread_of_nixl_has_one(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a new thread has no context of its own accord."""
    monkeypatch.setattr(CudaContext, "enter", lambda self: None)
    assert not any(contexts_of_a_nixl_worker(monkeypatch, device=1))


def test_a_cache_in_cpu_memory_needs_no_driver(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts_of_a_nixl_worker(monkeypatch, device=-1)
    assert stub.library.stub_retained(0) == stub.library.stub_retained(1) == 0


def test_a_context_that_cannot_be_had_is_a_reason_not_to_use_nixl(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libnothing-of-that-name.so.1")
    with pytest.raises(ConfigError, match=r"transport='nixl' is not usable.*does not load"):
        NixlWorker("UCX", [MemoryRegion(0, 8, 0)], local=True)


def test_an_agent_is_not_started_where_there_is_no_context(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> None:
        agents.NixlAgent("UCX", [MemoryRegion(0, 8, 0)], local=True)

    def enter_and_start() -> None:
        CudaContext(0).enter()
        start()

    monkeypatch.setattr(agents, "find_package", lambda *_: pytest.fail("went on"))
    with pytest.raises(Misuse, match="has no CUDA context"):
        in_new_thread(start)
    with pytest.raises(pytest.fail.Exception, match="went on"):
        in_new_thread(enter_and_start)  # negative control


# Streams ----------------------------------------------------------------------------------------


@pytest.fixture
def external(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Handles that torch was told to take as streams."""
    handles: list[int] = []

    def take(handle: int, device: torch.device) -> SimpleNamespace:
        handles.append(handle)
        return SimpleNamespace(cuda_stream=handle, device=device)

    monkeypatch.setattr(torch.cuda, "ExternalStream", take)
    return handles


def test_copies_run_on_streams_that_nobody_else_has(stub: StubDriver, external: list[int]) -> None:
    made = [CudaStreams(torch.device("cuda:1")) for _ in range(40)]  # more than torch's pool has
    assert len(set(external)) == len(external) == 160
    for streams in made:
        there = (*streams._copies.values(), *streams._digests.values())
        assert {stream.device for stream in there} == {torch.device("cuda:1")}

    def priority(kind: TransferType) -> int:
        handle = ctypes.c_void_p(made[0]._copies[kind].cuda_stream)
        assert stub.library.stub_flags(handle) == NON_BLOCKING
        return int(stub.library.stub_priority(handle))

    assert priority(TransferType.CPU_TO_GPU) == GREATEST  # loads go before the model
    assert priority(TransferType.GPU_TO_CPU) == LEAST


def test_each_direction_of_staging_has_a_stream_of_its_own(
    stub: StubDriver, external: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging._Ring, "_make", lambda self, nbytes: torch.empty(nbytes))
    area = SimpleNamespace(device=torch.device("cuda:0"), nbytes=8, data_ptr=lambda: 0)
    staging.StagedMemory(area, pieces=(MemoryRegion(0, 8, 0),))  # type: ignore[arg-type]
    assert len(set(external)) == 2


POOLED = re.compile(r"torch\.cuda\.Stream\(|\bStream\(")


def test_nothing_takes_a_stream_from_torchs_pool() -> None:
    """Thirty-two streams per priority go round, so that one of them may be the engine's."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert not [str(path) for path, text in texts.items() if POOLED.search(text)]
    assert POOLED.search("self._join = torch.cuda.Stream(device)")  # negative control


# Events ------------------------------------------------------------------------------------------


@pytest.fixture
def event_stream(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The thread's current stream."""
    stream = SimpleNamespace(cuda_stream=CudaContext(1).stream())
    torch_streams.stand_in(monkeypatch, lambda: stream)
    return stream


def test_to_record_and_to_follow_an_event_keeps_the_gil(
    stub: StubDriver, event_stream: SimpleNamespace
) -> None:
    """Another thread may hold it for a millisecond, and copies must be launched meanwhile."""
    device, context = torch.device("cuda:1"), CudaContext(1)
    start, end = (OwnEvent(device, context, timing=True) for _ in range(2))
    start.record()
    end.record()
    end.wait(event_stream)  # type: ignore[arg-type]
    end.synchronize()
    assert start.seconds_to(end) == pytest.approx(0.002)
    for name, count in (("cuEventCreate", 2), ("cuEventRecord", 2), ("cuStreamWaitEvent", 1)):
        assert stub.calls(name) == stub.held(name) == count
    assert stub.calls("cuEventSynchronize") == 1 and stub.held("cuEventSynchronize") == 0


def test_events_are_freed_and_leave_the_threads_context_as_it_was(
    stub: StubDriver, event_stream: SimpleNamespace
) -> None:
    def work() -> int:
        event = OwnEvent(torch.device("cuda:1"), CudaContext(1))
        event.record()
        assert not has_context()
        return int(stub.library.stub_events())

    assert in_new_thread(work) == 1
    assert stub.library.stub_events() == 0


def test_an_event_that_the_driver_refuses_is_a_failed_transfer(
    stub: StubDriver, event_stream: SimpleNamespace
) -> None:
    event = OwnEvent(torch.device("cuda:1"), CudaContext(1))
    stub.refuse("cuEventRecord", 400)
    with pytest.raises(TransferFailed, match="cuEventRecord failed with CUDA error 400"):
        event.record()
    event.record()  # negative control
    with pytest.raises(TransferFailed, match="cuEventElapsedTime"):
        event.seconds_to(event)  # it was not made to tell the time
    stub.lose_device(700)
    with pytest.raises(TransferFailed, match="CUDA error 700"):
        event.synchronize()
    del event  # not even this raises


AT_THE_END = """
import sys
import pytest
import torch
from kvconnect.copy import driver
from kvconnect.cuda import CudaContext
from tests.fakes.stub_driver import StubDriver

def faulty(event):
    with driver.contextmanager(Exception):
        pass

if len(sys.argv) > 1:
    driver.OwnEvent.__del__ = faulty
StubDriver(pytest.MonkeyPatch())
driver.kept = driver.OwnEvent(torch.device("cuda:0"), CudaContext(0))
sys.kept = driver  # Python clears this module, its older names first
"""


def test_an_event_may_outlive_the_modules_that_it_needs() -> None:
    command = [sys.executable, "-c", AT_THE_END]
    for more, wrong in ([], False), (["faulty"], True):  # the negative control
        made = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        assert ("Exception ignored" in made.stderr) is wrong, made.stderr


# Page-locking -----------------------------------------------------------------------------------


@pytest.fixture
def store() -> HostArena:
    return HostArena(num_slots=8, slot_bytes=2 * PAGE, digest_mode="full")


def test_pin_locks_whole_slots_and_close_unlocks(
    stub: StubDriver, store: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_arena, "_PIN_PIECE_BYTES", 7 * PAGE)  # three slots and a half
    assert store.pin()
    assert store.pin()
    assert stub.calls("cuMemHostRegister") == 3
    assert stub.locked == store.nbytes
    assert "pinned" in repr(store)
    store.close()
    assert stub.locked == 0


def test_a_page_lock_that_is_refused_leaves_nothing_locked_and_no_error_behind(
    stub: StubDriver,
    store: HostArena,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(host_arena, "_PIN_PIECE_BYTES", 2 * PAGE)
    monkeypatch.setattr(host_arena, "_LEAST_PIN_BYTES", PAGE)
    stub.limit_locked(5 * PAGE)
    assert not store.pin()
    assert stub.locked == 0
    assert f"CUDA error {OUT_OF_MEMORY}" in caplog.text and "memlock" in caplog.text
    assert repr(store).endswith("open)")
    assert stub.library.cudaGetLastError() == 0  # what a checked launch would raise as its own

    # Negative control: the runtime's own call leaves it.
    CudaContext(0).enter()
    address, nbytes = ctypes.c_void_p(store.address), ctypes.c_size_t(store.nbytes)
    assert stub.library.cudaHostRegister(address, nbytes, 0) == OUT_OF_MEMORY
    assert stub.library.cudaGetLastError() == OUT_OF_MEMORY
    store.close()


@pytest.mark.parametrize(("longest", "calls"), [(8, 1 + 2), (7, 2 + 4), (3, 3 + 8)])
def test_a_piece_that_is_too_long_is_tried_again_in_halves(
    stub: StubDriver, store: HostArena, monkeypatch: pytest.MonkeyPatch, longest: int, calls: int
) -> None:
    """Of eight slots of two pages, which begin as one piece."""
    monkeypatch.setattr(host_arena, "_LEAST_PIN_BYTES", 2 * PAGE)
    stub.limit_range(longest * PAGE)
    assert store.pin()
    assert stub.locked == store.nbytes
    assert stub.calls("cuMemHostRegister") == calls
    store.close()


def test_pieces_are_not_halved_for_ever(
    stub: StubDriver, store: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_arena, "_LEAST_PIN_BYTES", 4 * PAGE)
    stub.limit_range(PAGE)
    assert not store.pin()
    assert stub.calls("cuMemHostRegister") == 3  # of 16, 8 and 4 pages
    store.close()


def test_nothing_is_locked_that_the_device_reaches_elsewhere(
    stub: StubDriver, store: HostArena, caplog: pytest.LogCaptureFixture
) -> None:
    stub.use_other_addresses()
    assert not store.pin()
    assert stub.calls("cuMemHostRegister") == 0 and "WSL2" in caplog.text
    store.close()


def test_a_device_that_does_not_say_how_it_reaches_memory_gets_no_page_lock(
    stub: StubDriver, store: HostArena
) -> None:
    stub.refuse("cuDeviceGetAttribute", 1)
    assert not store.pin()
    assert stub.locked == 0
    assert store.pin()  # the control: the next call is answered
    store.close()


def test_closing_on_a_lost_device_is_quiet(stub: StubDriver, store: HostArena) -> None:
    assert store.pin()
    stub.lose_device(LOST)
    store.close()
    with pytest.raises(TransferFailed, match=str(LOST)):  # negative control: it is lost
        CudaContext(0)
