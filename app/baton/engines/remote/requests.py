"""Write the requests that a server elsewhere gets: path, headers and body."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from baton.engines.port import Json, Operation
from baton.engines.remote.answers import WITH_USAGE
from baton.engines.remote.keys import Key
from baton.telemetry.ids import HOPS_HEADER, RequestContext

PATHS = {
    Operation.COMPLETIONS: "/v1/completions",
    Operation.CHAT: "/v1/chat/completions",
    Operation.RESPONSES: "/v1/responses",
    Operation.MESSAGES: "/v1/messages",
    Operation.COUNT_TOKENS: "/v1/messages/count_tokens",
    Operation.EMBEDDINGS: "/v1/embeddings",
    Operation.POOLING: "/pooling",
    Operation.CLASSIFY: "/classify",
    Operation.SCORE: "/score",
    Operation.RERANK: "/rerank",
    Operation.TOKENIZE: "/tokenize",
    Operation.DETOKENIZE: "/detokenize",
}
HANDOFFS = "/v1/handoffs"
MODELS = "/v1/models"
PEER = "/v1/peer"
STREAMED = (Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES)
SALTED = (Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES)
"""Operations that take vLLM's `cache_salt`."""
MOST_HOPS = 4
"""Most gateways that a request passes."""
HANDOFF_HEADER = "X-Baton-Handoff"


def headers_of(context: RequestContext | None, key: Key, *, automatic: bool = True) -> dict[str, str]:
    """Return the headers of a request. None of the client's are among them but its trace context and session.

    Args:
        context: of the client's request; None: there is none.
        key: for the server.
        automatic: whether the server may load and save handoffs by itself.
    """
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    if key.value is not None:
        headers["Authorization"] = f"Bearer {key.value}"
    if context is not None:
        headers["X-Request-Id"] = context.request_id
        headers[HOPS_HEADER.decode()] = str(context.hops + 1)
        if context.session_id is not None:  # a proxy before the server keeps the session on one gateway
            headers["X-Session-Id"] = context.session_id
        if context.traceparent:
            headers["traceparent"] = context.traceparent
        if context.tracestate:
            headers["tracestate"] = context.tracestate
    if not automatic:
        headers[HANDOFF_HEADER] = "off"
    return headers


def asks_for_usage(operation: Operation, body: Mapping[str, Any]) -> bool:
    """Return whether a stream does not tell the number of its tokens, though it could."""
    options = body.get("stream_options")
    if operation not in WITH_USAGE or not body.get("stream") or not isinstance(options, dict | None):
        return False
    return not (options or {}).get("include_usage")


def body_of(operation: Operation, body: Json, model: str, salt: str | None) -> bytes:
    """Return the body that the server gets.

    Args:
        operation: the operation.
        body: the client's body; not changed.
        model: the model's name on the server.
        salt: sets vLLM's prefix cache apart for the tenant; None: nothing does.
    """
    sent = body | {"model": model}
    if asks_for_usage(operation, body):
        sent["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    if salt is not None and operation in SALTED:
        sent["cache_salt"] = salt
    return to_json(sent)


class Salts:
    """Makes the salt of each tenant: the same for all its requests, and different for other servers."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def of(self, tenant: str) -> str:
        """Return a tenant's salt."""
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()
