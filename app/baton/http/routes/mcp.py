"""Serve `POST /mcp`: four of the gateway's own routes as tools of the Model Context Protocol.

Each request stands for itself, by the streamable HTTP transport without sessions. The SDK speaks the
protocol; a tool's call is a request to one of our routes, with the key, the limits and the tenant of the
request to `/mcp`. No tool but these is run.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import structlog
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.types import Message

from baton import __version__
from baton.admission.fair_threads import in_own_thread
from baton.engines.backend import Json, Operation
from baton.errors import BatonError, BodyTooLarge, InternalError, InvalidRequest, NotFound
from baton.http.answer import answer, unless_gone
from baton.http.body.json import is_small
from baton.http.request import Gateway, gateway_of, in_a_thread, may_use, read_json, replay, state_of
from baton.http.routes import handoffs, pooling
from baton.relay.asked import HandoffIds, Label, Seconds, parse_options

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server
    from mcp.types import CallToolResult, ContentBlock

router = APIRouter()
log = structlog.get_logger("baton.mcp")
SDK = "mcp.server.streamable_http_manager"
MAX_BODY_BYTES = 4 * 1024 * 1024
"""Largest body, the SDK's own limit: it is parsed on the event loop."""


class Arguments(BaseModel):
    """The arguments of a tool."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Ask(Arguments):
    """Ask a language model of this gateway a question."""

    prompt: str = Field(min_length=1, description="The question.")
    system: str | None = Field(None, description="What the model is told first.")
    model: str | None = Field(None, description="Name of the model; needed where several generate text.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of the answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="0: always the likeliest token.")
    sources: HandoffIds = Field(
        [], alias="from", description="Id of a handoff that it continues, or several."
    )
    save: bool = Field(False, description="Whether question and answer are saved as a handoff.")


class MapScene(Arguments):
    """Map a GeoTIFF or JPEG 2000 file with a map model: areas of each class, and a picture of them."""

    url: str | None = Field(None, description="Address of the file, on a host that the gateway fetches from.")
    data: str | None = Field(None, description="The file itself, in base64; small ones only.")
    model: str | None = Field(None, description="Name of the model; needed where several map.")
    indices: list[int] | None = Field(
        None, description="The file's bands for the model, counted from 0, in the model's order."
    )


class HandoffSave(Arguments):
    """Compute a context once and save it as a handoff, which later questions then continue."""

    model: str = Field(description="Name of the model.")
    prompt: str | None = Field(None, description="The context, a plain text.")
    messages: list[dict[str, Any]] | None = Field(None, description="The context, a conversation.")
    sources: HandoffIds = Field(
        [], alias="from", description="Id of a handoff that it continues, or several."
    )
    label: Label | None = Field(None, description="A name for people.")
    ttl_s: Seconds | None = Field(None, description="Seconds that it lives.")
    pin: bool = Field(False, description="Whether its KV is exempt from eviction.")


class HandoffList(Arguments):
    """List your handoffs, the newest first."""

    limit: Annotated[int, Field(ge=1, le=100)] = Field(20, description="Most of them.")
    after: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Begin behind the handoff with this id."
    )


@dataclass(frozen=True)
class Result:
    """The result of a tool.

    Attributes:
        fields: as an object.
        text: the same for a model; None: the object as JSON.
        picture: a PNG in base64.
    """

    fields: Json
    text: str | None = None
    picture: str | None = None


async def ask(request: Request, wanted: Ask) -> Result:
    """Answer by `POST /v1/chat/completions`."""
    system = [{"role": "system", "content": wanted.system}] if wanted.system is not None else []
    body = _given(wanted, "model", "max_tokens", "temperature")
    body["messages"] = [*system, {"role": "user", "content": wanted.prompt}]
    if wanted.sources or wanted.save:
        body["handoff"] = {"from": wanted.sources} if wanted.sources else {}
        body["handoff"] |= {"save": True} if wanted.save else {}
    inner = await _inner(request, body)
    found = await _read(inner, await answer(inner, Operation.CHAT))
    choice = found["choices"][0]
    text = choice["message"].get("content") or ""
    fields = {"text": text, "finish_reason": choice.get("finish_reason"), "usage": found.get("usage")}
    handoff = {"handoff": found["handoff"]} if "handoff" in found else {}
    told = f"{text}\n\n[handoff: {handoff['handoff'].get('id')}]" if wanted.save and handoff else text
    return Result({"model": found.get("model")} | fields | handoff, told)


async def map_scene(request: Request, wanted: MapScene) -> Result:
    """Answer by `POST /pooling`."""
    if (wanted.url is None) is (wanted.data is None):
        raise InvalidRequest("Give either 'url' or 'data'.", param="url")
    data: Json = {"data_format": "url", "data": wanted.url}
    if wanted.data is not None:
        data = {"data_format": "b64_json", "data": wanted.data}
    data |= {"out_data_format": "b64_json", "outputs": ["preview"]} | _given(wanted, "indices")
    inner = await _inner(request, _given(wanted, "model") | {"data": data})
    found = (await _read(inner, await pooling.create_pooling(inner)))["data"]
    kept = {name: value for name, value in found.items() if name not in ("data", "files")}
    return Result(kept, picture=found["data"])


async def handoff_save(request: Request, wanted: HandoffSave) -> Result:
    """Answer by `POST /v1/handoffs`."""
    body = _given(wanted, "model", "prompt", "messages", "label", "ttl_s") | {"pin": wanted.pin}
    inner = await _inner(request, body | ({"from": wanted.sources} if wanted.sources else {}))
    return Result(await _read(inner, await handoffs.create_handoff(inner)))


async def handoff_list(request: Request, wanted: HandoffList) -> Result:
    """Answer by `GET /v1/handoffs`."""
    return Result(await handoffs.list_handoffs(request, limit=wanted.limit, after=wanted.after))


@dataclass(frozen=True)
class OwnTool:
    """A tool.

    Attributes:
        arguments: their form; its docstring is the tool's description.
        call: what it does.
        serves: whether a gateway has what it needs.
        reads: whether it changes nothing.
    """

    arguments: type[Arguments]
    call: Callable[[Request, Any], Awaitable[Result]]
    serves: Callable[[Gateway], bool]
    reads: bool = True


def _hands_over(gateway: Gateway) -> bool:
    return any(engine.supports_handoffs for engine in gateway.fleet.engines)


TOOLS: Mapping[str, OwnTool] = {
    "ask": OwnTool(
        Ask, ask, lambda gateway: any(each.generates for each in gateway.fleet.engines), reads=False
    ),
    "map_scene": OwnTool(
        MapScene, map_scene, lambda gateway: any(not each.generates for each in gateway.fleet.engines)
    ),
    "handoff_save": OwnTool(HandoffSave, handoff_save, _hands_over, reads=False),
    "handoff_list": OwnTool(HandoffList, handoff_list, _hands_over),
}


UNREADABLE = b'"message":"Validation error: '
INVALID = {
    "code": -32602,
    "message": "This is no message of the Model Context Protocol: send a JSON-RPC 2.0 object, as SDKs do.",
}


@router.post("/mcp", response_class=Response)
async def model_context_protocol(request: Request) -> Response:
    """Answer one message of the Model Context Protocol (streamable HTTP): its tools ask this gateway.

    The tools are `ask`, `map_scene`, `handoff_save` and `handoff_list`.
    """
    gateway = gateway_of(request)
    if not gateway.settings.edge.mcp:
        raise NotFound("The Model Context Protocol is switched off here (setting edge.mcp).")
    if len(await request.body()) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"A message of the Model Context Protocol has at most {MAX_BODY_BYTES} bytes.")
    await read_json(request, gateway.settings.limits)  # by our limits; the SDK has none
    return await unless_gone(request, _answered(request))


async def _answered(request: Request) -> Response:
    """Have the SDK answer a request, with a server of its own, and return what it sends."""
    try:
        await in_own_thread(import_module, SDK)  # the first time it takes a second of processor time
    except ModuleNotFoundError:  # a gateway of servers elsewhere alone, without vLLM
        raise NotFound(
            "The Model Context Protocol needs its SDK, which comes with vLLM: `pip install 'mcp>=2.3,<3'` on "
            "the gateway's machine."
        ) from None
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    manager = StreamableHTTPSessionManager(_server(request), json_response=True, stateless=True)
    async with manager.run():
        await manager.handle_request(request.scope, replay(await request.body()), send)
    start, *rest = sent
    headers = Headers(raw=start.get("headers", []))
    kept = {name: value for name, value in headers.items() if name != "content-length"}
    body = b"".join(message.get("body", b"") for message in rest)
    if UNREADABLE in body:  # the SDK goes on with what pydantic says of its own types
        body = json.dumps({"jsonrpc": "2.0", "id": None, "error": INVALID}).encode()
    return Response(body, start["status"], kept)


def _server(request: Request) -> Server[Any]:
    """Make the server of one request, whose tools are what this gateway can do."""
    from mcp.server.lowlevel import Server
    from mcp.shared.exceptions import MCPError
    from mcp.types import INVALID_PARAMS, ListToolsResult, Tool, ToolAnnotations

    gateway = gateway_of(request)
    served = {name: tool for name, tool in TOOLS.items() if tool.serves(gateway)}

    async def list_tools(_context: Any, _params: Any) -> ListToolsResult:
        tools = [
            Tool(
                name=name,
                description=tool.arguments.__doc__,
                input_schema=tool.arguments.model_json_schema(),
                annotations=ToolAnnotations(read_only_hint=tool.reads, destructive_hint=False),
            )
            for name, tool in served.items()
        ]
        return ListToolsResult(tools=tools)

    async def call_tool(_context: Any, params: Any) -> CallToolResult:
        tool = served.get(params.name)
        if tool is None:
            raise MCPError(INVALID_PARAMS, f"There is no such tool here; there are: {', '.join(served)}.")
        return await _called(request, partial(_run, request, tool, params.arguments or {}))

    models = ", ".join(str(card["id"]) for card in gateway.fleet.cards(partial(may_use, request)))
    told = f"Models served here: {models}."
    return Server(
        "baton", version=__version__, instructions=told, on_list_tools=list_tools, on_call_tool=call_tool
    )


async def _run(request: Request, tool: OwnTool, arguments: Json) -> Result:
    return await tool.call(request, parse_options(tool.arguments, arguments))


async def _called(request: Request, work: Callable[[], Awaitable[Result]]) -> CallToolResult:
    """Return the result of a tool; an error is one too, which the model at the other end reads."""
    from mcp.types import CallToolResult, ImageContent, TextContent

    try:
        result = await work()
    except BatonError as error:
        return _failed(request, error)
    except Exception as error:  # the border to the SDK, which would hide it
        log.error("mcp_tool_failed", exc_info=error)
        return _failed(request, InternalError())
    text = json.dumps(result.fields) if result.text is None else result.text
    content: list[ContentBlock] = [TextContent(text=text)]
    if result.picture is not None:
        content.append(ImageContent(data=result.picture, mime_type="image/png"))
    return CallToolResult(content=content, structured_content=result.fields)


def _failed(request: Request, error: BatonError) -> CallToolResult:
    from mcp.types import CallToolResult, TextContent

    state = state_of(request.scope)
    state.note(error)
    again = f" Try again after {error.retry_after_s} s." if error.retry_after_s is not None else ""
    fields = error.body(state.context.request_id)
    return CallToolResult(
        content=[TextContent(text=f"{error.message}{again}")], structured_content=fields, is_error=True
    )


def _given(wanted: Arguments, *names: str) -> Json:
    """Return the arguments of these names that were given."""
    return {name: value for name in names if (value := getattr(wanted, name)) is not None}


async def _inner(request: Request, body: Json) -> Request:
    """Make the request that a tool sends to one of our routes, on behalf of the one to `/mcp`."""
    written = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"accept", b"application/json")]
    return Request({**request.scope, "headers": headers, "query_string": b""}, replay(written))


async def _read(request: Request, response: Response) -> Json:
    """Read the JSON of a route's answer."""
    body = bytes(response.body)
    found: Json = (
        json.loads(body) if is_small(body) else await in_a_thread(request, partial(json.loads, body))
    )
    return found
