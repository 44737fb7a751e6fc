"""Imported before servers are forked: how SGLang's processes wait, changed for tests.

By itself the data-parallel controller asks for requests without a pause, which takes a core from
whatever else is tested. And a server looks every five seconds whether it was told to end, which
each stop would wait for.
"""

from __future__ import annotations

import asyncio

from sglang.srt.managers import data_parallel_controller as of
from sglang.srt.managers.tokenizer_manager import TokenizerManager

_WAIT_MS = 100
_LOOK_S = 0.1


def _event_loop(controller: of.DataParallelController) -> None:
    while True:
        controller.soft_watchdog.feed()
        if controller.recv_from_tokenizer.poll(_WAIT_MS):
            controller._request_dispatcher(of.sock_recv(controller.recv_from_tokenizer))


_drain_and_end = TokenizerManager.sigterm_watchdog


async def _sigterm_watchdog(manager: TokenizerManager) -> None:
    while not manager.gracefully_exit:
        await asyncio.sleep(_LOOK_S)
    await _drain_and_end(manager)  # finds that it need not wait


of.DataParallelController.event_loop = _event_loop
TokenizerManager.sigterm_watchdog = _sigterm_watchdog
