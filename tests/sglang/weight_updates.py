"""SGLang's calls that change weights, on a rank without a server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvconnect.engines.sglang import weights


class Runner:
    """A model runner of a scheduler, whose weights are ``model``'s parameters."""

    is_draft_worker = False

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4)


class Serving:
    """SGLang's calls that change weights, as a scheduler's process makes them. ``offloads``: the
    scheduler, as far as it stores what a decode server has offloaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager as Updater,
        )
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.plugins.hook_registry import HookRegistry

        def done(*_: object) -> SimpleNamespace:
            return SimpleNamespace(success=True, message="")

        for name in ("begin_weight_update", "end_weight_update"):
            monkeypatch.setattr(Updater, name, done)
        monkeypatch.setattr(Updater, "update_weights_from_tensor", self._from_tensor)
        monkeypatch.setattr(Updater, "update_weights_from_disk", self._from_disk)
        monkeypatch.setattr(Scheduler, "flush_cache", lambda flushes: flushes)
        monkeypatch.setattr(Scheduler, "handle_update_weight_version", done)
        monkeypatch.setattr(ModelRunner, "load_model", lambda _: None)
        monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
        monkeypatch.setattr(HookRegistry, "_patched", set())
        monkeypatch.setattr(weights, "_watching", False)
        weights.watch()
        HookRegistry.apply_hooks()
        manager = SimpleNamespace(ongoing_backup={})
        self.offloads = SimpleNamespace(decode_offload_manager=manager)
        self.updater: Any = Updater
        self.scheduler: Any = Scheduler
        self.runner = Runner()
        self.load: Any = ModelRunner.load_model
        self._patch = monkeypatch
        self.start()

    def start(self) -> None:
        """Be another process, which loads the first weights."""
        self._patch.setattr(weights, "_state", weights._RankWeights())
        torch.nn.init.constant_(self.runner.model.weight, 1.0)
        self.load(self.runner)

    def begin(self) -> None:
        self.updater.begin_weight_update(
            SimpleNamespace(_session=None), SimpleNamespace(selector="all")
        )

    def part(self, version: str | None, *, flush: bool = True) -> None:
        """Load a part of the weights, and flush the cache in the same call unless told not to."""
        request = SimpleNamespace(weight_version=version, flush_cache=flush, idle=True)
        self.updater.update_weights_from_tensor(None, request)

    def close(self) -> None:
        self.updater.end_weight_update(None, SimpleNamespace())

    def end(self, version: str | None) -> None:
        torch.nn.init.constant_(self.runner.model.weight, 2.0)
        self.part(version, flush=False)
        self.close()

    def update_from_disk(self, folder: Path, *, flush: bool = True, idle: bool = True) -> None:
        """Load other weights, as one call that flushes the cache unless requests run."""
        request = SimpleNamespace(
            model_path=str(folder),
            load_format="auto",
            weight_version=None,
            flush_cache=flush,
            idle=idle,
        )
        self.updater.update_weights_from_disk(SimpleNamespace(scheduler=self.offloads), request)

    def _from_disk(self, updater: Any, request: Any) -> SimpleNamespace:
        torch.nn.init.constant_(self.runner.model.weight, 2.0)
        return self._from_tensor(updater, request)

    def _from_tensor(self, _updater: Any, request: Any) -> SimpleNamespace:
        if request.flush_cache and not self.scheduler.flush_cache(request.idle and self.offloads):
            return SimpleNamespace(success=False, message="Weights were updated, but")
        return SimpleNamespace(success=True, message="")

    def flush(self, done: bool = True) -> None:
        self.scheduler.flush_cache(self.offloads if done else False)
