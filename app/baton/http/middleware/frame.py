"""Give every request its id, turn every exception into an answer, end what runs when the gateway ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from baton.admission.usage import Usage
from baton.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    ShuttingDown,
    did_you_mean,
)
from baton.http.error_body import error_event, error_response
from baton.http.request import Drain, RequestState, state_of
from baton.telemetry.ids import NO_TENANT, RequestContext, context_from_headers
from baton.telemetry.logs import AuditLog
from baton.telemetry.metrics import NOBODY, OTHER, GatewayMetrics

# Turn exceptions into error responses. `baton.errors` has the exceptions, `error_body` their JSON shape.
#
# Once a response has begun, its status cannot change: a stream ends with an `error` event (see `sse.py`), any
# other response is cut off.


STATUS_ERRORS: dict[int, type[BatonError]] = {
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.METHOD_NOT_ALLOWED: MethodNotAllowed,
    HTTPStatus.BAD_REQUEST: InvalidRequest,
}


class ErrorMiddleware:
    """Answers every exception that the app raises."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = structlog.get_logger("baton.faults")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            self._metrics.disconnects.labels("request").inc()
        except BatonError as error:
            if started:
                raise
            await error_response(error, scope)(scope, receive, send)
        except Exception as error:  # the border of the app: clients never see a raw exception
            self._log.error("unexpected_error", path=scope.get("path"), exc_info=error)
            if started:
                raise
            await error_response(InternalError(), scope)(scope, receive, send)


async def http_exception(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors (no such route, wrong method) in our JSON shape."""
    assert isinstance(error, HTTPException)
    kind = STATUS_ERRORS.get(error.status_code, InternalError)
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    if kind is NotFound:
        near = did_you_mean(request.url.path, (route.path for route in routes), alike=0.7)
        return error_response(NotFound(NotFound.default_message + near), request.scope)
    response = error_response(kind(), request.scope)
    if kind is MethodNotAllowed:
        there = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        methods = {method for route in there for method in route.methods or ()}
        response.headers["Allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
    return response


async def invalid_parameters(request: Request, error: Exception) -> Response:
    """Answer FastAPI's error about a query parameter in our JSON shape."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(InvalidRequest(f"{name}: {first['msg']}", param=name), request.scope)


# Let running requests finish at shutdown, and end late ones with an error that clients can read.
#
# A request that is ended without an answer gets a 503; a stream gets a last `error` event.


ERROR_WITHIN_S = 1.0
"""Seconds to send the error to a client whose request is ended."""

log = structlog.get_logger("baton.server")


class DrainMiddleware:
    """Answers requests that the drain ends."""

    def __init__(self, app: ASGIApp, *, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        answer = _Response(send, self._drain)
        with self._drain.watching(task, partial(answer.leave, scope)):
            try:
                await self._app(scope, receive, answer.send)
            except asyncio.CancelledError:
                if not self._drain.was_cut(task):
                    raise
                task.uncancel()
                await answer.send_error(scope, receive)


class _Response:
    """A response, with how much of it was sent."""

    def __init__(self, send: Send, drain: Drain) -> None:
        self._send = send
        self._drain = drain
        self._begun = False
        self._streams = False
        self._over = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            self._streams = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            if self._drain.begun:  # so that clients open their next connection elsewhere
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif message["type"] == "http.response.body":
            self._over = not message.get("more_body", False)
        await self._send(message)

    def leave(self, scope: Scope) -> bool:
        """End the answer with how it goes on, if it is a stream that has begun; returns whether it does."""
        cut = state_of(scope).context.cut
        return self._begun and self._streams and cut is not None and cut.end is not None and cut.end()

    async def send_error(self, scope: Scope, receive: Receive) -> None:
        """Send the error, unless the client does not read it in time."""
        log.info("request_cut_off", path=scope["path"])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ERROR_WITHIN_S):
                if not self._begun:
                    await error_response(ShuttingDown(), scope)(scope, receive, self.send)
                elif self._streams and not self._over:
                    event = error_event(ShuttingDown(), scope).encode()
                    await self._send({"type": "http.response.body", "body": event, "more_body": False})


# Give each request its id, and count and log it at its end. The outermost middleware.


PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Routes that probes request every few seconds: counted, but logged only at level debug."""

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class RequestContextMiddleware:
    """Sets the request's context and id headers, counts requests, and writes the access log.

    Args:
        routes: the routes whose paths are metric labels; all other paths are `other`.
        unidentified: the tenant of a request until its key is known.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: GatewayMetrics,
        usage: Usage,
        audit: AuditLog,
        routes: Sequence[BaseRoute],
        unidentified: str,
    ) -> None:
        self._app = app
        self._usage = usage
        self._audit = audit
        self._unidentified = unidentified
        self._metrics = metrics
        plain = [route for route in routes if isinstance(route, Route)]
        self._paths = frozenset(route.path for route in plain)
        self._templates = [(route.path_regex, route.path_format) for route in plain if route.param_convertors]
        self._log = structlog.get_logger("baton.access")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_from_headers(scope["headers"], self._unidentified)
        state = RequestState(context, send=send)
        state.attach(scope)
        bind_contextvars(request_id=context.request_id)
        route = self._label(scope["path"])
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_id_headers(context)]
            await send(message)

        in_flight = self._metrics.in_flight.labels(route)
        in_flight.inc()
        began = time.perf_counter()
        try:
            await self._app(scope, receive, observed)
        finally:
            in_flight.dec()
            self._record(scope, state, route, status, time.perf_counter() - began)

    def _label(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((template for regex, template in self._templates if regex.match(path)), OTHER)

    def _record(self, scope: Scope, state: RequestState, route: str, status: int, seconds: float) -> None:
        context = state.context
        method = scope["method"] if scope["method"] in METHODS else OTHER
        code_class = f"{status // 100}xx" if status else "none"
        self._metrics.requests.labels(route, method, code_class).inc()
        self._metrics.duration.labels(route).observe(seconds)
        self._count_tenant(context, route, code_class)
        if state.used:
            state.ticket.after(partial(self._count_used, state))
        if state.act is not None or (method == "DELETE" and route != OTHER and context.tenant != NO_TENANT):
            self._write_audit(scope, state, status)
        if state.error_reason is not None:
            self._metrics.rejections.labels(state.error_reason).inc()
        line = {
            "request_id": context.request_id,
            "client_request_id": context.client_request_id,
            "trace": context.traceparent,
            "tenant": context.tenant or None,
            "method": method,
            "route": route,
            "model": state.model,
            "status": status,
            "code": state.error_code,
            "seconds": round(seconds, 4),
        }
        log = self._log.debug if route in PROBES else self._log.info
        log("request", **{key: value for key, value in line.items() if value is not None})

    def _count_used(self, state: RequestState) -> None:
        state.count(self._usage, requests=1)
        self._usage.end(state.key_id, state.context.request_id)

    def _write_audit(self, scope: Scope, state: RequestState, status: int) -> None:
        outcome = "done" if 0 < status < 400 else "refused" if 400 <= status < 500 else "failed"
        self._audit.write(
            state.act or "delete",
            what=state.what or scope["path"],
            outcome=outcome,
            code=state.error_code,
            tenant=state.context.tenant,
            key=state.key_id or None,
            request_id=state.context.request_id,
        )

    def _count_tenant(self, context: RequestContext, route: str, code_class: str) -> None:
        if route not in PROBES:
            self._metrics.tenants.count(
                context.tenant or NOBODY,
                code_class,
                prompt_tokens=context.prompt_tokens,
                generated_tokens=context.generated_tokens,
            )


def _id_headers(context: RequestContext) -> list[tuple[bytes, bytes]]:
    """Return our id as `X-Request-Id`, and the client's own beside it, as OpenAI's API does."""
    headers = [(b"x-request-id", context.request_id.encode())]
    if context.client_request_id:
        headers.append((b"x-client-request-id", context.client_request_id.encode()))
    return headers
