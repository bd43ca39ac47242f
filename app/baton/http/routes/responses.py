"""Serve `/v1/responses`: answer through OpenAI's Responses API; show and delete stored answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from baton.config.groups import LimitSettings
from baton.engines.backend import Json, Operation
from baton.errors import InvalidRequest, ResponseNotFound
from baton.http.answer import operate
from baton.http.body.json import parse_object
from baton.http.request import context_of, gateway_of, in_a_thread, off_the_loop, read_json, state_of
from baton.responses.response import Turn, conversation_json, input_items, listed_items
from baton.responses.service import PREVIOUS, ResponseRequest, stored

# Put the conversation that a request to `/v1/responses` continues before its own input.


ONLY_TOOLS = "additional_tools"
BRING_TOOLS = (ONLY_TOOLS, "tool_search_output")
"""Types of items that bring tools."""
MESSAGES = "previous_input_messages"
"""A field of vLLM's own, for messages that are no items."""
UNSUPPORTED = {
    "background": "answers in the background are not supported: leave it out.",
    "conversation": "conversations with an id of their own are not supported: name the last response in "
    "'previous_response_id'.",
}
"""Fields of OpenAI's API that are refused, because without them the answer is not what they ask for."""


async def take_response_request(request: Request, body: Json) -> ResponseRequest:
    """Take what concerns stored responses out of a body, and complete its `input`.

    The stored items are checked and counted as if the client had sent them again.

    Args:
        body: its body, which is changed.

    Raises:
        InvalidRequest: the body has a field that is not supported, or the conversation is too large.
        ResponseNotFound: the tenant has no stored response with this id.
    """
    for field, reason in UNSUPPORTED.items():
        if body.get(field):
            raise InvalidRequest(f"'{field}': {reason}", param=field)
    tenant, previous = context_of(request).tenant, body.pop(PREVIOUS, None)
    _require_types(body, previous)
    own = input_items(body.get("input"))
    stores = gateway_of(request).responses.stores and _wants_storing(body)
    if stores and (previous is not None or body.get("store")):  # somebody goes on from it: keep its KV too
        body.setdefault("prompt_cache_key", "responses")
    body |= {"store": False, "background": False}  # vLLM's own store is shared by all tenants
    # Written before images are put into the items, which later requests read again.
    written = await off_the_loop(request, partial(json.dumps, own, separators=(",", ":"))) if stores else "[]"
    if previous is not None:
        body["input"] = [*await _past(request, previous), *own]
    gather_tools(body)
    return ResponseRequest(tenant, previous, written, stores, f"resp_{context_of(request).request_id}")


def gather_tools(body: Json) -> None:
    """Put tools that items of a conversation bring beside those of the request, where all are checked.

    Items that only bring tools are left out; of two tools of a name the later one stands.
    """
    items, given = body.get("input"), body.get("tools")
    if not isinstance(items, list) or not isinstance(given, list | None):
        return
    bringing = [item for item in items if isinstance(item, dict) and item.get("type") in BRING_TOOLS]
    if not bringing:
        return
    tools = [*(given or ())]
    for item in bringing:
        tools += item["tools"] if isinstance(item.get("tools"), list) else []
    named = {f"{tool.get('type')} {tool.get('name')}": tool for tool in tools if isinstance(tool, dict)}
    body["tools"] = [*named.values(), *(tool for tool in tools if not isinstance(tool, dict))]
    body["input"] = [item for item in items if not isinstance(item, dict) or item.get("type") != ONLY_TOOLS]


def _require_types(body: Json, previous: object) -> None:
    """Refuse what would be left out of a conversation, or is no id.

    Raises:
        InvalidRequest: `param` names the field.
    """
    if body.get("store") not in (True, False, None):
        raise InvalidRequest("'store' must be true or false.", param="store")
    if previous is None:
        return
    if not isinstance(previous, str):
        raise InvalidRequest(f"'{PREVIOUS}' must be the id of a response.", param=PREVIOUS)
    if body.get(MESSAGES):
        raise InvalidRequest(f"'{MESSAGES}' cannot be used with '{PREVIOUS}'.", param=MESSAGES)
    given = body.get("input")
    if isinstance(given, list) and all(isinstance(item, dict) for item in given):
        return
    if not isinstance(given, str):
        raise InvalidRequest("'input' must be a text or a list of items, each an object.", param="input")


def _wants_storing(body: Json) -> bool:
    """Return whether an answer is to be stored; not one to messages that are no items."""
    return body.get("store") is not False and not body.get(MESSAGES)


async def _past(request: Request, previous: str) -> list[Any]:
    """Return the items of the conversation that a request continues."""
    gateway, state = gateway_of(request), state_of(request.scope)
    limits, tenant = gateway.settings.limits, state.context.tenant
    try:
        size = await gateway.responses.size(previous, tenant) + len(await request.body())
        if size > limits.body_bytes:
            raise InvalidRequest(
                f"The conversation that '{PREVIOUS}' names takes {size} bytes with this request; at most "
                f"{limits.body_bytes} are allowed (setting limits.body_bytes). Begin a new conversation.",
                param=PREVIOUS,
            )
        state.context.take_memory(size - len(await request.body()))
        await gateway.responses.note_use(previous, tenant)
        turns = await gateway.responses.conversation(previous, tenant)
        state.large = True
    except ResponseNotFound as error:
        raise ResponseNotFound(error.message, param=PREVIOUS) from None
    return await in_a_thread(request, partial(_parsed, turns, limits))


def _parsed(turns: Sequence[Turn], limits: LimitSettings) -> list[Any]:
    """Parse the items of a conversation as if they had been sent; large ones take a while."""
    found: list[Any] = parse_object(b'{"input":%b}' % conversation_json(turns), limits)["input"]
    return found


router = APIRouter()


@router.post("/v1/responses", name="create_responses")
async def create_response(request: Request) -> Response:
    """Answer through OpenAI's Responses API.

    The answer is stored unless `store` is false, and later requests go on from it by `previous_response_id`.
    """
    gateway = gateway_of(request)
    body = await read_json(request, gateway.settings.limits)
    taken = await take_response_request(request, body)
    return await operate(request, Operation.RESPONSES, body, partial(stored, gateway.responses, taken))


@router.get("/v1/responses/{response_id}")
async def retrieve_response(request: Request, response_id: str, stream: bool = False) -> Response:
    """Show a stored response."""
    if stream:
        raise InvalidRequest("A stored response is shown in one piece: leave 'stream' out.", param="stream")
    responses, tenant = gateway_of(request).responses, context_of(request).tenant
    context_of(request).take_memory(await responses.body_size(response_id, tenant))
    found = await responses.body(response_id, tenant)
    return Response(found, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Delete a stored response. Its text is kept as long as a later response goes on from it."""
    await gateway_of(request).responses.delete(response_id, context_of(request).tenant)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=256)] = None,
) -> dict[str, Any]:
    """List the items that a stored response was computed from, those of earlier turns included.

    For the next page, set `after` to the `last_id` of this one.
    """
    responses, tenant = gateway_of(request).responses, context_of(request).tenant
    context_of(request).take_memory(await responses.size(response_id, tenant))
    turns = await responses.conversation(response_id, tenant)
    items = await in_a_thread(request, partial(listed_items, turns))
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest("'after' must be the id of an item of this list.", param="after")
    rest = items[ids.index(after) + 1 :] if after is not None else items
    page = rest[:limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, "has_more": len(rest) > limit} | ends


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refuse to cancel a response: a stored one is complete."""
    await gateway_of(request).responses.body_size(response_id, context_of(request).tenant)
    raise InvalidRequest("Only responses in the background can be cancelled; this one is complete.")
