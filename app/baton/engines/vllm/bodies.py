"""Adapt bodies for vLLM's handlers: set the response id, insert the prompt's token ids, read past calls."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

from jiter import from_json

from baton.engines.kv_transfer import TransferRequest
from baton.engines.port import Json, Operation
from baton.errors import InvalidRequest
from baton.telemetry.ids import RequestContext

NO_PARSER = (
    "The model '{model}' has no parser for calls of tools: set `engines.serving.tool_call_parser` of its "
    "engine (`baton doctor` says why none was chosen), or leave 'tools' out."
)
CALLED_BY_CLIENTS = frozenset({"function", "custom", "namespace"})
"""Types of tools whose calls the client answers."""
OF_A_HOST = frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
        *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search"),
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    }
)
"""Types of tools that OpenAI's servers run, or that its models alone were trained to call."""
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Names of the longest answer; of a chat's two the first one decides."""
STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def for_responses(operation: Operation, body: Json, context: RequestContext) -> Json:
    """Put the id into the body of a responses request, and drop nulls on which vLLM's answer would fail."""
    if operation is not Operation.RESPONSES:
        return body
    kept = {
        key: value
        for key, value in body.items()
        if value is not None or key not in ("background", "truncation")
    }
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
    for field in ("messages", "input"):
        items = body.get(field)
        for number, item in enumerate(items if isinstance(items, list) else ()):
            if not isinstance(item, dict):
                continue
            place = f"{field}[{number}]"
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


def require_honoured_tools(body: Json, *, reads_calls: bool) -> None:
    """Refuse tools of a request to `/v1/responses` that vLLM would drop without a word.

    Args:
        body: of the request.
        reads_calls: whether calls of tools are found in what the model says.

    Raises:
        InvalidRequest: `param` names the tool.
    """
    choice, tools = body.get("tool_choice"), body.get("tools")
    if choice == "none" or not isinstance(tools, list):
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
    if isinstance(choice, dict) and choice.get("type") in OF_A_HOST:
        raise InvalidRequest(
            f"'tool_choice' names a tool of the type '{choice['type']}', which this gateway does not run.",
            param="tool_choice",
        )


def countable(body: Json) -> Json:
    """Let the tools of a request be counted on an engine that cannot read their calls: none are made."""
    return body | {"tool_choice": {"type": "none"}} if body.get("tools") else body


def asked_tokens(body: Json) -> int | None:
    """Return the most tokens that an answer may have, by the request; None: it does not say."""
    found = (body.get(field) for field in LENGTHS)
    return next((value for value in found if type(value) is int), None)


def within_context(body: Json, longest: int) -> Json:
    """Let no answer be longer than the model's context, which vLLM refuses; it cuts to what is left of it."""
    above = {field: longest for field in LENGTHS if type(body.get(field)) is int and body[field] > longest}
    return body | above
