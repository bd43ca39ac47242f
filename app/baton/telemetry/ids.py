"""The ids that join a client's request, our log lines and the engine's work."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
MAX_TRACESTATE = 512

LOCAL_TENANT = "local"
"""The tenant of everyone when the gateway runs without keys."""

NO_TENANT = ""
"""Nobody's: the gateway has keys, and none has said yet who asks."""


@dataclass(slots=True)
class RequestContext:
    """Who asks, and under which ids.

    Attributes:
        request_id: our own id, unique; it names the request in the engine too.
        client_request_id: what the client sent as `X-Request-Id`, if it is well formed.
        traceparent: W3C trace context, if it is well formed.
        tracestate: passed on only together with a valid `traceparent`.
        tenant: the owner of the API key; `local` on a gateway without keys.
        prompt_tokens: tokens its engine was given, so far.
        generated_tokens: tokens its engine generated, so far.
        images: the names of the images that were read of it; its engine is given no others. None: vLLM
            names them by itself.
    """

    request_id: str
    client_request_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    tenant: str = LOCAL_TENANT
    prompt_tokens: int = 0
    generated_tokens: int = 0
    images: frozenset[str] | None = frozenset()


def new_request_id() -> str:
    """128 random bits as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def context_from_headers(headers: list[tuple[bytes, bytes]], tenant: str = LOCAL_TENANT) -> RequestContext:
    """Read the ids a client may send; whatever is malformed is as if it had not been sent.

    `tenant` is whose request it is until a key says more.

    Source of the formats: W3C Trace Context, sections 3.2 and 3.3.
    """
    context = RequestContext(new_request_id(), tenant=tenant)
    tracestate = None
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(text := value.decode("latin-1")):
            context.client_request_id = text
        elif name == b"traceparent" and TRACEPARENT.fullmatch(text := value.decode("latin-1")):
            context.traceparent = text
        elif name == b"tracestate" and len(value) <= MAX_TRACESTATE:
            tracestate = value.decode("latin-1")
    if context.traceparent:
        context.tracestate = tracestate
    return context
