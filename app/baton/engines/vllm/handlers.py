"""Call vLLM's own handlers: a body as vLLM's request, and what they return as a reply."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from jiter import from_json
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from structlog.typing import FilteringBoundLogger
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
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
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
from vllm.lora.request import LoRARequest
from vllm.renderers import merge_kwargs
from vllm.tasks import POOLING_TASKS
from vllm.utils.mistral import is_mistral_tokenizer

from baton.engines.backend import Json, Operation, Reply, StreamReply, WholeReply
from baton.engines.transfers import TransferRequest
from baton.engines.vllm.client import CURRENT_CALL, Call, WatchedClient
from baton.engines.vllm.custom_tools import ResponsesRequest, check_inputs, readable_tools
from baton.engines.vllm.errors import UNFORESEEN, from_response, translate, with_schema
from baton.engines.vllm.parsers import mend
from baton.errors import BatonError, GenerationFailed, InvalidRequest
from baton.telemetry.ids import UNOFFERED_HEADER, RequestContext

# Bodies as the handlers need them.

NO_PARSER = (
    "The model '{model}' has no parser for calls of tools: set `engines.serving.tool_call_parser` of its "
    "engine (`baton doctor` says why none was chosen), or leave 'tools' out."
)
CALLED_BY_CLIENTS = frozenset({"function", "custom", "namespace"})
"""Types of tools whose calls the client answers."""
SEARCHES = frozenset(
    {"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"}
)
"""Types of tools that programs offer by default, although nothing they do depends on them."""
OF_A_HOST = SEARCHES | frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
        *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search"),
    }
)
"""Types of tools that OpenAI's servers run, or that its models alone were trained to call."""
CHOSEN = frozenset({"function", "custom", "allowed_tools"})
"""Types of choices that name tools whose calls the client answers."""
UNSEARCHED = dict.fromkeys(
    (
        *(
            "allowed_token_ids",
            "bad_words",
            "frequency_penalty",
            "logit_bias",
            "min_tokens",
            "presence_penalty",
        ),
        *("response_format", "stop", "stop_token_ids", "structured_outputs", "tools"),
    )
) | {"repetition_penalty": 1}
"""Fields that beam search would leave out, and the value that asks for nothing."""
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Names of the longest answer; of a chat's two the first one decides."""
STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def for_responses(operation: Operation, body: Json, context: RequestContext) -> Json:
    """Put the id into the body of a responses request, and drop nulls, of which vLLM refuses some."""
    if operation is not Operation.RESPONSES:
        return body
    kept = {key: value for key, value in body.items() if value is not None}
    return kept | {"request_id": f"resp_{context.request_id}"}


def with_whole_prompt(operation: Operation, body: Json, transfer: TransferRequest | None) -> Json:
    """Put a transfer's prompt into the body; a chat takes its token ids beside the messages."""
    if transfer is None or transfer.prompt is None:
        return body
    if operation is Operation.CHAT:
        return _without_parts(body) | {"kv_transfer_params": {"prompt_token_ids": transfer.prompt}}
    return body | {"prompt": transfer.prompt, "add_special_tokens": False}


def _without_parts(body: Json) -> Json:
    """Drop the parts of a chat's messages.

    vLLM does not use a prompt of token ids beside messages that hold more than text. The messages are not
    rendered then, so that their content does not matter.
    """
    messages = [
        message | {"content": ""} if isinstance(message.get("content"), list) else message
        for message in body["messages"]
    ]
    return body | {"messages": messages}


def readable_calls(body: Json) -> Json:
    """Replace the arguments of past calls that are cut off at a depth at which vLLM cannot read them.

    vLLM takes arguments that are no JSON for empty ones, so that a conversation with a broken call can go on,
    but fails on those that are nested too deep, such as a model writes that repeats `[` until it is cut off.

    Raises:
        InvalidRequest: a call's arguments are valid, and nested too deep.
    """
    if not any(_is_too_deep(holder) for _, holder in _past_calls(body)):
        return body
    body = copy.deepcopy(body)  # what is stored of the conversation is what was sent
    for place, holder in _past_calls(body):
        if _is_too_deep(holder):
            if _is_whole(holder["arguments"]):
                raise InvalidRequest(
                    f"The JSON in '{place}.arguments' is nested too deep to be read: leave the call out, or "
                    "shorten its arguments.",
                    param=f"{place}.arguments",
                )
            holder["arguments"] = ""
    return body


def _past_calls(body: Json) -> Iterator[tuple[str, Json]]:
    """Yield what holds the arguments of each call in a conversation, with its path."""
    for name in ("messages", "input"):
        items = body.get(name)
        for number, item in enumerate(items if isinstance(items, list) else ()):
            if not isinstance(item, dict):
                continue
            place = f"{name}[{number}]"
            yield place, item
            calls = item.get("tool_calls")
            for at, call in enumerate(calls if isinstance(calls, list) else ()):
                function = call.get("function") if isinstance(call, dict) else None
                if isinstance(function, dict):
                    yield f"{place}.tool_calls[{at}].function", function


def _is_too_deep(holder: Json) -> bool:
    """Return whether a call's arguments are nested deeper than this parser goes; Python goes deeper."""
    arguments = holder.get("arguments")
    if not isinstance(arguments, str):
        return False
    try:
        from_json(arguments.encode())
    except ValueError as error:
        return str(error).startswith("recursion limit")
    return False


def _is_whole(text: str) -> bool:
    """Return whether every bracket is closed."""
    bare = STRINGS.sub("", text)
    return bare.count("[") == bare.count("]") and bare.count("{") == bare.count("}")


def without_searches(body: Json) -> tuple[Json, list[str]]:
    """Leave out searches of the web that a body only offers, beside tools that its client runs itself.

    An agent works without them, and offers them to every server. Where they are all that is offered, or a
    tool must be called, the body stays as it is, and is refused.

    Returns:
        the body, and the types that it no longer has.
    """
    tools = body.get("tools")
    if not isinstance(tools, list) or (body.get("tool_choice") or "auto") != "auto":
        return body, []
    kinds = [str(tool.get("type")) if isinstance(tool, dict) else "" for tool in tools]
    searches = sorted(SEARCHES.intersection(kinds))
    if not searches or CALLED_BY_CLIENTS.isdisjoint(kinds):
        return body, []
    kept = [tool for tool, kind in zip(tools, kinds, strict=True) if kind not in SEARCHES]
    return body | {"tools": kept}, searches


def require_honoured_tools(operation: Operation, body: Json, *, reads_calls: bool) -> None:
    """Refuse tools, and choices of them, that vLLM would drop without a word.

    Args:
        operation: one whose bodies may have tools.
        reads_calls: whether calls of tools are found in what the model says.

    Raises:
        InvalidRequest: `param` names the tool.
    """
    choice, tools = body.get("tool_choice"), body.get("tools")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if operation is Operation.RESPONSES and isinstance(choice, dict) and kind not in CHOSEN:
        raise InvalidRequest(
            f"'tool_choice' names a tool of the type '{kind}', which this gateway does not run: choose one "
            "of your own.",
            param="tool_choice",
        )
    if operation is Operation.CHAT and body.get("functions"):
        raise InvalidRequest(
            "'functions' is an older form of 'tools', which this gateway does not read: send 'tools'.",
            param="functions",
        )
    if kind == "none" or not isinstance(tools, list) or not tools:
        return
    if operation is not Operation.RESPONSES:
        if not reads_calls:
            raise InvalidRequest(NO_PARSER.format(model=body.get("model")), param="tools")
        return
    for at, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in OF_A_HOST:
            raise InvalidRequest(
                f"'tools[{at}]' is of the type '{kind}', which this gateway does not run: leave it out, or "
                f"offer a tool of your own (types {', '.join(sorted(CALLED_BY_CLIENTS))}).",
                param=f"tools[{at}].type",
            )
        if kind in CALLED_BY_CLIENTS and not reads_calls:
            raise InvalidRequest(NO_PARSER.format(model=body.get("model")), param="tools")


def only_allowed_tools(body: Json) -> Json:
    """Offer the tools that `tool_choice` allows, and no others: vLLM would offer all of them.

    Raises:
        InvalidRequest: it allows a tool that is not offered, or none, or has no valid mode.
    """
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body
    inner = choice.get("allowed_tools")
    given = inner if isinstance(inner, dict) else choice  # as in a chat; as in a response
    mode, listed, tools = given.get("mode"), given.get("tools"), body.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest("'tool_choice.mode' must be 'auto' or 'required'.", param="tool_choice.mode")
    allowed = {_name_of(each) for each in listed} if isinstance(listed, list) else set()
    offered = tools if isinstance(tools, list) else []
    missing = sorted(str(name) for name in allowed - {_name_of(tool) for tool in offered})
    if missing or not allowed:
        raise InvalidRequest(
            f"'tool_choice.tools' names {missing[0]!r}, which is not among 'tools'."
            if missing
            else "'tool_choice.tools' must name at least one of 'tools'.",
            param="tool_choice.tools",
        )
    return body | {"tool_choice": mode, "tools": [tool for tool in offered if _name_of(tool) in allowed]}


def _name_of(tool: Any) -> str | None:
    """Return the name of a tool, in any of the shapes of OpenAI."""
    holders = [tool, *(tool.get(key) for key in ("function", "custom"))] if isinstance(tool, dict) else []
    names = (holder.get("name") for holder in holders if isinstance(holder, dict))
    return next((name for name in names if isinstance(name, str)), None)


def require_searchable(body: Json) -> None:
    """Refuse what vLLM's beam search would leave out: it samples each token with parameters of its own.

    Raises:
        InvalidRequest: `param` names the field.
    """
    if not body.get("use_beam_search"):
        return
    for field_, neutral in UNSEARCHED.items():
        value = body.get(field_)
        kind = value.get("type") if isinstance(value, dict) else None
        if value and value != neutral and not (field_ == "response_format" and kind == "text"):
            if field_ == "tools" and body.get("tool_choice") == "none":
                continue
            raise InvalidRequest(
                f"'{field_}' cannot be used with 'use_beam_search', which would leave it out.", param=field_
            )


def in_one_part(body: Json) -> Json:
    """Join the texts of each past answer: vLLM reads the first, and fails at none and at a refusal."""
    items = body.get("input")
    if not isinstance(items, list):
        return body
    return body | {"input": [_joined(item) for item in items]}


def _joined(item: Any) -> Any:
    parts = item.get("content") if isinstance(item, dict) and item.get("role") == "assistant" else None
    texts = [parts] if isinstance(parts, str) else parts if isinstance(parts, list) else [None]
    texts = [
        part if isinstance(part, str) else _at(part, "refusal" if _at(part, "type") == "refusal" else "text")
        for part in texts
    ]
    if not all(isinstance(text, str) for text in texts):
        return item
    text = "".join(texts)
    an_item = item.get("type") == "message" and {"id", "status"} <= item.keys()  # as an answer had it
    return item | {"content": [{"type": "output_text", "text": text, "annotations": []}] if an_item else text}


def _at(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def require_clients_tools(body: Json) -> None:
    """Refuse tools of Anthropic's that its servers run, or that its models alone were trained to call.

    Raises:
        InvalidRequest: `param` names the tool's type.
    """
    tools = body.get("tools")
    for at, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            raise InvalidRequest(
                f"'tools[{at}]' is of the type '{str(kind)[:64]}', which this gateway does not run: leave it "
                "out, or offer a tool of your own, with 'name' and 'input_schema'.",
                param=f"tools[{at}].type",
            )
    if body.get("mcp_servers"):
        raise InvalidRequest(
            "'mcp_servers': tool servers are not asked for clients: call the tool yourself and send its "
            "result.",
            param="mcp_servers",
        )


def without_budget(body: Json) -> Json:
    """Drop the budget of thoughts, which a model that has none keeps in any case; vLLM refuses it there."""
    thinking = body.get("thinking")
    budgeted = isinstance(thinking, dict) and thinking.get("type") == "enabled"
    return {key: value for key, value in body.items() if key != "thinking"} if budgeted else body


def countable(body: Json) -> Json:
    """Forbid calls of tools in a body whose tokens an engine counts that cannot read such calls."""
    return body | {"tool_choice": {"type": "none"}} if body.get("tools") else body


def asked_tokens(body: Json) -> int | None:
    """Return the most tokens that an answer may have, by the request; None: it does not say."""
    found = (body.get(field) for field in LENGTHS)
    return next((value for value in found if type(value) is int), None)


def within_context(body: Json, longest: int) -> Json:
    """Lower the longest answer to the model's context, above which vLLM refuses the body.

    Thoughts of Anthropic's API have a budget, which must stay below that.
    """
    above: Json = {
        field: longest for field in LENGTHS if type(body.get(field)) is int and body[field] > longest
    }
    thinking = body.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    if "max_tokens" in above and type(budget) is int and longest <= budget < body["max_tokens"]:
        above["thinking"] = body["thinking"] | {"budget_tokens": longest - 1}
    return body | above


# The handlers of an engine, and the one that answers an operation.

BEFORE_THE_ENGINE = ("response.created", "response.in_progress")
"""Events that vLLM sends before the engine has accepted the request."""
MESSAGE_START = "event: message_start"
BEFORE_MORE = (*BEFORE_THE_ENGINE, "response.output_item.done")
"""Events that are held back until the next one."""
Method = Callable[[Any, Request], Awaitable[Any]]


@dataclass(frozen=True)
class Handler:
    """A handler of vLLM's, which answers one operation.

    Attributes:
        request: type of its request body.
        response: type of its answer in one piece.
        handler: attribute of the state that holds the serving object, and the object's method.
        dump: options of `model_dump_json` with which vLLM's own router writes the answer.
    """

    request: Any
    response: type[Any]
    handler: tuple[str, str]
    dump: dict[str, Any] = field(default_factory=dict)


HANDLERS: dict[Operation, Handler] = {
    Operation.COMPLETIONS: Handler(
        CompletionRequest, CompletionResponse, ("openai_serving_completion", "create_completion")
    ),
    Operation.CHAT: Handler(
        ChatCompletionRequest, ChatCompletionResponse, ("openai_serving_chat", "create_chat_completion")
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
        {"exclude_none": True},
    ),
    Operation.COUNT_TOKENS: Handler(
        AnthropicCountTokensRequest,
        AnthropicCountTokensResponse,
        ("anthropic_serving_messages", "count_tokens"),
        {"exclude_none": True},
    ),
    Operation.EMBEDDINGS: Handler(EmbeddingRequest, EmbeddingResponse, ("serving_embedding", "__call__")),
    Operation.POOLING: Handler(PoolingRequest, PoolingResponse, ("serving_pooling", "__call__")),
    Operation.CLASSIFY: Handler(
        ClassificationRequest, ClassificationResponse, ("serving_classification", "__call__")
    ),
    Operation.SCORE: Handler(ScoreRequest, ScoreResponse, ("serving_scores", "__call__")),
    Operation.RERANK: Handler(RerankRequest, RerankResponse, ("serving_scores", "__call__")),
    Operation.TOKENIZE: Handler(
        TokenizeRequest, TokenizeResponse, ("serving_tokenization", "create_tokenize")
    ),
    Operation.DETOKENIZE: Handler(
        DetokenizeRequest, DetokenizeResponse, ("serving_tokenization", "create_detokenize")
    ),
}


class Handlers:
    """The serving handlers of one engine.

    Args:
        thinks: whether thoughts are told apart in what the model says.
    """

    def __init__(self, state: State, *, thinks: bool = False) -> None:
        self._state = state
        self._thinks = thinks
        self._parsers = {operation: TypeAdapter(route.request) for operation, route in HANDLERS.items()}

    @classmethod
    async def build(cls, client: WatchedClient, namespace: Namespace, *, plugin: bool = False) -> Handlers:
        """Build the handlers with vLLM's own factory, as its API server does at its start.

        Args:
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
            messages.messages_full_converter = _as_anthropic(messages.messages_full_converter)
        mend(state)
        if (models := getattr(state, "openai_serving_models", None)) is not None:
            models.model_name = _as_asked(models.model_name)
        return cls(state, thinks=bool(client.vllm_config.structured_outputs_config.reasoning_parser))

    def method(self, operation: Operation) -> Method | None:
        """Return the handler's method that answers `operation`; None: the model does not support it."""
        attribute, method = HANDLERS[operation].handler
        serving = getattr(self._state, attribute, None)
        return getattr(serving, method) if serving is not None else None

    @property
    def reads_calls(self) -> bool:
        """True if calls of tools are found in what the model says: as vLLM's chat handler decides it."""
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
            call = CURRENT_CALL.get()
            body, left_out = without_searches(body)
            if left_out:
                call.context.answer_headers[UNOFFERED_HEADER] = ", ".join(left_out)
            body, call.names = readable_tools(body)
        if operation in (Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES):
            body = only_allowed_tools(body)
            require_honoured_tools(operation, body, reads_calls=self.reads_calls)
        if operation in (Operation.MESSAGES, Operation.COUNT_TOKENS):
            require_clients_tools(body)
            body = body if self._thinks else without_budget(body)
        if operation is Operation.COUNT_TOKENS and not self.reads_calls:
            body = countable(body)
        if operation is Operation.RESPONSES:
            body = in_one_part(body)
        require_searchable(body)
        return self._read(operation, body)

    def _read(self, operation: Operation, body: dict[str, Any]) -> Any:
        request = self._parsers[operation].validate_python(readable_calls(body))
        if operation is Operation.RESPONSES:
            request.take_grammars(self._state.serving_tokenization.online_renderer.parser)
        return request

    async def render(self, body: dict[str, Any]) -> str:
        """Render a conversation with the model's chat template, by the renderer of chat requests.

        Raises what vLLM raises: anything.
        """
        request = self._read(Operation.CHAT, only_allowed_tools(body))
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

    @property
    def adapters(self) -> dict[str, LoRARequest]:
        """vLLM's requests for the LoRA adapters that `model` of a body may name, by their names."""
        known: dict[str, LoRARequest] = self._state.openai_serving_models.lora_requests
        return known

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
            yield _with_message_id(event) if event.startswith(MESSAGE_START) else event
        return
    held, custom = list[Any](), dict[Any, Any]()
    async for event in generator:
        if event.type in ("response.output_item.added", "response.output_item.done"):
            event.item = await as_clients_call_it(event.item, done=event.type.endswith("done"))
        if event.type == "response.output_item.done" and event.item.type == "custom_tool_call":
            custom[event.item.id] = event.item
        if event.type == "response.completed":
            # vLLM makes these items anew, with other ids of the calls.
            event.response.output = [
                custom.get(getattr(item, "id", None)) or await as_clients_call_it(item)
                for item in event.response.output
            ]
            mark_cut(event.response, *(each.item for each in held if hasattr(each, "item")))
        held.append(event)
        if event.type not in BEFORE_MORE:
            yield "".join(map(_written, held))
            held = []
    if held and held[-1].type not in BEFORE_THE_ENGINE:
        yield "".join(map(_written, held))


async def as_clients_call_it(item: Any, *, done: bool = True) -> Any:
    """Return an item of a response under the client's names of its tools, its input checked if it is done."""
    call = CURRENT_CALL.get()
    if done:
        await check_inputs(call, [item])
    return call.names.item(item) if call.names is not None else item


def mark_cut(response: Any, *items: Any) -> None:
    """Mark the last item of a response that was cut as incomplete: vLLM calls every item completed."""
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


DISCONNECTED = "Client disconnected"
"""What vLLM's handlers answer instead of being cancelled."""


def require_not_cancelled(answer: Any) -> None:
    """Raise the cancellation of this task if a handler of vLLM's has made an answer of it.

    Without that whoever cancels it, for example to stop an engine that warms up, would wait for ever.
    """
    swallowed = isinstance(answer, ErrorResponse) and answer.error.message == DISCONNECTED
    task = asyncio.current_task()
    if swallowed and task is not None and task.cancelling():
        raise asyncio.CancelledError


def _as_asked(own: Callable[..., str]) -> Callable[..., str]:
    """Call the model in an answer what the request called it, also where that is an alias.

    Args:
        own: the method of vLLM's handlers that tells an answer's `model`.
    """

    def model_name(*args: Any, **kwargs: Any) -> str:
        call = CURRENT_CALL.get(None)
        return (call.context.model if call is not None else "") or own(*args, **kwargs)

    return model_name


def _with_message_id(text: str) -> str:
    """Write the id of an answer of `/v1/messages`, which vLLM takes from a chat's, as Anthropic does."""
    return text.replace("chatcmpl-", "msg_", 1)


INVALID = "INVALID_JSON"
"""What arguments are called within an object that are none, as Anthropic's documentation has clients do it
(fine-grained tool streaming, "Handling invalid JSON")."""


def _as_anthropic(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Give an answer of `/v1/messages` an id of Anthropic's shape, and calls whose input is always an object.

    Clients send that back. Of arguments that a limit cut it holds what is whole, as Anthropic's SDK reads it
    from a stream, which has them as they were written; of others that are no object all, as `INVALID`.

    Args:
        convert: the method of vLLM's handler that makes such an answer from a chat's.
    """

    def converted(chat: Any) -> Any:
        (choice,) = chat.choices
        calls = [call.function for call in choice.message.tool_calls]
        given = [call.arguments for call in calls]
        for call in calls:
            call.arguments = "{}"
        answer = convert(chat)
        answer.id = _with_message_id(answer.id)
        blocks = [block for block in answer.content if block.type == "tool_use"]
        for block, arguments in zip(blocks, given, strict=True):
            block.input = _input(arguments, cut=choice.finish_reason == "length")
        return answer

    return converted


def _input(arguments: str, *, cut: bool) -> Json:
    """Return a call's arguments as an object, of which an answer can be written.

    Args:
        cut: a limit ended the answer, perhaps within them.
    """
    try:
        found = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        found = _beginning(arguments) if cut else None
    if not isinstance(found, dict):
        return {INVALID: arguments}
    try:
        json.dumps(found, allow_nan=False)  # 1e999 is read as infinite
        # What is nested too deeply in the answer is not written, nor half a surrogate pair.
        to_json({"content": [{"input": found}]})
    except (ValueError, RecursionError):
        return {INVALID: arguments}
    return found


def _beginning(arguments: str) -> Any:
    """Return the whole part of arguments that were cut; None: they are not the beginning of any JSON."""
    try:
        return (
            from_json(arguments.encode(), partial_mode=True, allow_inf_nan=False) if arguments.strip() else {}
        )
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    """Refuse `NaN` and the like, which are no JSON."""
    raise ValueError(name)


# What the handlers return, stream and raise, as the port's replies and errors.

CONTENT_HEADERS = ("metadata",)
"""Headers of vLLM's answers that describe their content: packed embeddings' ids, shapes and dtypes."""


class ReplyTranslator:
    """A translator of one engine's answers and errors."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log

    def error(self, error: Exception, call: Call | None = None, body: Json | None = None) -> BatonError:
        """Translate an exception of vLLM's, and log it where the client did not cause it.

        Args:
            call: what vLLM worked on; None: it generates nothing.
            body: of the request; None: it is not known.
        """
        translated = with_schema(translate(error, body), body)
        if isinstance(error, RecursionError) and call is not None and call.context.generated_tokens:
            translated = GenerationFailed()  # it was the model that nested too deep
        unforeseen = isinstance(error, UNFORESEEN)
        if unforeseen or (translated.status >= 500 and not translated.retryable):
            self._log.error("engine_call_failed", exc_info=error)
        return translated

    async def reply(self, operation: Operation, answer: Any, call: Call, body: Json | None = None) -> Reply:
        """Translate what the handler of `operation` returned for `call`.

        Raises:
            BatonError: the handler returned vLLM's `ErrorResponse`.
        """
        if isinstance(answer, ErrorResponse):
            failure = with_schema(call.failure or from_response(answer), body)
            if failure.status >= 500 and not failure.retryable:
                self._log.error("engine_call_failed", cause=answer.error.message)
            raise failure
        if isinstance(answer, HANDLERS[operation].response):
            if operation is Operation.RESPONSES:
                answer.output = [await as_clients_call_it(item) for item in answer.output]
                mark_cut(answer)
            if (told := getattr(answer, "usage", None)) is not None:
                call.count(*_told_tokens(told))
            return WholeReply(answer.model_dump_json(**HANDLERS[operation].dump).encode())
        if isinstance(answer, Response):
            return await _from_response(answer)
        return StreamReply(self._stream(operation, answer, call, body))

    async def _stream(
        self, operation: Operation, generator: Any, call: Call, body: Json | None
    ) -> AsyncIterator[str]:
        """Yield the handler's events; raise our own error in place of the text that vLLM would write."""
        CURRENT_CALL.set(call)
        async with aclosing(generator):
            try:
                async for event in events(operation, generator):
                    if call.failure is not None:
                        raise with_schema(call.failure, body)
                    if event.startswith(('data: {"error"', "event: error")):
                        self._log.error("engine_stream_failed", cause=event)
                        raise GenerationFailed()
                    yield event
                    CURRENT_CALL.set(call)  # the next event may be taken by another task
            except BatonError:
                raise
            except (ValidationError, RecursionError, *UNFORESEEN) as error:  # midway: not the client's fault
                self._log.error("engine_stream_failed", exc_info=error)
                raise GenerationFailed() from error
            except Exception as error:  # the border to vLLM's generators, which raise anything at all
                raise self.error(error, body=body) from error
        if call.failure is not None:
            raise with_schema(call.failure, body)


def _told_tokens(usage: Any) -> tuple[int, int]:
    """Return the prompt tokens and the generated ones of an answer's `usage`, by whichever names it has."""
    prompt = getattr(usage, "prompt_tokens", None) or getattr(usage, "input_tokens", 0)
    generated = getattr(usage, "completion_tokens", None) or getattr(usage, "output_tokens", 0)
    return prompt or 0, generated or 0


async def _from_response(response: Response) -> WholeReply:
    """Read a pooling handler's finished `Response`, which may be a streaming one, into one piece."""
    media_type = response.headers.get("content-type", "application/json")
    headers = {name: response.headers[name] for name in CONTENT_HEADERS if name in response.headers}
    if hasattr(response, "body_iterator"):
        parts = [part async for part in response.body_iterator]
        return WholeReply(b"".join(bytes(part) for part in parts), media_type, headers)
    return WholeReply(bytes(response.body), media_type, headers)
