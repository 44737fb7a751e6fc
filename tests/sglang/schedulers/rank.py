"""One rank of an engine: SGLang's scheduler in a process of its own, whose loop the test steps.

Run as ``python -m tests.sglang.schedulers.rank SPEC``, SPEC as JSON. The scheduler, its queues, its
caches and its event loop are SGLang's own; the model is the fingerprinting one. At the top of each
iteration, where SGLang would look at its socket, every rank reports and the leading rank waits for
the test's next requests, perhaps none, for one more iteration. The other ranks follow it, since
SGLang sends requests on from rank to rank.
"""

from __future__ import annotations

import json
import socket
import sys
import traceback
from array import array
from collections.abc import Callable
from functools import partialmethod
from typing import Any, TextIO

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers import scheduler as schedulers
from sglang.srt.managers.disagg_service import start_disagg_service
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, spawn_world_rank
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args

from tests.sglang.schedulers import model
from tests.sglang.schedulers.breakages import BREAKAGES


class Gate:
    """Where an iteration of the loop starts: reports to the test, and waits for its requests."""

    def __init__(self, path: str) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        self._out: TextIO = link.makefile("w")
        self._in: TextIO = link.makefile("r")
        self._outputs: list[dict[str, Any]] = []
        self._mend: Callable[[], None] = lambda: None
        self.scheduler: Any = None

    def send(self, **message: Any) -> None:
        """Report to the test."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def output(self, output: Any) -> None:
        """Keep what the scheduler sends to its tokenizer."""
        if isinstance(output, io_struct.BatchTokenIDOutput):
            for number, rid in enumerate(output.rids):
                reason = output.finished_reasons[number]
                ids = output.output_ids[number] if output.output_ids else []
                kept = {"rid": rid, "ids": list(ids), "end": reason}
                kept["cached"] = output.cached_tokens[number]
                kept["retracted"] = (output.retraction_counts or [0] * len(output.rids))[number]
                self._outputs.append(kept)
        elif isinstance(output, io_struct.AbortReq):
            reason = output.finished_reason or {"type": "abort", "message": ""}
            self._outputs.append({"rid": output.rid, "ids": [], "end": reason})

    def pull(self, receiver: Any) -> list[Any] | None:
        """Stand in for SGLang's look at its socket."""
        parallel = get_parallel()
        leads = parallel.pp_rank == 0 and parallel.tp_rank == 0
        outputs, self._outputs = self._outputs, []
        found, model.faults[:] = list(model.faults), []
        self.send(outputs=outputs, faults=found, state=state(self.scheduler))
        if not leads:
            return _pull(receiver)
        line = self._in.readline()
        if not line:
            sys.exit(0)
        return [_request(message) for message in json.loads(line) if not self._breaks(message)]

    def _breaks(self, message: dict[str, Any]) -> bool:
        """Break or mend something if the test says so; return whether it does."""
        if message["kind"] == "break":
            self._mend = BREAKAGES[message["what"]](self.scheduler)
        elif message["kind"] == "mend":
            self._mend()
        else:
            return False
        return True


_pull = SchedulerRequestReceiver._pull_raw_reqs


def _pull_at_gate(receiver: Any, gate: Gate) -> list[Any] | None:
    return gate.pull(receiver)


def _keep_output(sender: Any, gate: Gate, output: Any, _request: Any = None) -> None:
    if sender.socket is not None:  # else a rank that nobody listens to
        gate.output(output)


def state(scheduler: Any) -> dict[str, Any]:
    """Return what a scheduler holds, as sizes of its queues and tables."""
    pool = scheduler.token_to_kv_pool_allocator
    held = {
        "waiting": len(scheduler.waiting_queue),
        "running": len(scheduler.running_batch.reqs),
        "free": pool.available_size(),
        "cached": scheduler.tree_cache.evictable_size(),
        "rows": scheduler.req_to_token_pool.available_size(),
        "idle": scheduler.is_fully_idle(),
    }
    if scheduler.disaggregation_mode.value == "prefill":
        queue = scheduler.disagg_prefill_bootstrap_queue
        held["queues"] = {
            "bootstrapping": len(queue.queue),
            "in flight": len(scheduler.disagg_prefill_inflight_queue),
        }
    else:
        queue = scheduler.disagg_decode_prealloc_queue
        transfer = scheduler.disagg_decode_transfer_queue
        held["queues"] = {
            "waiting for memory": len(queue.queue),
            "in transfer": len(transfer.queue),
            "retracted": len(queue.retracted_queue),
        }
    manager = queue.kv_manager
    statuses = manager.request_status
    statuses = getattr(statuses, "_local_map", statuses)  # of pipeline stages, no dict
    held["rooms"] = len(statuses), len(manager.failure_records)
    return held


def _request(message: dict[str, Any]) -> Any:
    """Return what SGLang's tokenizer would send."""
    kind = message.pop("kind")
    if kind != "generate":
        return getattr(io_struct, kind)(**message)
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=message.pop("new"), ignore_eos=True, stop=None
    )
    sampling.normalize(None)
    return io_struct.TokenizedGenerateReqInput(
        rid=message.pop("rid"),
        input_text=None,
        input_ids=array("q", message.pop("prompt")),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
        **message,
    )


class _HostEvent:
    """An event of a device that computes in order: what it marks is over when it is recorded.

    SGLang asks for one of CUDA's to send a cached prefix early.
    """

    device = torch.device("cpu")

    def record(self, _stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, _stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True


def main(spec: dict[str, Any]) -> None:
    """Run one rank until the test hangs up."""
    gate = Gate(spec["socket"])
    try:
        load_plugins()
        model.register()
        torch.cuda.Event = _HostEvent  # type: ignore[assignment, misc]
        arguments = prepare_server_args(spec["flags"])
        tp, pp = spec["tp_rank"], spec["pp_rank"]
        world = spawn_world_rank(arguments, tp_rank=tp, pp_rank=pp)
        publish(
            arguments, role="scheduler", ranks=SpawnRanks(world_rank=world, dp_rank=None, gpu_id=0)
        )
        schedulers.configure_scheduler_process(arguments, gpu_id=0)
        names = ("tokenizer", "scheduler_input", "detokenizer", "rpc", "metrics")
        ports = PortArgs(
            **{f"{name}_ipc_name": f"ipc://{spec['folder']}/{name}" for name in names},
            nccl_port=spec["nccl_port"],
            tokenizer_worker_ipc_name=None,
            decoupled_spec_ipc_config=None,
            instance_id=spec["instance"],
        )
        keep = start_disagg_service() if world == 0 else None
        gate.scheduler = schedulers.Scheduler(arguments, ports)
        SenderWrapper.send_output = partialmethod(_keep_output, gate)
        SchedulerRequestReceiver._pull_raw_reqs = partialmethod(_pull_at_gate, gate)
        gate.scheduler.run_event_loop()
        del keep
    except BaseException as error:
        if not isinstance(error, SystemExit):
            gate.send(died="".join(traceback.format_exception(error)))
        raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
