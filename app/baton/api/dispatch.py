"""One request, from its body to its answer: the same few steps for every operation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from baton.api.body_work import in_a_thread, off_the_loop
from baton.api.caps import check_caps
from baton.api.constraints import require_moderate
from baton.api.gateway import Gateway, context_of, gateway_of
from baton.api.limits import ARGUMENTS, read_json, strip_arguments, strip_steering
from baton.api.pictures import completed, take_pictures
from baton.api.relay import relayed
from baton.api.streams import event_stream
from baton.api.wishes import require_latent, take_wish
from baton.engines.port import Engine, Operation, StreamReply
from baton.errors import BatonError
from baton.telemetry.ids import RequestContext

GENERATING = frozenset({Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES})
"""What an engine compiles schemas for."""
SMALL_SCHEMAS = 8 * 1024
"""Bytes of a body whose schemas are counted on the event loop; counting costs more than parsing."""
Prepare = Callable[[dict[str, Any]], dict[str, Any]]
"""What one route alone does to a body before an engine sees it; raises `InvalidRequest`."""


async def answer(request: Request, operation: Operation, prepare: Prepare = lambda body: body) -> Response:
    """Read the body, pick the engine its `model` names, let it work, send what comes.

    A client that goes away before the answer begins ends the work; after that the answer's own
    stream watches for it.
    """
    gateway = gateway_of(request)
    gateway.admission.require_tenant(request)
    body = await read_json(request, gateway.settings.limits)
    return await operate(request, operation, body, prepare)


async def operate(
    request: Request, operation: Operation, body: dict[str, Any], prepare: Prepare = lambda body: body
) -> Response:
    """The same for a request that counts for its tenant, and whose body has been read."""
    gateway = gateway_of(request)
    for field in strip_steering(body):
        gateway.metrics.stripped.labels(field).inc()
    await refuse_excess(request, body)
    body = prepare(body)
    engine = gateway.fleet.pick(body.get("model"))
    request.scope["baton_model"] = engine.name
    work = _respond(request, gateway, engine, operation, body, context_of(request))
    return await unless_gone(request, work)


async def ask(request: Request, engine: Engine, operation: Operation, body: dict[str, Any]) -> Response:
    """Ask a second engine within a request, one whose body came inside that of another.

    Raises:
        BatonError: as for a request of its own.
    """
    gateway = gateway_of(request)
    for field in strip_steering(body):
        gateway.metrics.stripped.labels(field).inc()
    await refuse_excess(request, body)
    return await _respond(request, gateway, engine, operation, body, context_of(request))


async def refuse_excess(request: Request, body: dict[str, Any]) -> None:
    """Let no request through that asks for too much of anything, or sets arguments that are not allowed.

    Raises:
        InvalidRequest: it asks for too much; `param` names the field.
    """
    gateway = gateway_of(request)
    limits = gateway.settings.limits
    await off_the_loop(request, partial(check_caps, body, limits))
    if dropped := strip_arguments(body, limits.xargs):
        gateway.metrics.stripped.labels(ARGUMENTS).inc(dropped)


async def _respond(
    request: Request,
    gateway: Gateway,
    engine: Engine,
    operation: Operation,
    body: dict[str, Any],
    context: RequestContext,
) -> Response:
    if operation in GENERATING:
        judge = partial(require_moderate, body, gateway.settings.limits)
        small = len(await request.body()) <= SMALL_SCHEMAS
        constraints = judge() if small else await in_a_thread(request, judge)
        await gateway.compiler.require(constraints, context.tenant)
    wish = take_wish(body, engine, operation)
    pictures = await take_pictures(request, engine, operation, body)
    source = None
    if wish is not None:
        require_latent(engine, wish.latent_steps, gateway.settings.handoffs.latent_steps_max)
    if wish is not None and wish.source:  # waited for before there is a place: its own request may need one
        source = await gateway.handoffs.source(wish.source, engine, context.tenant)
    ticket = await gateway.admission.engine(request, engine.name)
    if wish is not None:
        reply = await relayed(gateway, engine, operation, body, context, wish, source, pictures)
    elif operation is Operation.COMPLETIONS and pictures:
        reply = await completed(engine, body, context, pictures)
    else:
        reply = await engine.call(operation, body, context)
    if not isinstance(reply, StreamReply):
        ticket.leave_engine()  # however slowly the client reads
        return Response(reply.body, media_type=reply.media_type, headers=dict(reply.headers))
    seconds = gateway.settings.edge.keep_alive_s
    return await event_stream(
        reply.events, request.scope, gateway.metrics, reply.headers, keep_alive_s=seconds
    )


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Do the work, and end it when the client goes away. The body has been read by now."""
    working = asyncio.current_task()
    assert working is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        working.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except (asyncio.CancelledError, BatonError):
        if not gone:
            raise
        working.uncancel()  # it was ours, and has done its work; vLLM may have swallowed it
        raise ClientDisconnect() from None
    finally:
        watching.cancel()
