"""What the gateway notes about one request, from its first byte to its line in the access log."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from baton.admission.tenants import Ticket
from baton.errors import BatonError
from baton.telemetry.ids import RequestContext

KEY = "baton"
"""Where it lies in the ASGI scope; no other file reads it there."""


@dataclass(slots=True)
class RequestState:
    """The notes on one request.

    Attributes:
        context: who asks, and under which ids.
        ticket: the places it was admitted to.
        model: the engine that works on it, by name; None until one is picked.
        error: what it was answered with, where that is an error.
    """

    context: RequestContext
    ticket: Ticket = field(default_factory=Ticket)
    model: str | None = None
    error: BatonError | None = None

    def attach(self, scope: Scope) -> None:
        """Make it the state of the request that has this scope."""
        scope[KEY] = self


def state_of(scope: Scope) -> RequestState:
    """Return the state of the request that has this scope."""
    state = scope[KEY]
    assert isinstance(state, RequestState)
    return state


def context_of(request: Request) -> RequestContext:
    """Return who sent a request, and under which ids."""
    return state_of(request.scope).context
