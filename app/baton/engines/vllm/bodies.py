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
