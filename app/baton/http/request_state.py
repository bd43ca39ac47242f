"""Define the state of one request, kept until its line in the access log is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from baton.admission.tenants import Ticket
from baton.errors import BatonError
from baton.telemetry.ids import RequestContext

KEY = "baton"
"""Its key in the ASGI scope, which no other file reads."""


@dataclass(slots=True)
class RequestState:
    """The state of one request.

    Attributes:
        context: the client and the request's ids.
        ticket: the places that it holds in the admission queues.
        model: name of the engine that answers it; None until one is picked.
        error: the error that it was answered with, if any.
    """

    context: RequestContext
    ticket: Ticket = field(default_factory=Ticket)
    model: str | None = None
    error: BatonError | None = None

    def attach(self, scope: Scope) -> None:
        """Store this state in the scope of its request."""
        scope[KEY] = self


def state_of(scope: Scope) -> RequestState:
    """Return the state of the request with this scope."""
    state = scope[KEY]
    assert isinstance(state, RequestState)
    return state


def context_of(request: Request) -> RequestContext:
    """Return the client and the ids of a request."""
    return state_of(request.scope).context
