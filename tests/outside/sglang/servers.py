"""How the test suites in SGLang's wheel start KVConnect's servers on a CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

os.environ["SGLANG_TEST_PD_DISAGG_BACKEND"] = "kvconnect"
# The suites start `python3` and `sglang`.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

from sglang.test.server_fixtures import disaggregation_fixture
from sglang.test.test_utils import (
    DEFAULT_URL_FOR_TEST,
    CustomTestCase,
    popen_launch_server,
    terminate_and_kill_process_tree,
)

from tests.engines.models import model_dir

START_S = 300.0
MODEL = str(model_dir("outside"))
ON_CPU = (
    *("--attention-backend", "torch_native", "--dtype", "float32"),
    *("--page-size", "16", "--max-total-tokens", "32768", "--chunked-prefill-size", "256"),
    *("--skip-server-warmup", "--sleep-on-idle"),
)
PAIR_ON_CPU = ("--device", "cpu", *ON_CPU)  # where the suite does not choose the device
LINKER = (
    "--enable-unified-cache-external-linker",
    *("--unified-cache-external-linker-backend", "dynamic"),
    "--unified-cache-external-linker-config",
    json.dumps(
        {
            "linker": "KVConnectLinker",
            "linker_module_path": "kvconnect.engines.sglang.linker",
            "linker_extra_config": {"host_bytes": "256MiB", "digest": "full"},
        }
    ),
)
DECODE = ("--disaggregation-decode-retraction-backup", "cpu_tensor")  # no CUDA


def environment(**settings: Any) -> dict[str, str]:
    """Return the environment of a server with KVConnect's ``settings``."""
    return {
        "OMP_NUM_THREADS": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        # Sending a cached prefix before the forward asks CUDA for an event.
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "false",
        "KVCONNECT_CONFIG": json.dumps(settings),
    }


class Pair(disaggregation_fixture.PDDisaggregationServerBase):
    """A prefill and a decode server of the suites' own fixture, not started yet."""

    model = MODEL
    decode_base_gpu_id = 0
    extra_prefill_args = PAIR_ON_CPU
    extra_decode_args = (*PAIR_ON_CPU, *DECODE)
    extra_prefill_env: ClassVar[dict[str, str]] = environment(transport="auto")
    extra_decode_env: ClassVar[dict[str, str]] = environment(transport="tcp")


class RunningPair(Pair):
    """The same, started for all tests of a class. ``process`` is the one that the suites watch."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.launch_all()
        cls.process = cls.process_decode


class Single(CustomTestCase):
    """One server for all tests of a class."""

    model = MODEL
    base_url = DEFAULT_URL_FOR_TEST
    arguments: ClassVar[tuple[str, ...]] = ()
    environment: ClassVar[dict[str, str]] = environment()

    @classmethod
    def setUpClass(cls) -> None:
        cls.process = popen_launch_server(
            cls.model,
            cls.base_url,
            timeout=START_S,
            other_args=[*ON_CPU, *cls.arguments],
            env=cls.environment,
        )

    @classmethod
    def tearDownClass(cls) -> None:
        terminate_and_kill_process_tree(cls.process, wait_timeout=60)
