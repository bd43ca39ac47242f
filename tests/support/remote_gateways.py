"""Gateways whose engine is another server on a loopback port, and small servers that misbehave on request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from baton.config.groups import EngineSettings
from baton.engines.elsewhere.engine import RemoteEngine
from baton.engines.fake.engine import FakeEngine
from support.gateways import FakeGateway, run_fake
from support.raw_requests import wait_for

CARD = {"id": "far", "object": "model", "created": 1, "owned_by": "vllm", "root": "/home/secret"}


def settings_of(url: str, name: str = "near", **more: Any) -> EngineSettings:
    return EngineSettings(**({"name": name, "model": "far", "url": url} | more))


def remote(url: str, name: str = "near", *, tenants: bool = False, **more: Any) -> RemoteEngine:
    """An engine that the server at `url` answers for, where its model is called `far` unless one is named."""
    return RemoteEngine(settings_of(url, name, **more), tenants=tenants)


@contextmanager
def run_near(*engines: RemoteEngine | FakeEngine, **overrides: Any) -> Iterator[FakeGateway]:
    """A gateway with these engines, the settings of which it has too."""
    served = tuple(
        engine._settings
        if isinstance(engine, RemoteEngine)
        else EngineSettings(name=engine.name, model="fake")
        for engine in engines
    )
    with run_fake(*engines, **({"engines": served} | overrides)) as gateway:
        yield gateway


@contextmanager
def both(far: FakeEngine, **options: Any) -> Iterator[tuple[FakeGateway, FakeGateway]]:
    """A gateway with an engine named `near`, and the gateway that answers for it."""
    near_options = options.pop("near", {})
    with ExitStack() as stack:
        there = stack.enter_context(run_fake(far, **options.pop("far_settings", {})))
        here = stack.enter_context(run_near(remote(there.url, model=far.name, **options), **near_options))
        yield here, there


@dataclass
class Asked:
    """One request that the other server got."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    raw_headers: list[tuple[bytes, bytes]]
    left: threading.Event = field(default_factory=threading.Event)


Answering = Callable[[Asked], Any]


@dataclass
class OtherServer:
    """A small server with OpenAI's API, that is no Baton.

    Attributes:
        url: where it answers.
        answer: makes the answer to each `POST`; a test replaces it.
        models: answer to `/v1/models`; None: there is no such route.
        peer: answer to `/v1/peer`; by default it has no such route.
        asked: the requests so far, but those for `/v1/models` and `/v1/peer`.
        looks: the requests for `/v1/models` so far.
    """

    url: str = ""
    answer: Answering = lambda asked: JSONResponse(completion(asked.body["model"], "hello"))
    models: Callable[[], Response] = lambda: JSONResponse({"object": "list", "data": [CARD]})
    peer: Callable[[], Response] = lambda: JSONResponse({"detail": "Not Found"}, 404)
    asked: list[Asked] = field(default_factory=list)
    looks: list[Asked] = field(default_factory=list)

    async def handle(self, request: Request) -> Response:
        body = await request.body()
        asked = Asked(
            request.method,
            request.url.path,
            dict(request.headers),
            json.loads(body) if body else None,
            request.headers.raw,
        )
        if request.method == "GET" and request.url.path == "/v1/models":
            self.looks.append(asked)
            return self.models()
        if request.method == "GET":
            return self.peer()
        self.asked.append(asked)
        answer = self.answer(asked)
        if asyncio.iscoroutine(answer):
            watch = asyncio.ensure_future(_left(request, asked))
            try:
                answer = await answer
            finally:
                watch.cancel()
        assert isinstance(answer, Response)
        return answer


async def _left(request: Request, asked: Asked) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    asked.left.set()


@contextmanager
def other_server(**tls: Any) -> Iterator[OtherServer]:
    """Run one in a thread."""
    server = OtherServer()
    routes = [Route("/{path:path}", server.handle, methods=["GET", "POST"])]
    config = uvicorn.Config(
        Starlette(routes=routes), host="127.0.0.1", port=0, log_config=None, lifespan="off", **tls
    )
    running = uvicorn.Server(config)
    running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # of older versions
    thread = threading.Thread(target=lambda: asyncio.run(running.serve()))
    thread.start()
    try:
        wait_for(lambda: running.started, "the server started", 20)
        port = running.servers[0].sockets[0].getsockname()[1]
        server.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        yield server
    finally:
        running.should_exit = running.force_exit = True
        thread.join(20)


def completion(model: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    } | more


def chunk(text: str, **more: Any) -> bytes:
    return f"data: {json.dumps(completion('far', text) | {'usage': None} | more)}\n\n".encode()


USAGE = b'data: {"id":"c","object":"text_completion","model":"far","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


def streamed(*parts: bytes | float | Exception) -> StreamingResponse:
    """A stream of these bytes; a number is a pause in seconds, an exception cuts the connection."""

    async def events() -> AsyncIterator[bytes]:
        for part in parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, bytes):
                yield part
            else:
                await asyncio.sleep(part)

    return StreamingResponse(events(), media_type="text/event-stream")


def error(status: int, headers: dict[str, str] | None = None, **fields: Any) -> JSONResponse:
    return JSONResponse({"error": fields}, status, headers)


def complete(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post(
        "/v1/completions", json={"model": "near", "prompt": "one two three", "max_tokens": 4} | more
    )


@contextmanager
def asking(gateway: FakeGateway, server: OtherServer) -> Iterator[tuple[httpx.Client, OtherServer]]:
    """A client of a gateway, and the server behind it, which was asked nothing yet and answers "hello"."""
    server.asked.clear()
    server.answer = lambda _: JSONResponse(completion("far", "hello"))
    with gateway.client() as client:
        yield client, server
