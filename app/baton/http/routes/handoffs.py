"""Serve `/v1/handoffs`: create, list, show, change and delete a tenant's handoffs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from baton.engines.port import Engine, Forwarding, Json, Operation
from baton.errors import InvalidRequest
from baton.http.answer import check, take_place, unless_gone
from baton.http.elsewhere_body import prepare_forwarded
from baton.http.request import Gateway, context_of, gateway_of, read_json, state_of
from baton.http.request_images import take_images
from baton.images.client_image import ClientImage
from baton.library.handoff import Handoff, HandoffState
from baton.relay.asked import (
    HandoffChanges,
    NewHandoff,
    SaveOptions,
    parse_options,
    require_handoffs,
    require_latent,
    require_steps_behind_text,
    translates,
)
from baton.relay.move import require_movable
from baton.relay.run import ID_HEADER
from baton.relay.sources import is_compatible
from baton.telemetry.ids import RequestContext

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
    engine = gateway.fleet.pick(options.model)
    require_handoffs(engine)
    if (forwarding := engine.forwarding) is not None:
        state_of(request.scope).model = engine.name
        return await unless_gone(request, _forward(request, engine, forwarding, options, body))
    require_latent(engine, options.latent_steps, gateway.settings.handoffs.latent_steps_max)
    state_of(request.scope).model = engine.name
    shape = Operation.CHAT if options.messages is not None else Operation.COMPLETIONS
    images = await take_images(request, engine, shape, body)
    return await unless_gone(request, _create(request, gateway, engine, options, body, images))


async def _forward(
    request: Request, engine: Engine, forwarding: Forwarding, options: NewHandoff, body: Json
) -> Response:
    """Have the gateway elsewhere compute the context; the handoff is in the store of both."""
    shape = Operation.CHAT if options.messages is not None else Operation.COMPLETIONS
    await prepare_forwarded(request, engine, forwarding, shape, body, saves=True)
    ticket = await take_place(request, engine)
    reply = await forwarding.create_handoff(body, context_of(request))
    ticket.leave_engine()
    headers = dict(reply.headers)
    if (made := headers.get(ID_HEADER.lower())) is not None:
        headers["Location"] = f"/v1/handoffs/{made}"
    return Response(reply.body, reply.status, headers, reply.media_type)


async def _create(
    request: Request,
    gateway: Gateway,
    engine: Engine,
    options: NewHandoff,
    body: Json,
    images: Sequence[ClientImage],
) -> Response:
    context = context_of(request)
    if options.adds_nothing and len(options.sources) > 1:
        return await _join_ahead(gateway, engine, context, options)
    # A pending source is waited for before this request takes a place: its own request may need the place.
    records = await gateway.sources.all(
        options.sources, engine, context.tenant, "from", translates=translates(options.translate, engine)
    )
    if options.translates_alone:
        return await _translate(gateway, engine, context, options, records[0])
    if options.join == "moved" and len(records) > 1:
        require_movable(engine, "join")
    sources = await gateway.translations.sources(engine, context, records, where="from")
    ticket = await take_place(request, engine)
    session = await gateway.sessions.open_new(engine, body, context, options, sources, images)
    target = session.target
    assert target is not None
    work = gateway.handoffs.in_background(session.compute(options.prompt or ""))
    ticket.keep_until(work)
    try:
        done, _ = await asyncio.wait({work}, timeout=gateway.settings.handoffs.wait_s)
    except asyncio.CancelledError:
        work.cancel()
        session.fail()  # work that has not begun yet cannot fail the handoff itself
        raise
    return _answer(target, work.result() if done else target.public())


def _answer(target: Handoff, shown: Json) -> Response:
    """Answer with a new handoff: 201 if it is ready, 202 while it is pending."""
    ready = target.state is HandoffState.READY
    headers = {"Location": f"/v1/handoffs/{target.id}", ID_HEADER: target.id}
    return Response(json.dumps(shown), 201 if ready else 202, headers, "application/json")


async def _join_ahead(
    gateway: Gateway, engine: Engine, context: RequestContext, options: NewHandoff
) -> Response:
    """Join handoffs in the background; it is waited for only if it begins at once."""
    target, work, at_once = await gateway.ahead.begin(engine, context, options)
    wait_s = gateway.settings.handoffs.wait_s if at_once else 0
    try:
        done, _ = await asyncio.wait({work}, timeout=wait_s)
    except asyncio.CancelledError:
        work.cancel()  # its client never got the id
        raise
    return _answer(target, work.result() if done else target.public())


async def _translate(
    gateway: Gateway, engine: Engine, context: RequestContext, options: NewHandoff, record: Handoff
) -> Response:
    """Make the translation of a handoff of other weights, unless it is there."""
    if is_compatible(record, engine):
        raise InvalidRequest(
            f"from: '{engine.name}' can continue the handoff as it is: name it without 'translate'.",
            param="from",
        )
    given = options.model_dump(include={"ttl_s", "pin", "label"}, exclude_unset=True)
    save = SaveOptions.model_validate(given)
    (source,) = await gateway.translations.sources(engine, context, [record], save, "from")
    found = source.translated
    assert found is not None
    return _answer(source.record, source.record.public() | {"source": found.public(source.record)})


@router.get("/v1/handoffs")
async def list_handoffs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List the tenant's handoffs, the newest first.

    For the next page, set `after` to the `last_id` of this one.
    """
    page, more = await gateway_of(request).handoffs.page(context_of(request).tenant, limit=limit, after=after)
    rows = [record.public() for record in page]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return {"object": "list", "data": rows, "has_more": more} | ends


@router.get("/v1/handoffs/{handoff_id}")
async def retrieve_handoff(request: Request, handoff_id: str) -> dict[str, Any]:
    """Show one handoff."""
    return (await gateway_of(request).handoffs.get(handoff_id, context_of(request).tenant)).public()


@router.patch("/v1/handoffs/{handoff_id}")
async def change_handoff(request: Request, handoff_id: str) -> dict[str, Any]:
    """Change a handoff: pin or unpin its KV, set its lifetime from now (`ttl_s`) or its label."""
    gateway = gateway_of(request)
    changes = parse_options(HandoffChanges, await read_json(request, gateway.settings.limits))
    record = await gateway.handoffs.get(handoff_id, context_of(request).tenant)
    await gateway.handoffs.change(record, changes.model_dump(exclude_unset=True))
    return record.public()


@router.delete("/v1/handoffs/{handoff_id}", status_code=204)
async def delete_handoff(request: Request, handoff_id: str) -> Response:
    """Delete a handoff with its KV. Requests that are loading it are not disturbed."""
    handoffs = gateway_of(request).handoffs
    await handoffs.delete(await handoffs.get(handoff_id, context_of(request).tenant))
    return Response(status_code=204)
