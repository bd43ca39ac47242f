"""Serve `/v1/responses`: answer through OpenAI's Responses API; show and delete stored answers."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from baton.engines.port import Operation
from baton.errors import InvalidRequest
from baton.http.pipeline import operate
from baton.http.request_body import in_a_thread, read_json
from baton.http.request_responses import take_response_request
from baton.http.request_state import context_of
from baton.http.state import gateway_of
from baton.responses.replies import stored
from baton.responses.response import listed_items

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
