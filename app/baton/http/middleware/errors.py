"""Turn exceptions into error responses. `baton.errors` has the exceptions, `error_body` their JSON shape.

Once a response has begun, its status cannot change: a stream ends with an `error` event (see `sse.py`), any
other response is cut off.
"""

from __future__ import annotations

from http import HTTPStatus

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
)
from baton.errors.base import did_you_mean
from baton.http.error_body import error_response
from baton.telemetry.metrics import GatewayMetrics

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
