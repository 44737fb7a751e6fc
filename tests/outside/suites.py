"""Which programs of others are run, how, and which are not and why."""

from __future__ import annotations

from typing import NamedTuple

VLLM, SGLANG, PEERS = ".venv", ".venv-sglang", ".venv-peers"


class Suite(NamedTuple):
    """One run of pytest. ``quick``: the part of it that CI runs, none if empty."""

    name: str
    environment: str
    tests: str
    quick: str = ""


SUITES = (
    Suite(
        "SGLang's suites for prefill and decode",
        SGLANG,
        "tests/outside/sglang/test_handoff.py",
        "tests/outside/sglang/test_handoff.py::TestParity",
    ),
    Suite("SGLang's suites for caches", SGLANG, "tests/outside/sglang/test_offload.py"),
    Suite("SGLang's suite for sessions", SGLANG, "tests/outside/sglang/test_sessions.py"),
    Suite("routers in front of SGLang", SGLANG, "tests/outside/sglang/test_fronts.py"),
    Suite("routers and clients of vLLM", VLLM, "tests/outside/vllm/test_fronts.py"),
)


class Program(NamedTuple):
    """A program, the package and environment that it is in, what it was used on, and how the names
    of its cases begin."""

    name: str
    package: str
    environment: str
    used_on: str
    cases: tuple[str, ...]


_VLLM_PAIR = "prefill and decode on vLLM"
_OUR_ROUTER = f"`kvconnect router`, {_VLLM_PAIR}"
_SGLANG_PAIR = "prefill and decode on SGLang"

PROGRAMS = (
    Program("SGLang `pd_parity_kit`", "sglang", SGLANG, _SGLANG_PAIR, ("TestParity",)),
    Program(
        "SGLang `basic_api_contract_kit`, `pause_generation_kit`",
        "sglang",
        SGLANG,
        _SGLANG_PAIR,
        ("TestPair",),
    ),
    *(
        Program(
            "SGLang `unified_radix_cache_kit`, `radix_cache_server_kit`, `cache_hit_kit`, "
            f"`kl_divergence_kit`, `abort_timeout_kit`{more}",
            "sglang",
            SGLANG,
            used_on,
            (case,),
        )
        for used_on, case, more in (
            ("HiCache storage", "TestStorage", ""),
            ("linker", "TestLinker", ", `anthropic_messages_kit`"),
        )
    ),
    Program("SGLang `streaming_session_kit`", "sglang", SGLANG, "linker", ("TestSessions",)),
    Program(
        "sglang-router", "sglang-router", SGLANG, _SGLANG_PAIR, ("TestFront.test_sglang_router",)
    ),
    Program("smg", "smg", f"{PEERS}/smg", _SGLANG_PAIR, ("TestFront.test_smg",)),
    Program(
        "vllm-router",
        "vllm-router",
        f"{PEERS}/vllm-router",
        _VLLM_PAIR,
        ("test_fronts.test_front[vllm_router]",),
    ),
    Program(
        "OpenAI SDK",
        "openai",
        VLLM,
        _OUR_ROUTER,
        ("test_fronts.test_front[own_router]", "test_fronts.test_client[responses]"),
    ),
    Program(
        "Anthropic SDK",
        "anthropic",
        VLLM,
        _OUR_ROUTER,
        ("test_fronts.test_client[messages]", "test_fronts.test_client[streamed_messages]"),
    ),
    Program(
        "LangChain",
        "langchain-openai",
        f"{PEERS}/langchain",
        _OUR_ROUTER,
        ("test_fronts.test_client[langchain]",),
    ),
)

NOT_RUNNABLE = {
    "smg 1.13 in front of vLLM": (
        "over HTTP it passes no `kv_transfer_params`; answers are right, decode computes all"
    ),
    "SGLang `basic_scheduler_stress_kit`, `basic_decode_correctness_kit`": (
        "the answers must name capitals: needs trained weights"
    ),
    "SGLang `unified_radix_cache_kit`, its gsm8k": "needs trained weights and a data set",
    "SGLang `abort_timeout_kit` on prefill and decode": (
        "SGLang's `mini_lb` has no `/abort_request`"
    ),
}
