"""SGLang's gRPC API without a model: answers each call as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvconnect.router.connections.sglang_grpc import SERVICE
from kvconnect.router.connections.sglang_messages import message

Answer = Callable[[bytes, grpc.aio.ServicerContext], AsyncIterator[bytes]]


class GrpcEngine(grpc.GenericRpcHandler):
    """One server. ``answers``: call -> what answers it. ``asked`` has each request with its call,
    ``ended`` the calls that are over, however."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.ended: list[str] = []
        self.port = 0
        self._answers = answers
        self._server: grpc.aio.Server

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        name = call.method.removeprefix(SERVICE)
        answer = self._answers.get(name)
        if answer is None:
            return None

        async def serve(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            self.asked.append((name, request))
            try:
                async for each in answer(request, context):
                    yield each
            finally:
                self.ended.append(name)

        return grpc.unary_stream_rpc_method_handler(serve)

    async def start(self) -> None:
        """Serve, on the port of before if there was one."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """End at once, with all connections."""
        await self._server.stop(0)


@asynccontextmanager
async def serving(**answers: Answer) -> AsyncIterator[GrpcEngine]:
    """Serve calls; health and models are served in any case."""
    well = says(message("HealthCheckResponse")(healthy=True))
    models = says(message("ListModelsResponse")(models=[{"id": "model", "max_model_len": 4096}]))
    engine = GrpcEngine({"HealthCheck": well, "ListModels": models, **answers})
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def says(*messages: Any, then: Callable[[grpc.aio.ServicerContext], Any] | None = None) -> Answer:
    """Return an answer of some messages; ``then`` is awaited after them."""

    async def answer(_: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for each in messages:
            yield each.SerializeToString()
        if then is not None:
            await then(context)

    return answer


def fails(code: grpc.StatusCode, why: str) -> Callable[[grpc.aio.ServicerContext], Any]:
    """Return what ends a call with an error."""
    return lambda context: context.abort(code, why)


async def never(_: grpc.aio.ServicerContext) -> None:
    """Send nothing more."""
    await asyncio.Event().wait()


def chunk(body: bytes = b"", *, last: bool = False) -> Any:
    """Return a message of an OpenAI answer."""
    return message("OpenAIStreamChunk")(json_chunk=body, finished=last)
