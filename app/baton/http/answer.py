"""Carry out a request, from its body to its answer, in the same steps for every operation."""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from baton.admission.tenants import Ticket
from baton.engines.backend import Operation, Reply, StreamReply
from baton.engines.engine import Engine, LocalEngine
from baton.errors import BatonError
from baton.http.body.fields import ARGUMENTS, check_field_limits, strip_arguments, strip_steering
from baton.http.body.schemas import TOOLS, require_moderate
from baton.http.elsewhere_body import prepare_forwarded
from baton.http.request import Gateway, context_of, gateway_of, in_a_thread, off_the_loop, read_json, state_of
from baton.http.request_images import completed, take_images
from baton.http.sse import ClientWatch, EventStream, event_stream
from baton.library.handoff import Handoff
from baton.relay.asked import (
    HEADER,
    OPERATIONS,
    VIA_ROSETTA,
    HandoffOptions,
    apply_header,
    require_latent,
    take_options,
    translates,
)
from baton.relay.move import require_movable
from baton.relay.run import PlannedRequest
from baton.relay.sources import Source, require_compatible
from baton.telemetry.ids import RequestContext

SMALL_SCHEMAS = 8 * 1024
"""Largest body, in bytes, whose schemas are measured on the event loop; larger ones go to a thread."""
Finish = Callable[[Reply], Awaitable[Reply]]
"""Works on an engine's reply before the client gets it, for one route."""


async def unchanged(reply: Reply) -> Reply:
    """Return the reply unchanged."""
    return reply


async def answer(request: Request, operation: Operation) -> Response:
    """Read the body, call the engine that its `model` names, and return the answer.

    The engine's work is cancelled when the client disconnects: here until the answer begins, and by the
    response itself after that.
    """
    body = await read_json(request, gateway_of(request).settings.limits)
    return await operate(request, operation, body)


async def take_place(request: Request, engine: Engine) -> Ticket:
    """Wait for a place at an engine; the returned ticket holds it.

    Raises:
        EngineOverloaded: too many requests wait already, or the wait took too long.
    """
    state = state_of(request.scope)
    await gateway_of(request).admission.enter(state.ticket, state.context.tenant, engine.name)
    return state.ticket


async def check(request: Request, body: dict[str, Any]) -> None:
    """Drop the fields that would steer an engine, and refuse a body above a field's limit.

    Raises:
        InvalidRequest: a field is above its limit; `param` names it.
    """
    strip(request, body)
    gateway = gateway_of(request)
    limits = gateway.settings.limits
    await off_the_loop(request, partial(check_field_limits, body, limits))
    if dropped := strip_arguments(body, limits.xargs):
        gateway.metrics.stripped.labels(ARGUMENTS).inc(dropped)


def strip(request: Request, body: dict[str, Any]) -> None:
    """Drop the fields that would steer an engine, and count them."""
    for field in strip_steering(body):
        gateway_of(request).metrics.stripped.labels(field).inc()


async def operate(
    request: Request, operation: Operation, body: dict[str, Any], finish: Finish = unchanged
) -> Response:
    """Answer a request that was admitted and whose body has been read."""
    gateway = gateway_of(request)
    await check(request, body)
    engine = gateway.fleet.pick(body.get("model"), pools=operation.pools)
    state_of(request.scope).model = engine.name
    work = _respond(request, gateway, engine, operation, body, finish)
    return await unless_gone(request, work)


async def ask(request: Request, engine: Engine, operation: Operation, body: dict[str, Any]) -> Response:
    """Call a second engine within a request, for a body that came inside the request's own.

    Raises:
        BatonError: as for a request of its own.
    """
    gateway = gateway_of(request)
    await check(request, body)
    return await _respond(request, gateway, engine, operation, body)


async def _respond(
    request: Request,
    gateway: Gateway,
    engine: Engine,
    operation: Operation,
    body: dict[str, Any],
    finish: Finish = unchanged,
) -> Response:
    context = context_of(request)
    if operation.generates:
        measure = partial(require_moderate, body, gateway.settings.limits)
        small = len(await request.body()) <= SMALL_SCHEMAS
        constraints = measure() if small else await in_a_thread(request, measure)
        if engine.forwarding is None:  # what an engine here makes of tools is tried when it is made
            constraints = [constraint for constraint in constraints if constraint.param not in TOOLS]
            param = "tools" if body.get("tools") else "structured_outputs"
            context.try_grammar = partial(gateway.compiler.require_made, param=param, tenant=context.tenant)
        await gateway.compiler.require(constraints, context.tenant)
        context.cuts_max_tokens = gateway.settings.limits.cut_max_tokens
    automatic = apply_header(body, request.headers.get(HEADER)) if operation in OPERATIONS else False
    if engine.forwarding is not None:
        await prepare_forwarded(request, engine, operation, body)
        ticket = await take_place(request, engine)
        reply = await engine.forwarding.send(operation, body, context, automatic=automatic)
        return await _response(request, gateway, ticket, reply, finish)
    options = take_options(body, engine, operation)
    images = await take_images(request, engine, operation, body)
    sources: list[Handoff] = []
    if options is not None:
        require_latent(engine, options.latent_steps, gateway.settings.handoffs.latent_steps_max)
    # A pending source is waited for before this request takes a place: its own request may need the place.
    if options is not None:
        options, sources = await _sources(gateway, engine, operation, options, context)
    thought: PlannedRequest | None = None
    continued: list[Source] = []
    if options is not None and options.via_rosetta:
        thought = await gateway.rosetta.open(engine, operation, body, context, sources[0], images)
    elif options is not None:
        continued = await gateway.translations.sources(engine, context, sources)
    ticket = await take_place(request, engine)
    if thought is not None:
        reply = await thought.run(operation, body)
    elif options is not None:
        session = await gateway.sessions.open(engine, operation, body, context, options, continued, images)
        reply = await session.run(operation, body)
    elif operation is Operation.COMPLETIONS and images:
        reply = await completed(engine, body, context, images)
    else:
        chooser = gateway.automatic.request(engine, operation, body, context.tenant) if automatic else None
        reply = await engine.call(operation, body, context, chooser=chooser)
    return await _response(request, gateway, ticket, reply, finish)


async def _response(
    request: Request, gateway: Gateway, ticket: Ticket, reply: Reply, finish: Finish
) -> Response:
    """Return the response that an engine's reply becomes."""
    if not isinstance(reply, StreamReply):
        ticket.leave_engine()  # neither a slow reader nor what follows need hold it
    reply = await finish(reply)
    headers = ChainMap(context_of(request).answer_headers, dict(reply.headers))
    if not isinstance(reply, StreamReply):
        return Response(reply.body, reply.status, media_type=reply.media_type, headers=dict(headers))
    seconds = gateway.settings.edge.keep_alive_s
    return await event_stream(reply.events, gateway.metrics, headers, keep_alive_s=seconds)


async def _sources(
    gateway: Gateway,
    engine: LocalEngine,
    operation: Operation,
    options: HandoffOptions,
    context: RequestContext,
) -> tuple[HandoffOptions, list[Handoff]]:
    """Find the handoffs that a request continues; returns them, and how.

    Raises:
        BatonError: the engine cannot continue one of them.
    """
    if options.via_rosetta:
        gateway.rosetta.require_possible(engine, operation, options)
    if options.join == "moved" and len(options.sources) > 1:
        require_movable(engine, "handoff.join")
    wanted, rosetta = translates(options.translate, engine), gateway.rosetta
    records = await gateway.sources.all(
        options.sources, engine, context.tenant, translates=wanted or rosetta.is_target(engine)
    )
    if rosetta.is_default(engine, operation, options, records):
        options = options.model_copy(update={"translate": VIA_ROSETTA})
    elif not wanted:
        for record in records:
            require_compatible(record, engine)
    return options, records


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Do the work, and cancel it when the client disconnects. The body must have been read before.

    A stream of events goes on watching.
    """
    watch, response = ClientWatch(request.receive), None
    try:
        response = await work
    except (asyncio.CancelledError, BatonError):
        if not watch.gone:
            raise
        watch.take_back()
        raise ClientDisconnect() from None
    finally:
        if not isinstance(response, EventStream):
            watch.stop()
    if isinstance(response, EventStream):
        response.watch = watch
    return response
