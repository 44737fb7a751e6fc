"""SGLang's own suites for prefill and decode servers, with KVConnect between them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.pd_parity_kit import PDLogprobParityMixin

from tests.outside.sglang import servers
from tests.sglang import pd
from tests.sglang.server import plugin_path

FAULTY = Path(pd.__file__).with_name("faulty")


class TestParity(PDLogprobParityMixin, servers.Pair):
    baseline_args: ClassVar = [*servers.ON_CPU]
    parity_prompts: ClassVar = [
        [1] + [100 + i % 1000 for i in range(length)] for length in (4, 15, 16, 255, 256, 1500)
    ]
    parity_cached_prefix_min_prompt_tokens = 32


class TestControl(TestParity):
    """Negative control: a prefill server that sends other pages fails the suite."""

    parity_prompts: ClassVar = TestParity.parity_prompts[-1:]
    extra_prefill_env: ClassVar[dict[str, str]] = {
        **servers.Pair.extra_prefill_env,
        **plugin_path(FAULTY),
        "KVCONNECT_FAULTY": __file__,  # while this file exists
    }

    def test_logprob_parity(self) -> None:
        (reference,) = self._collect_references()
        self.launch_all()
        (prompt,) = self.parity_prompts
        with self.assertRaises(AssertionError):
            self._check_prompt_parity(prompt=prompt, reference=reference)


class TestPair(BasicAPIContractMixin, PauseResumeInPlaceMixin, servers.RunningPair):
    pause_num_requests = 8
    pause_max_new_tokens = 200
    pause_ignore_eos = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.pause_target_urls = [cls.prefill_url, cls.decode_url]
