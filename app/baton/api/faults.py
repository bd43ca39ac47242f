"""From an exception to an answer: one shape, one place.

Once an answer has begun its status is out; a stream then ends with an `error` event (`streams.py`),
and anything else is cut off.
"""

from __future__ import annotations

import json
from http import HTTPStatus

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Unauthorized,
)
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import GatewayMetrics

ANTHROPIC_PATHS = ("/v1/messages",)
STATUS_ERRORS: dict[int, type[BatonError]] = {
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.METHOD_NOT_ALLOWED: MethodNotAllowed,
    HTTPStatus.BAD_REQUEST: InvalidRequest,
}


class FaultsMiddleware:
    """Answers whatever is raised below it."""

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
        except Exception as error:  # the border of the application: nothing leaves it as it came
            self._log.error("unexpected_error", path=scope.get("path"), exc_info=error)
            if started:
                raise
            await error_response(InternalError(), scope)(scope, receive, send)


async def http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method) in our shape."""
    assert isinstance(error, HTTPException)
    ours = STATUS_ERRORS.get(error.status_code, InternalError)()
    response = error_response(ours, request.scope)
    if error.headers and "allow" in {name.lower() for name in error.headers}:
        response.headers["Allow"] = error.headers["Allow"]
    return response


async def invalid_parameters(request: Request, error: Exception) -> Response:
    """FastAPI's refusal of a query parameter, in our shape."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(InvalidRequest(f"{name}: {first['msg']}", param=name), request.scope)


def error_response(error: BatonError, scope: Scope) -> Response:
    """The answer to an error, with its code noted for metrics and log."""
    scope["baton_error"], scope["baton_reason"] = error.code, error.reason
    response = JSONResponse(error_body(error, scope), status_code=error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.ends_connection:
        response.headers["Connection"] = "close"
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def error_body(error: BatonError, scope: Scope) -> dict[str, object]:
    """The JSON body of an error, with this request's id."""
    context = scope["baton"]
    assert isinstance(context, RequestContext)
    body: dict[str, object] = error.body(context.request_id)
    if scope["path"].startswith(ANTHROPIC_PATHS):
        # Anthropic's SDKs look for this; the rest of the shape is the same.
        body = {"type": "error", **body}
    return body


def error_event(error: BatonError, scope: Scope) -> str:
    """The last event of a stream that fails midway."""
    scope["baton_error"], scope["baton_reason"] = error.code, error.reason
    return f"event: error\ndata: {json.dumps(error_body(error, scope))}\n\n"
