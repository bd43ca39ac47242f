"""Build vLLM's own serving handlers for an engine, and choose the one that answers an operation."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import RootModel, TypeAdapter
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest, ClassificationResponse
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest, EmbeddingResponse
from vllm.entrypoints.pooling.pooling.protocol import PoolingRequest, PoolingResponse
from vllm.entrypoints.pooling.scoring.protocol import (
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.renderers import merge_kwargs
from vllm.tasks import POOLING_TASKS
from vllm.utils.mistral import is_mistral_tokenizer

from baton.engines.port import Operation
from baton.engines.vllm.bodies import countable, readable_calls, require_honoured_tools
from baton.engines.vllm.client import WatchedClient
from baton.engines.vllm.errors import from_response
from baton.telemetry.ids import RequestContext

BEFORE_THE_ENGINE = ("response.created", "response.in_progress")
"""Events that vLLM sends before the engine has accepted the request."""
BEFORE_MORE = (*BEFORE_THE_ENGINE, "response.output_item.done")
"""Events that are held back until the next one."""
NULL = RootModel[None](None)
"""A null that is written where nulls are left out."""
Method = Callable[[Any, Request], Awaitable[Any]]


@dataclass(frozen=True)
class Handler:
    """How vLLM answers one operation.

    Attributes:
        request: type of its request body.
        response: type of its answer in one piece.
        handler: attribute of the state that holds the serving object, and the object's method.
        dump: options of `model_dump_json` with which vLLM's own router writes the answer.
    """

    request: Any
    response: type[Any]
    handler: tuple[str, str]
    dump: dict[str, Any]


HANDLERS: dict[Operation, Handler] = {
    Operation.COMPLETIONS: Handler(
        CompletionRequest,
        CompletionResponse,
        ("openai_serving_completion", "create_completion"),
        {},
    ),
    Operation.CHAT: Handler(
        ChatCompletionRequest,
        ChatCompletionResponse,
        ("openai_serving_chat", "create_chat_completion"),
        {},
    ),
    Operation.RESPONSES: Handler(
        ResponsesRequest,
        ResponsesResponse,
        ("openai_serving_responses", "create_responses"),
        {"by_alias": True},
    ),
    Operation.MESSAGES: Handler(
        AnthropicMessagesRequest,
        AnthropicMessagesResponse,
        ("anthropic_serving_messages", "create_messages"),
        {"exclude_none": True, "warnings": False},  # of a call's arguments that are no object
    ),
    Operation.COUNT_TOKENS: Handler(
        AnthropicCountTokensRequest,
        AnthropicCountTokensResponse,
        ("anthropic_serving_messages", "count_tokens"),
        {"exclude_none": True},
    ),
    Operation.EMBEDDINGS: Handler(EmbeddingRequest, EmbeddingResponse, ("serving_embedding", "__call__"), {}),
    Operation.POOLING: Handler(PoolingRequest, PoolingResponse, ("serving_pooling", "__call__"), {}),
    Operation.CLASSIFY: Handler(
        ClassificationRequest, ClassificationResponse, ("serving_classification", "__call__"), {}
    ),
    Operation.SCORE: Handler(ScoreRequest, ScoreResponse, ("serving_scores", "__call__"), {}),
    Operation.RERANK: Handler(RerankRequest, RerankResponse, ("serving_scores", "__call__"), {}),
    Operation.TOKENIZE: Handler(
        TokenizeRequest, TokenizeResponse, ("serving_tokenization", "create_tokenize"), {}
    ),
    Operation.DETOKENIZE: Handler(
        DetokenizeRequest, DetokenizeResponse, ("serving_tokenization", "create_detokenize"), {}
    ),
}


class Handlers:
    """The serving handlers of one engine.

    Args:
        state: the application state that vLLM's factory filled.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._parsers = {operation: TypeAdapter(route.request) for operation, route in HANDLERS.items()}

    @classmethod
    async def build(cls, client: WatchedClient, namespace: Namespace, *, plugin: bool = False) -> Handlers:
        """Build the handlers with vLLM's own factory, as its API server does at its start.

        Args:
            client: the engine.
            namespace: vLLM's serving options.
            plugin: whether an IO processor plugin does this engine's pooling. vLLM's pooling handlers are
                left out then: they would make a second instance of it.
        """
        state = State()
        tasks = await client.get_supported_tasks()
        if plugin:
            tasks = tuple(task for task in tasks if task not in POOLING_TASKS)
        # vLLM's own server passes the namespace that the engine's configuration was made from, and with it
        # the reasoning parser of the settings or of the model's configuration.
        namespace.structured_outputs_config = client.vllm_config.structured_outputs_config
        # The wrapper answers everything an EngineClient does.
        await init_app_state(client, state, namespace, tasks)
        if (messages := getattr(state, "anthropic_serving_messages", None)) is not None:
            messages.messages_full_converter = _with_any_arguments(messages.messages_full_converter)
        return cls(state)

    def method(self, operation: Operation) -> Method | None:
        """Return the handler's method that answers `operation`; None: the model does not support it."""
        attribute, method = HANDLERS[operation].handler
        serving = getattr(self._state, attribute, None)
        return getattr(serving, method) if serving is not None else None

    @property
    def reads_calls(self) -> bool:
        """Whether calls of tools are found in what the model says: as vLLM's chat handler decides it."""
        online = self._state.serving_tokenization.online_renderer
        parser = online.parser
        named = parser is not None and parser.tool_parser_cls is not None
        return named or online.use_harmony or is_mistral_tokenizer(online.renderer.tokenizer)

    def parse(self, operation: Operation, body: dict[str, Any]) -> Any:
        """Parse a body as vLLM's request type.

        Raises pydantic's ValidationError, and InvalidRequest for a past call that cannot be read or a tool
        that cannot be honoured.
        """
        if operation is Operation.RESPONSES:
            require_honoured_tools(body, reads_calls=self.reads_calls)
        elif operation is Operation.COUNT_TOKENS and not self.reads_calls:
            body = countable(body)
        return self._parsers[operation].validate_python(readable_calls(body))

    async def render(self, body: dict[str, Any]) -> str:
        """Render a conversation with the model's chat template, by the renderer of chat requests.

        Raises what vLLM raises: anything.
        """
        request = self.parse(Operation.CHAT, body)
        online = self._state.serving_tokenization.online_renderer
        unused = request.tool_choice == "none" and online.exclude_tools_when_tool_choice_none
        tools = [tool.model_dump() for tool in request.tools] if request.tools and not unused else None
        refused = online.validate_chat_template(
            request_chat_template=request.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
            trust_request_chat_template=online.trust_request_chat_template,
        )
        if refused is not None:
            raise from_response(refused)
        params = request.build_chat_params(
            online.chat_template, online.chat_template_content_format
        ).with_defaults(
            merge_kwargs(online.default_chat_template_kwargs, {"tools": tools, "tokenize": False})
        )
        _, prompt = await online.renderer.render_messages_async(request.messages, params)
        return str(prompt["prompt"])

    async def cards(self) -> list[dict[str, Any]]:
        """List the engine's models in OpenAI's shape."""
        models = await self._state.openai_serving_models.show_available_models()
        return [card.model_dump() for card in models.data]


def synthetic_request(context: RequestContext) -> Request:
    """Make the HTTP request that vLLM's handlers get: Baton's id and the trace context, no client headers."""
    headers = [(b"x-request-id", context.request_id.encode())]
    if context.traceparent:
        headers.append((b"traceparent", context.traceparent.encode()))
    if context.tracestate:
        headers.append((b"tracestate", context.tracestate.encode("latin-1")))
    return Request({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers})


async def events(operation: Operation, generator: AsyncIterator[Any]) -> AsyncIterator[str]:
    """Yield a handler's stream as server-sent events; `/v1/responses` yields objects, the others text.

    vLLM sends the first two events of a response before the engine has accepted the request. They are held
    back until the third, so that a request that the engine refuses still gets an HTTP status of its own. An
    item that is done is held back for one event, which says whether the answer was cut there.
    """
    if operation is not Operation.RESPONSES:
        async for event in generator:
            yield event
        return
    held: list[Any] = []
    async for event in generator:
        if event.type == "response.completed":
            mark_cut(event.response, *(each.item for each in held if hasattr(each, "item")))
        held.append(event)
        if event.type not in BEFORE_MORE:
            yield "".join(map(_written, held))
            held = []
    if held and held[-1].type not in BEFORE_THE_ENGINE:
        yield "".join(map(_written, held))


def mark_cut(response: Any, *items: Any) -> None:
    """Mark the last item of a response that was cut as incomplete: vLLM calls every item completed.

    Args:
        response: the whole response.
        items: the same item, as it was streamed.
    """
    if response.status == "incomplete":
        for item in (*response.output[-1:], *items):
            if hasattr(item, "status"):
                item.status = "incomplete"


def _written(event: Any) -> str:
    """Write an event of a response; vLLM has none of its own for a response that was cut."""
    name, data = event.type, event.model_dump_json(by_alias=True)
    if name == "response.completed" and event.response.status == "incomplete":
        name = "response.incomplete"
        data = json.dumps(json.loads(data) | {"type": name})
    return f"event: {name}\ndata: {data}\n\n"


def _with_any_arguments(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let an answer of `/v1/messages` hold calls whose arguments are no object, as a streamed one does.

    Args:
        convert: the method of vLLM's handler that makes such an answer from a chat's.
    """

    def converted(chat: Any) -> Any:
        calls = [call.function for call in chat.choices[0].message.tool_calls]
        given = [call.arguments for call in calls]
        for call in calls:
            call.arguments = "{}"
        answer = convert(chat)
        blocks = [block for block in answer.content if block.type == "tool_use"]
        for block, arguments in zip(blocks, given, strict=True):
            found = _parsed(arguments)
            block.input = NULL if found is None else found
        return answer

    return converted


def _parsed(arguments: str) -> Any:
    """Return a call's arguments; those that are no JSON, as an answer that was cut leaves them, as text."""
    try:
        return json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return arguments


def _refuse_constant(name: str) -> Any:
    """Refuse `NaN` and the like, which are no JSON."""
    raise ValueError(name)


__all__ = ["HANDLERS", "ErrorResponse", "Handler", "Handlers", "Response", "events", "synthetic_request"]
