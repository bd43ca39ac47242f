"""Give each request its id, and count and log it at its end. The outermost middleware."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from baton.http.request_state import RequestState
from baton.telemetry.ids import RequestContext, context_from_headers
from baton.telemetry.metrics import GatewayMetrics
from baton.telemetry.series import NOBODY, OTHER

PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Routes that probes request every few seconds: counted, but logged only at level debug."""

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class RequestContextMiddleware:
    """Sets the request's context and id headers, counts requests, and writes the access log.

    Args:
        app: the app that answers.
        metrics: where requests are counted.
        routes: the routes whose paths are metric labels; all other paths are `other`.
        unidentified: the tenant of a request until its key is known.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: GatewayMetrics, routes: Sequence[BaseRoute], unidentified: str
    ) -> None:
        self._app = app
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
