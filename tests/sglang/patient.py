"""Imported before servers are forked: SGLang's data-parallel controller waits for requests.

By itself it asks for them without a pause, which takes a core from whatever else is tested.
"""

from __future__ import annotations

from sglang.srt.managers import data_parallel_controller as of

_WAIT_MS = 100


def _event_loop(controller: of.DataParallelController) -> None:
    while True:
        controller.soft_watchdog.feed()
        if controller.recv_from_tokenizer.poll(_WAIT_MS):
            controller._request_dispatcher(of.sock_recv(controller.recv_from_tokenizer))


of.DataParallelController.event_loop = _event_loop
