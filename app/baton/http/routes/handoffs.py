"""Serve `/v1/handoffs`: create, list, show, change and delete a tenant's handoffs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from baton.engines.backend import Elsewhere, EngineState, Json, Operation
from baton.engines.engine import LocalEngine
from baton.http.answer import check, engage, take_place, unless_gone
from baton.http.elsewhere_body import prepare_forwarded
from baton.http.request import (
    Gateway,
    allowed,
    context_of,
    gateway_of,
    in_a_thread,
    may_use,
    read_json,
    state_of,
)
from baton.http.request_images import take_images
from baton.images.image import ClientImage
from baton.library.handoff import Handoff, HandoffState, HandoffWarm
from baton.relay.asked import (
    ID_HEADER,
    HandoffChanges,
    NewHandoff,
    WarmContexts,
    WarmHandoff,
    parse_options,
    require_handoffs,
    require_latent,
    require_steps_behind_text,
)

router = APIRouter()


@router.post("/v1/handoffs", status_code=201)
async def create_handoff(request: Request) -> Response:
    """Compute a context and save it as a handoff, without an answer.

    Answers 201 when the handoff is ready within `handoffs.wait_s`, otherwise 202 while it is pending.
    """
    gateway = gateway_of(request)
    body = await read_json(request, gateway.settings.limits)
    await check(request, body)
    options = parse_options(NewHandoff, body)
    require_steps_behind_text(options)
    engine = await unless_gone(request, engage(request, options.model))
    require_handoffs(engine)
    if engine.forwarding is not None:
        return await unless_gone(request, _forward(request, engine, options, body))
    require_latent(engine, options.latent_steps, gateway.settings.handoffs.latent_steps_max)
    shape = Operation.CHAT if options.messages is not None else Operation.COMPLETIONS
    images = await take_images(request, engine, shape, body)
    return await unless_gone(request, _create(request, gateway, engine, options, body, images))


async def _forward(request: Request, engine: Elsewhere, options: NewHandoff, body: Json) -> Response:
    """Have the gateway elsewhere compute the context; the handoff is in the store of both."""
    shape = Operation.CHAT if options.messages is not None else Operation.COMPLETIONS
    await prepare_forwarded(request, engine, shape, body, saves=True)
    ticket = await take_place(request, engine)
    reply = await engine.forwarding.create_handoff(body, context_of(request))
    ticket.leave_engine()
    headers = dict(reply.headers)
    if (made := headers.get(ID_HEADER.lower())) is not None:
        headers["Location"] = location_of(gateway_of(request), made)
    return Response(reply.body, reply.status, headers, reply.media_type)


def location_of(gateway: Gateway, handoff_id: str) -> str:
    """Return the path of a handoff, as clients see it."""
    return f"{gateway.settings.root_path}/v1/handoffs/{handoff_id}"


async def _create(
    request: Request,
    gateway: Gateway,
    engine: LocalEngine,
    options: NewHandoff,
    body: Json,
    images: Sequence[ClientImage],
) -> Response:
    context, place = context_of(request), partial(take_place, request, engine)
    state = state_of(request.scope)

    def keep(work: asyncio.Task[Json]) -> None:
        state.ticket.lend(work)
        work.add_done_callback(lambda _: state.count(gateway.usage))  # also what it computes after the answer

    target, shown = await gateway.relay.create(engine, body, context, options, images, place, keep)
    ready = target.state is HandoffState.READY
    headers = {"Location": location_of(gateway, target.id), ID_HEADER: target.id}
    return Response(json.dumps(shown), 201 if ready else 202, headers, "application/json")


@router.get("/v1/handoffs")
async def list_handoffs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List the tenant's handoffs, the newest first.

    For the next page, set `after` to the `last_id` of this one.
    """
    library = gateway_of(request).library
    page, more = await library.page(context_of(request).tenant, limit=limit, after=after)
    rows = await library.describe(page)
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return {"object": "list", "data": rows, "has_more": more} | ends


@router.get("/v1/handoffs/{handoff_id}")
async def retrieve_handoff(request: Request, handoff_id: str) -> dict[str, Any]:
    """Show one handoff."""
    library = gateway_of(request).library
    (row,) = await library.describe([await library.get(handoff_id, context_of(request).tenant)])
    return row


@router.get("/v1/handoffs/{handoff_id}/messages", response_class=Response)
async def show_messages(request: Request, handoff_id: str) -> Response:
    """Show what a handoff's context says: its messages, or its text where it is no chat."""
    gateway, context = gateway_of(request), context_of(request)
    record = await gateway.library.get(handoff_id, context.tenant)
    return await unless_gone(request, _said(request, gateway, record))


async def _said(request: Request, gateway: Gateway, record: Handoff) -> Response:
    context = context_of(request)
    context.take_memory(record.weight)
    ready = (each for each in gateway.fleet.here if each.state is EngineState.READY)
    engine = next((each for each in ready if each.weights == record.weights), None)
    said = await gateway.relay.messages(engine, record, context)
    body = await in_a_thread(request, partial(json.dumps, said))
    return Response(body, media_type="application/json")


@router.post("/v1/warm")
async def warm_contexts(request: Request) -> Response:
    """Bring automatic contexts into the engines' memory by their `prompt_cache_key`, or by `kv_hints`.

    Answers 200 with what is there when that is done within `handoffs.wait_s`, otherwise 202 while it goes on.
    """
    gateway = gateway_of(request)
    asked = parse_options(WarmContexts, await read_json(request, gateway.settings.limits))
    to = _to(request, asked.model)
    return _warmed(await gateway.relay.warming.contexts(asked, context_of(request).tenant, to))


@router.post("/v1/handoffs/{handoff_id}/warm")
async def warm_handoff(request: Request, handoff_id: str) -> Response:
    """Bring a handoff's KV into the memory of the engines that would load it, while a tool runs.

    Answers 200 with what is there when that is done within `handoffs.wait_s`, otherwise 202 while it goes on.
    """
    gateway = gateway_of(request)
    given = await read_json(request, gateway.settings.limits) if await request.body() else {}
    asked = parse_options(WarmHandoff, given)
    to = _to(request, asked.model)
    return _warmed(await gateway.relay.warming.handoff(handoff_id, context_of(request).tenant, to))


def _to(request: Request, name: str | None) -> Callable[[LocalEngine], bool]:
    """Return whether KV may be brought to an engine: the named one, or each that the request's key may use.

    Raises:
        ModelNotFound: there is none of this name.
        ModelNotAllowed: its key may not use it.
        OperationUnsupported: it keeps no handoffs.
    """
    if name is None:
        return partial(may_use, request)
    fleet = gateway_of(request).fleet
    allowed(request, name, fleet.choices(name))
    named = fleet.pick(name)
    require_handoffs(named)
    return lambda engine: engine.name == named.base


def _warmed(warm: HandoffWarm) -> Response:
    status = 200 if warm.state == "done" else 202
    return Response(warm.model_dump_json(), status, media_type="application/json")


@router.patch("/v1/handoffs/{handoff_id}")
async def change_handoff(request: Request, handoff_id: str) -> dict[str, Any]:
    """Change a handoff: pin or unpin its KV, set its lifetime from now (`ttl_s`) or its label."""
    gateway = gateway_of(request)
    changes = parse_options(HandoffChanges, await read_json(request, gateway.settings.limits))
    record = await gateway.library.get(handoff_id, context_of(request).tenant)
    await gateway.library.change(record, changes.model_dump(exclude_unset=True))
    (row,) = await gateway.library.describe([record])
    return row


@router.delete("/v1/handoffs/{handoff_id}", status_code=204)
async def delete_handoff(request: Request, handoff_id: str) -> Response:
    """Delete a handoff with its KV. Requests that are loading it are not disturbed."""
    library = gateway_of(request).library
    await library.delete(await library.get(handoff_id, context_of(request).tenant))
    return Response(status_code=204)
