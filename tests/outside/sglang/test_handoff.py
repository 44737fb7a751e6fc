"""SGLang's own suites for prefill and decode servers, with KVConnect between them."""

from __future__ import annotations

from typing import ClassVar

from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.pd_parity_kit import PDLogprobParityMixin

from tests.outside.sglang import servers


class TestParity(PDLogprobParityMixin, servers.Pair):
    baseline_args: ClassVar = [*servers.ON_CPU]
    parity_prompts: ClassVar = [
        [1] + [100 + i % 1000 for i in range(length)] for length in (4, 15, 16, 255, 256, 1500)
    ]
    parity_cached_prefix_min_prompt_tokens = 32


class TestPair(BasicAPIContractMixin, PauseResumeInPlaceMixin, servers.RunningPair):
    pause_num_requests = 8
    pause_max_new_tokens = 200
    pause_ignore_eos = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.pause_target_urls = [cls.prefill_url, cls.decode_url]
