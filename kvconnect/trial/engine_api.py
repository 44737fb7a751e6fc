"""What vLLM and SGLang are asked for a trial, and how their answers are read."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvconnect.errors import Refused
from kvconnect.router.fleet import reports
from kvconnect.router.requests.engine_bodies import SGLANG_GENERATE
from kvconnect.trial.http_client import HttpClient, TrialFailed

NEW_TOKENS = 16  # of each answer, compared with one another
_COMPLETIONS = "/v1/completions"


class EngineName(StrEnum):
    """Which engine answers, as it says in ``/v1/models``."""

    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True)
class TrialReply:
    """What an engine answered to one prompt.

    Attributes:
        first_s: seconds until the first token.
        output: its tokens, or its text where it tells no tokens.
        prompt_tokens: tokens of the prompt; 0 if the engine does not say.
        device_tokens: tokens that the device still had; None if the engine does not say.
    """

    first_s: float
    output: tuple[int, ...] | str
    prompt_tokens: int = 0
    device_tokens: int | None = None


@dataclass(frozen=True)
class AskedEngine:
    """What an engine says of itself.

    Attributes:
        name: which engine it is.
        model: as requests name it.
        longest: tokens of its longest prompt; 0 if it does not say.
        version: its version; "" if it does not say.
        half: of a hand-off that a server of SGLang is, prefill or decode; else "".
        bootstrap_port: where a prefill server of SGLang meets decode servers; 0 if it does not say.
    """

    name: EngineName
    model: str
    longest: int
    version: str
    half: str = ""
    bootstrap_port: int = 0


@dataclass
class EngineClient:
    """Asks one engine, or a router, for greedy answers.

    Attributes:
        native: use SGLang's own API, which tells where cached tokens were.
    """

    http: HttpClient
    info: AskedEngine
    native: bool = field(init=False)

    def __post_init__(self) -> None:
        self.native = self.info.name is EngineName.SGLANG

    def body(self, prompt: str, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
        """Return the request for the greedy answer to a prompt."""
        if self.native:
            sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            return {"text": prompt, "sampling_params": sampling}
        body = {"model": self.info.model, "prompt": prompt, "max_tokens": new_tokens}
        return {**body, "temperature": 0, "ignore_eos": True}

    def ask(self, prompt: str, new_tokens: int = NEW_TOKENS) -> TrialReply:
        """Return the answer to a prompt; raises as :meth:`stream`."""
        return self.stream(self.body(prompt, new_tokens))

    def stream(self, body: Mapping[str, Any]) -> TrialReply:
        """Return the answer to a request.

        Raises:
            TrialFailed: the engine fails, is late, or answers what is no completion.
        """
        return self._stream_native(body) if self.native else self._stream_openai(body)

    def _stream_openai(self, body: Mapping[str, Any]) -> TrialReply:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        if self.info.name is EngineName.VLLM:
            more["return_token_ids"] = True
        tokens: list[int] = []
        text, first, counted = "", 0.0, 0
        started = time.perf_counter()
        for event in self.http.events(_COMPLETIONS, {**body, **more}):
            with _answers_of(self.http, _COMPLETIONS):
                chunk = json.loads(event)
                _raise_error(chunk)
                for choice in chunk["choices"]:
                    new = choice.get("token_ids") or []
                    text += choice.get("text") or ""
                    tokens += map(int, new)
                    if (new or choice.get("text")) and not first:
                        first = time.perf_counter() - started
                counted = int((chunk.get("usage") or {}).get("prompt_tokens") or counted)
        if not first:
            raise TrialFailed(f"{self.http.url}{_COMPLETIONS} answered without a token")
        return TrialReply(first, tuple(tokens) if tokens else text, counted)

    def _stream_native(self, body: Mapping[str, Any]) -> TrialReply:
        first, last = 0.0, {}
        text = ""
        started = time.perf_counter()
        for event in self.http.events(SGLANG_GENERATE, {**body, "stream": True}):
            with _answers_of(self.http, SGLANG_GENERATE):
                last = json.loads(event)
                _raise_error(last)
                first = first or time.perf_counter() - started
                piece = str(last["text"])
                # A server that streams incrementally sends the new part alone.
                text = piece if piece.startswith(text) else text + piece
        if not first:
            raise TrialFailed(f"{self.http.url}{SGLANG_GENERATE} answered without a token")
        with _answers_of(self.http, SGLANG_GENERATE):
            meta = last["meta_info"]
            details = meta.get("cached_tokens_details")
            device = int(details["device"]) if details else None
            if device is None and meta.get("cached_tokens") == 0:
                device = 0
            return TrialReply(first, text, int(meta["prompt_tokens"]), device)


def connect(http: HttpClient) -> EngineClient:
    """Ask a server what it is.

    Raises:
        TrialFailed: it does not answer, or not as an engine.
    """
    answer = http.get("/v1/models")
    try:
        models = reports.models_of(answer)
    except Refused as error:
        raise TrialFailed(f"{http.url}/v1/models: {error}: is it an engine's address?") from error
    model, entry = next(iter(models.items()))
    name = EngineName.SGLANG if entry.get("owned_by") == "sglang" else EngineName.VLLM
    longest = entry.get("max_model_len")
    longest = longest if isinstance(longest, int) and 0 < longest < 2**40 else 0
    info = AskedEngine(name, model, longest, "")
    return EngineClient(http, replace(info, **_more_of(http, name)))


def _more_of(http: HttpClient, name: EngineName) -> dict[str, Any]:
    """Return what else an engine says of itself, by the names in :class:`AskedEngine`."""
    try:
        answer = http.get("/version" if name is EngineName.VLLM else "/server_info")
        told = msgspec.json.decode(answer, type=_ServerInfo)
    except (TrialFailed, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}  # a router says nothing
    half = told.disaggregation_mode
    return {
        "version": told.version,
        "half": half if half in ("prefill", "decode") else "",
        "bootstrap_port": told.disaggregation_bootstrap_port,
    }


class _ServerInfo(msgspec.Struct):
    version: str = ""
    disaggregation_mode: str = ""
    disaggregation_bootstrap_port: Annotated[int, Meta(ge=0, lt=2**16)] = 0


class _answers_of:
    """Turns errors of reading an answer into one line that names its place."""

    def __init__(self, http: HttpClient, path: str) -> None:
        self._place = f"{http.url}{path}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | TypeError | KeyError | AttributeError | RecursionError):
            raise TrialFailed(
                f"{self._place} answered what is no completion: {error!r}: is it an engine's "
                "address?"
            ) from error


def _raise_error(chunk: Any) -> None:
    if isinstance(chunk, dict) and chunk.get("error"):
        raise TrialFailed(f"the engine ended the answer with an error: {chunk['error']}"[:300])
