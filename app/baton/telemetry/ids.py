"""Read and make the ids that connect a client's request with our log lines and the engine's work."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
TRACESTATE = re.compile(r"[\t\x20-\x7e]{1,512}")
SESSION_ID = re.compile(r"[A-Za-z0-9._:/@+=~-]{1,128}")
"""What `X-Session-Id` may be to be sent on: whatever clients name sessions by, but no list and no quotes."""
HOPS_HEADER = b"x-baton-hops"
"""Header in which gateways count how often a request was sent on, so that none goes in a circle."""

LOCAL_TENANT = "local"
"""The tenant of every request on a gateway without keys."""

NO_TENANT = ""
"""The tenant of a request whose key has not been checked yet."""


@dataclass(slots=True)
class Cut:
    """The end of a streamed answer where it stands, so that its client has it go on at another gateway.

    Attributes:
        end: ends the answer, and sets what follows; returns whether it was still generated. None: it cannot
            be ended. The engine sets it while it generates.
        ended: whether the answer was ended so.
        prompt: token ids of the prompt.
        said: token ids of the answer, as far as its client received it, once the stream is over.
        text: the text of these.
        why: why nobody can go on with it exactly; None: one can.
    """

    end: Callable[[], bool] | None = None
    ended: bool = False
    prompt: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    text: str = ""
    why: str | None = None


@dataclass(slots=True)
class RequestContext:
    """The ids, the tenant and the token counts of one request.

    Attributes:
        request_id: our own id, unique; the engine uses it too.
        client_request_id: the `X-Request-Id` header, if it is well formed.
        traceparent: W3C trace context, if it is well formed.
        tracestate: passed on only together with a valid `traceparent`.
        tenant: the owner of the API key; `local` on a gateway without keys.
        model: name of the model that the client asked for, by which answers call it; empty: the engine's own.
        prompt_tokens: prompt tokens so far.
        generated_tokens: generated tokens so far.
        cached_tokens: prompt tokens that were not computed, of prompts whose answers are complete.
        hops: number of gateways that sent the request on before it came here.
        session_id: the `X-Session-Id` header, by which proxies choose a gateway, if it is well formed.
        cuts_max_tokens: whether an answer that may be longer than the context leaves is cut, or refused.
        answer_headers: headers of the answer that the engine adds, before its first event.
        try_grammar: compiles on trial what an engine made of the request, as `structured_outputs` has it, and
            raises where that takes too long. None: the request is the gateway's own.
        fits: checks whether a text is of a grammar, given both and the grammar's syntax. None: it is not
            checked.
        images: digests of the request's images, the only ones that its engine may get. None: vLLM names
            them itself.
        take_memory: counts further bytes that the request holds until it ends, of its body or its answer;
            raises `RateLimited` or `GatewayOverloaded` where these bytes are too many.
        give_way: ends the request, to begin it again later; called when a client's request needs the engine.
            None: a client waits for this one.
        cut: ends the answer before it is complete. None: it cannot be.
    """

    request_id: str
    client_request_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    tenant: str = LOCAL_TENANT
    model: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    images: frozenset[str] | None = frozenset()
    hops: int = 0
    session_id: str | None = None
    cuts_max_tokens: bool = True
    answer_headers: dict[str, str] = field(default_factory=dict)
    try_grammar: Callable[[Mapping[str, Any]], Awaitable[None]] | None = None
    fits: Callable[[str, str, str], Awaitable[bool]] | None = None
    take_memory: Callable[[int], None] = lambda _size: None
    give_way: Callable[[], None] | None = None
    cut: Cut | None = None


RESUMED_HEADER = "X-Baton-Resumed"
"""Header of an answer whose engine was lost before it began, or that goes on with one that a drain ended: how
often it went on at another engine or gateway, or a new one."""
CUT_HEADER = "X-Baton-Max-Tokens"
"""Header of an answer whose limit was above what its prompt leaves of the context: the limit that held."""


UNOFFERED_HEADER = "X-Baton-Tools-Left-Out"
"""Header of an answer whose request offered tools that nobody runs here, and that the model was not shown."""

UNHELD_HEADER = "X-Baton-Schema-Unheld"
"""Header of an answer that a grammar constrains: the keywords of its schemas that the grammar leaves out."""


def new_request_id() -> str:
    """Return 128 random bits as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def context_from_headers(headers: list[tuple[bytes, bytes]], tenant: str = LOCAL_TENANT) -> RequestContext:
    """Read the ids that a client may send; malformed ones are ignored.

    Args:
        tenant: the request's tenant until its key has been checked.

    Source of the formats: W3C Trace Context, sections 3.2 and 3.3.
    """
    context = RequestContext(new_request_id(), tenant=tenant)
    tracestate = None
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(text := value.decode("latin-1")):
            context.client_request_id = text
        elif name == b"traceparent" and TRACEPARENT.fullmatch(text := value.decode("latin-1")):
            context.traceparent = text
        elif name == b"x-session-id" and SESSION_ID.fullmatch(text := value.decode("latin-1")):
            context.session_id = text
        elif name == HOPS_HEADER and value.isdigit() and len(value) <= 3:
            context.hops = int(value)
        elif name == b"tracestate" and TRACESTATE.fullmatch(text := value.decode("latin-1")):
            tracestate = text
    if context.traceparent:
        context.tracestate = tracestate
    return context
