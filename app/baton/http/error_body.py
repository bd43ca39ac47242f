"""Write an error for the client: as a response, its JSON body, or the last event of a stream."""

from __future__ import annotations

import json

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from baton.errors import BatonError, RangeNotSatisfiable, Unauthorized
from baton.http.request import state_of

ANTHROPIC_PATHS = ("/v1/messages",)


def error_response(error: BatonError, scope: Scope) -> Response:
    """Return the response to an error, and note the error for metrics and log."""
    state_of(scope).note(error)
    response = JSONResponse(error_body(error, scope), status_code=error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.ends_connection:
        response.headers["Connection"] = "close"
    if isinstance(error, RangeNotSatisfiable):
        response.headers["Content-Range"] = f"bytes */{error.size}"
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def error_body(error: BatonError, scope: Scope) -> dict[str, object]:
    """Return the JSON body of an error, with this request's id."""
    body: dict[str, object] = error.body(state_of(scope).context.request_id)
    if scope["path"].startswith(ANTHROPIC_PATHS):
        # Anthropic's SDKs need this field; the rest of the shape is the same.
        body = {"type": "error", **body}
    return body


def error_event(error: BatonError, scope: Scope) -> str:
    """Return the last event of a stream that fails midway, and note the error for metrics and log."""
    state_of(scope).note(error)
    return f"event: error\ndata: {json.dumps(error_body(error, scope))}\n\n"
