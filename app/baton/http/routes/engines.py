"""Serve `/v1/engines`: what every engine does now, and operators' starts and stops; and `/v1/events`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import structlog
from fastapi import APIRouter, Request, Response

from baton.engines.backend import Json
from baton.engines.engine import Engine
from baton.engines.fleet import Act, Supervisor
from baton.errors import OperatorKeyNeeded
from baton.http.request import Gateway, gateway_of, state_of
from baton.http.sse import HEADERS, event_stream
from baton.models.parsers import REASONING_PARSER, TOOL_PARSER

router = APIRouter()
audit = structlog.get_logger("baton.audit")


@router.get("/v1/engines")
async def list_engines(request: Request) -> dict[str, Any]:
    """Show what every engine is good for and does now, and whether the caller may start and stop them.

    Requests are those of all tenants together.
    """
    gateway = gateway_of(request)
    rows = [_row(gateway, gateway.fleet.supervisor(name)) for name in gateway.fleet.names]
    return {"object": "list", "operator": state_of(request.scope).operator, "data": rows}


@router.post("/v1/engines/{name:path}/start", status_code=202)
async def start_engine(request: Request, name: str) -> dict[str, Any]:
    """Start an engine that was stopped or has failed; an operator's key is needed.

    The answer does not wait for it: `GET /v1/events` tells how it goes.
    """
    return _operate(request, name, Act.START)


@router.post("/v1/engines/{name:path}/stop", status_code=202)
async def stop_engine(request: Request, name: str) -> dict[str, Any]:
    """Stop an engine, once the requests that run have ended or `drain_timeout_s` is over.

    An operator's key is needed. New requests are refused at once.
    """
    return _operate(request, name, Act.STOP)


@router.post("/v1/engines/{name:path}/restart", status_code=202)
async def restart_engine(request: Request, name: str) -> dict[str, Any]:
    """Stop an engine, as `stop` does, and start it again; an operator's key is needed."""
    return _operate(request, name, Act.RESTART)


def _operate(request: Request, name: str, act: Act) -> dict[str, Any]:
    """Begin an operator's act; it is a line of the log, with its key, and so is one that is refused.

    Raises:
        OperatorKeyNeeded: the key is no operator's.
        ModelNotFound: there is no such engine.
    """
    gateway, state = gateway_of(request), state_of(request.scope)
    state.act = f"engine.{act}"
    line = {
        "act": act.value,
        "engine": name[:128],
        "tenant": state.context.tenant,
        "key": state.key_id or None,
    }
    if not state.operator:
        audit.warning("operator_act_refused", **line)
        raise OperatorKeyNeeded()
    supervisor = gateway.fleet.supervisor(name)
    audit.info("operator_act", **line)
    gateway.metrics.engines.acts.labels(name, act.value).inc()
    state.model = name

    def busy() -> bool:
        return any(gateway.admission.at(name)) or bool(supervisor.engine.active)

    gateway.fleet.operate(name, act, gateway.settings.drain_timeout_s, busy)
    return _row(gateway, supervisor)


def _row(gateway: Gateway, supervisor: Supervisor) -> Json:
    """Describe an engine for everybody: nothing of it is one tenant's."""
    engine = supervisor.engine
    in_engine = int(sum(supervisor.figures("vllm:num_requests_waiting")))
    used = supervisor.figures("vllm:kv_cache_usage_perc")
    rate = supervisor.tokens_per_s
    return {
        "object": "engine",
        "name": engine.name,
        "models": [engine.name, *engine.aliases],
        "kind": "generate" if engine.generates else "pooling",
        "here": engine.forwarding is None,
        "state": supervisor.state.value,
        "why": supervisor.why,
        "supports_handoffs": engine.supports_handoffs,
        "can": list(_can(engine)),
        "running": max(0, engine.active - in_engine),
        "waiting": in_engine + gateway.admission.at(engine.name)[1],
        "tokens_per_s": None if rate is None else round(rate, 2),
        "kv_used": round(sum(used) / len(used), 4) if used else None,
        "memory_bytes": engine.memory_bytes,
        "started_at": supervisor.started_at,
        "restarts": supervisor.restarts,
    } | gateway.fleet.on_demand.row(engine.name)


def _can(engine: Engine) -> Iterator[str]:
    yield "generate" if engine.generates else "pooling"
    if engine.supports_handoffs:
        yield "handoffs"
    card = next(iter(engine.cards()), {})
    for word, parser in (("tools", TOOL_PARSER), ("reasoning", REASONING_PARSER)):
        if isinstance(told := card.get(parser), dict) and told.get("name"):  # of a server elsewhere: anything
            yield word
    if engine.images.limit:
        yield "vision"
    if engine.forwarding is None:
        if engine.placeholder is not None:
            yield "latent"
        if engine.plugin is not None:
            yield from engine.plugin.can


@router.get("/v1/events", response_class=Response)
async def follow_events(request: Request) -> Response:
    """Stream what happens: the tenant's own handoffs, and the states of the engines, as server-sent events.

    `Last-Event-ID` goes on after that event.
    """
    gateway, state = gateway_of(request), state_of(request.scope)
    if state.head:
        return Response(media_type="text/event-stream", headers=HEADERS)
    edge = gateway.settings.edge
    events = gateway.fleet.events.follow(
        state.context.tenant,
        state.key_id,
        request.headers.get("last-event-id"),
        most=edge.event_streams,
        valid=state.valid,
    )
    stream = await event_stream(events, gateway.metrics, {}, keep_alive_s=edge.keep_alive_s)
    stream.endless = True
    state.ticket.answered()  # no work: `edge.event_streams` bounds them, not the tenant's requests at once
    return stream
