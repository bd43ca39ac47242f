"""Carry out a request, from its body to its answer, in the same steps for every operation."""

from __future__ import annotations

import asyncio
import re
from collections import ChainMap
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from baton.admission.tenants import Ticket
from baton.engines.adapters import base_of
from baton.engines.backend import Operation, Reply, StreamReply
from baton.engines.engine import Engine
from baton.engines.fleet import Choice, Maker
from baton.errors import (
    BatonError,
    ClientError,
    EngineOverloaded,
    EngineUnavailable,
    RemoteBusy,
    RemoteFailed,
)
from baton.http.body.fields import ARGUMENTS, check_field_limits, order_of, strip_arguments, strip_steering
from baton.http.body.json import is_small
from baton.http.body.schemas import TOOLS, require_moderate
from baton.http.elsewhere_body import prepare_forwarded
from baton.http.request import (
    Gateway,
    allowed,
    begin_usage,
    context_of,
    counted_for,
    gateway_of,
    in_a_thread,
    may_use,
    off_the_loop,
    read_json,
    state_of,
)
from baton.http.request_images import take_images
from baton.http.sse import ClientWatch, EventStream, event_stream, give_up, later_events
from baton.relay.asked import HEADER, HINTS, OPERATIONS, apply_header
from baton.relay.door import complete_with_images

CONSTRAINED = frozenset(
    {"functions", "output_config", "response_format", "structured_outputs", "text", "tools"}
)
"""Fields of a body from which an engine compiles what its answer may be."""
MEDIA = re.compile(rb"image|audio|video|file|prompt_embeds|source|\\u")
"""Found in every body that holds media, or the address of some: the names, or an escape that may hide one."""
SMALL_SCHEMAS = 8 * 1024
"""Largest body, in bytes, whose schemas are measured on the event loop; larger ones go to a thread."""
FALLBACK_HEADER = "X-Baton-Fallback"
"""Header of an answer that another engine gave than the one that was asked for: its name."""
Done = TypeVar("Done")
Finish = Callable[[Reply], Awaitable[Reply]]
"""Works on an engine's reply before the client gets it, for one route."""


async def answer(request: Request, operation: Operation) -> Response:
    """Read the body, call the engine that its `model` names, and return the answer.

    The engine's work is cancelled when the client disconnects: here until the answer begins, and by the
    response itself after that.
    """
    body = await read_json(request, gateway_of(request).settings.limits)
    raw = await request.body()
    media = not is_small(raw) or MEDIA.search(raw) is not None
    return await operate(request, operation, body, media=media)


async def engage(request: Request, model: object, *, pools: bool = False, falls_back: bool = False) -> Engine:
    """Return the engine that `model` names; one on demand is loaded first, and stays until the request ends.

    Args:
        falls_back: whether one of its fallbacks will do, which a header of the answer must then tell.

    Raises:
        BatonError: there is none, or it is not ready in time.
    """
    state, gateway, lost = state_of(request.scope), gateway_of(request), None
    choices = gateway.fleet.choices(model, pools=pools, load=gateway.admission.requests)
    choices = allowed(request, model, choices)
    for choice in choices:
        if lost is not None and not (falls_back or gateway.fleet.in_group(model, choice[0])):
            break
        try:
            context = state.context
            engine = await gateway.fleet.engage(choice, context.tenant, state.ticket, context.give_way)
        except (EngineUnavailable, EngineOverloaded) as error:
            lost = lost or error
            continue
        if lost is not None and not gateway.fleet.in_group(model, choice[0]):
            state.context.answer_headers[FALLBACK_HEADER] = engine.name
            _count_fallback(gateway, choices[0], engine, lost)
        begin_usage(request, engine)
        return engine
    assert lost is not None
    raise lost


def _count_fallback(gateway: Gateway, asked: Choice, engine: Engine, lost: BatonError) -> None:
    fallbacks = gateway.metrics.on_demand.fallbacks
    fallbacks.labels(asked[0].engine.name, engine.base, lost.reason).inc()


async def take_place(request: Request, engine: Engine) -> Ticket:
    """Wait for a place at an engine; the returned ticket holds it.

    Raises:
        EngineOverloaded: too many requests wait already, or the wait took too long.
    """
    state = state_of(request.scope)
    context = state.context
    enter = gateway_of(request).admission.enter
    await enter(state.ticket, context.tenant, engine.base, context.give_way, order=state.order)
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
    """Drop the fields that would steer an engine, and count them; one of them orders the tenant's requests.

    Raises:
        InvalidRequest: `priority` is no whole number.
    """
    state_of(request.scope).order = order_of(body)
    for field in strip_steering(body):
        gateway_of(request).metrics.stripped.labels(field).inc()


async def operate(
    request: Request,
    operation: Operation,
    body: dict[str, Any],
    finish: Finish | None = None,
    *,
    media: bool = True,
) -> Response:
    """Answer a request that was admitted and whose body has been read; see `_respond`."""
    gateway = gateway_of(request)
    await check(request, body)
    load, maker, asked = gateway.admission.requests, None, body.get("model")
    choices = gateway.fleet.choices(asked, pools=operation.pools, load=load)
    if len(choices) > 1 and (maker := await _maker(request, gateway, body)) is not None:
        choices = gateway.fleet.choices(asked, pools=operation.pools, load=load, maker=maker)
    choices = allowed(request, asked, choices)
    holds = state_of(request.scope).ticket.holds
    choices.sort(
        key=lambda each: not holds(each[0].engine.name)
    )  # one that was loaded for it need not move on
    work = _tried(request, gateway, choices, operation, body, finish, media=media)
    if body.get("stream") is True and gateway.fleet.comes(choices):
        work = _kept_alive(gateway, work)
    return await unless_gone(request, work)


async def _maker(request: Request, gateway: Gateway, body: dict[str, Any]) -> Maker | None:
    """Find the engine that made the handoff which a request continues; of several the first one's."""
    options = body.get("handoff")
    named = options.get("from") if isinstance(options, dict) else request.headers.get(HEADER)
    named = named[0] if isinstance(named, list) and named else named
    if not isinstance(named, str):
        return None
    try:
        record = await gateway.library.get(named.strip(), context_of(request).tenant)
    except BatonError:  # which the request is told when it is answered
        return None
    return Maker(record.model, base_of(record.weights))


async def _tried(
    request: Request,
    gateway: Gateway,
    choices: Sequence[Choice],
    operation: Operation,
    body: dict[str, Any],
    finish: Finish | None,
    *,
    media: bool,
) -> Response:
    """Answer at the first engine that can, before its first token; the others are tried in their order."""
    state, asked = state_of(request.scope), body.get("model")
    headers, lost = state.context.answer_headers, None
    for number, choice in enumerate(choices, 1):
        supervisor, word = choice
        left = body if number == len(choices) else await off_the_loop(request, partial(deepcopy, body))
        if lost is not None and not gateway.fleet.in_group(asked, supervisor):
            left["model"], headers[FALLBACK_HEADER] = word, supervisor.engine.name
        try:
            context = state.context
            engine = await gateway.fleet.engage(choice, context.tenant, state.ticket, context.give_way)
            begin_usage(request, engine)
            held = media or bool(engine.images.texts)  # whose placeholders no text may hold
            response = await _respond(request, gateway, engine, operation, left, finish, media=held)
        except (EngineUnavailable, EngineOverloaded, RemoteFailed, RemoteBusy) as error:
            lost = lost or error
            state.model = supervisor.engine.name
            state.ticket.let_go()
            headers.pop(FALLBACK_HEADER, None)
        except ClientError:
            if lost is None:
                raise
            headers.pop(FALLBACK_HEADER, None)
            break  # the fallback's own reason would mislead: the client asked another model
        else:
            if lost is not None and FALLBACK_HEADER in headers:
                _count_fallback(gateway, choices[0], engine, lost)
            return response
    assert lost is not None
    raise lost


async def _kept_alive(gateway: Gateway, work: Coroutine[Any, Any, Response]) -> Response:
    """Answer a stream whose engine is being loaded; it begins with comments where that takes a while."""
    seconds = gateway.settings.edge.keep_alive_s
    answering = asyncio.ensure_future(work)
    try:
        await asyncio.wait({answering}, timeout=seconds or None)
        if answering.done():
            return answering.result()
    except BaseException:
        await give_up(answering)
        raise
    return await event_stream(later_events(answering), gateway.metrics, {}, keep_alive_s=seconds, begun=True)


async def ask(request: Request, engine: Engine, operation: Operation, body: dict[str, Any]) -> Response:
    """Call a second engine within a request, for a body that came inside the request's own.

    Raises:
        BatonError: as for a request of its own.
    """
    gateway = gateway_of(request)
    await check(request, body)
    with counted_for(request, engine):
        return await _respond(request, gateway, engine, operation, body)


async def _respond(
    request: Request,
    gateway: Gateway,
    engine: Engine,
    operation: Operation,
    body: dict[str, Any],
    finish: Finish | None = None,
    *,
    media: bool = True,
) -> Response:
    """Answer a body that was checked, at the engine that it names.

    Args:
        body: the body, which is changed.
        finish: works on the reply; None: the reply goes out as it is.
        media: whether the body may hold images.
    """
    state = state_of(request.scope)
    context = state.context
    asked = body.get("model")
    context.model = asked or engine.name
    if (
        engine.forwarding is None or asked not in gateway.fleet.served or gateway.fleet.is_group(asked)
    ):  # none, or one that only a pattern fits
        body["model"] = engine.name  # vLLM knows the names that the engine had at its start
    if operation.generates:
        context.cuts_max_tokens = gateway.settings.limits.cut_max_tokens
        await _require_moderate(request, gateway, engine, operation, body)
    handed_over = operation in OPERATIONS
    header = request.headers.get(HEADER)
    automatic = handed_over and (header is None or apply_header(body, header))
    if HINTS in body:
        gateway.relay.hint(engine, body, context, partial(may_use, request))
    if engine.forwarding is not None:
        await prepare_forwarded(request, engine, operation, body)
        await take_place(request, engine)
        reply = await engine.forwarding.send(operation, body, context, automatic=automatic)
        return await _response(request, gateway, reply, finish)
    relay, place = gateway.relay, partial(take_place, request, engine)
    options = relay.asked(engine, operation, body) if "handoff" in body else None
    images = await take_images(request, engine, operation, body) if media else []
    if options is not None:
        reply = await relay.answer(engine, operation, body, context, options, images, place)
        return await _response(request, gateway, reply, finish)
    await place()
    if operation is Operation.COMPLETIONS and images:
        reply = await complete_with_images(engine, body, context, images)
    elif automatic and engine.supports_handoffs:
        reply = await relay.call(engine, operation, body, context)
    else:
        reply = await engine.call(operation, body, context)
    return await _response(request, gateway, reply, finish)


async def _require_moderate(
    request: Request, gateway: Gateway, engine: Engine, operation: Operation, body: dict[str, Any]
) -> None:
    """Refuse schemas, grammars and tools that cost too much to compile, and try the doubtful ones.

    What an engine here makes of tools is tried when it has made it.
    """
    context = state_of(request.scope).context
    if engine.forwarding is None:
        param = "tools" if body.get("tools") else "structured_outputs"
        context.try_grammar = partial(gateway.compiler.require_made, param=param, tenant=context.tenant)
        context.fits = partial(gateway.compiler.fits, tenant=context.tenant)
    defines = operation is Operation.MESSAGES  # messages there may define tools
    if not defines and CONSTRAINED.isdisjoint(body):
        return
    measure = partial(require_moderate, body, gateway.settings.limits)
    small = len(await request.body()) <= SMALL_SCHEMAS
    constraints = measure() if small else await in_a_thread(request, measure)
    if engine.forwarding is None:
        constraints = [constraint for constraint in constraints if constraint.param not in TOOLS]
    await gateway.compiler.require(constraints, context.tenant)


async def _response(request: Request, gateway: Gateway, reply: Reply, finish: Finish | None) -> Response:
    """Return the response that an engine's reply becomes."""
    state = state_of(request.scope)
    if not isinstance(reply, StreamReply):
        state.ticket.leave_engine()  # neither a slow reader nor what follows need hold it
    if finish is not None:
        reply = await finish(reply)
    headers = ChainMap(state.context.answer_headers, dict(reply.headers))
    if not isinstance(reply, StreamReply):
        return Response(reply.body, reply.status, media_type=reply.media_type, headers=dict(headers))
    seconds = gateway.settings.edge.keep_alive_s
    return await event_stream(reply.events, gateway.metrics, headers, keep_alive_s=seconds)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Done]) -> Done:
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
