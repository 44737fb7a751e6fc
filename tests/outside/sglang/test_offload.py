"""SGLang's own suites for its caches, on servers whose cache goes on in KVConnect's tiers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import ClassVar

from sglang.test import kl_test_utils
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.radix_cache_server_kit import run_radix_attention_test
from sglang.test.kits.unified_radix_cache_kit import AccuracyTwoPassMixin, UnifiedRadixTreeTestMixin

from tests.engines.models import TEXT, prompt_tokens
from tests.outside.sglang import servers
from tests.sglang import storage_server
from tests.sglang.server import plugin_path

HICACHE = Path(storage_server.__file__).with_name("hicache")


# Prompts that `kl_divergence_kit` would load from a data set: it looks for them here first.
_NAME = (servers.MODEL, kl_test_utils.DEFAULT_PROMPT_TOKENS, kl_test_utils.DEFAULT_NUM_SAMPLES)
kl_test_utils._cached_input_ids["_".join(map(str, _NAME))] = [
    prompt_tokens(600 + 150 * number, 800 * number) for number in range(8)
]


class _Suites(AbortAllMixin, KLDivergenceMixin, UnifiedRadixTreeTestMixin):
    test_gsm8k = None  # needs a model that can do arithmetic
    input_ids = tuple(prompt_tokens(700, 1000 * number) for number in range(4))
    max_new_tokens = 32
    abort_all_num_requests = 8
    abort_all_max_new_tokens = 2000

    kl_div_max_samples = 8
    kl_div_thres = 0.0025
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = 32

    def test_multi_turn(self) -> None:
        text = TEXT.read_text(encoding="utf-8")
        talks = [{"value": text[start : start + 300]} for start in range(0, 24_000, 500)]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # in the form of ShareGPT
            json.dump([{"conversations": talks[i : i + 2]} for i in range(len(talks) - 1)], file)
            file.flush()
            run_multiturn_cache_hit_test(self.base_url, self.model, dataset_path=file.name)

    def test_radix_tree(self) -> None:
        run_radix_attention_test(self.base_url)


class TestStorage(_Suites, AccuracyTwoPassMixin, servers.Single):
    """HiCache with KVConnect as its storage."""

    test_gsm8k_two_passes = None  # needs a model that can do arithmetic
    l3_prefetch_page_size = 16
    arguments = (
        *storage_server.ARGS,
        *("--hicache-storage-backend-extra-config", json.dumps(storage_server.STORAGE)),
    )
    environment: ClassVar = {**servers.environment(), **plugin_path(HICACHE)}


class TestLinker(_Suites, AnthropicMessagesMixin, servers.Single):
    """SGLang's unified cache with KVConnect as its host tier."""

    api_key = "none"
    arguments = servers.LINKER
