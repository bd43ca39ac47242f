"""Define the state of one request, kept until its line in the access log is written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope, Send

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
        error_code: code of the error that it was answered with, if any.
        error_reason: reason of that error, a label of the metric of rejections.
        large: work on its body is done in threads, however small the body is that was sent.
        send: sends ASGI messages to the server, past all middleware.
    """

    context: RequestContext
    ticket: Ticket = field(default_factory=Ticket)
    model: str | None = None
    error_code: str | None = None
    error_reason: str | None = None
    large: bool = False
    send: Send | None = None

    def note(self, error: BatonError) -> None:
        """Note the error that the request is answered with.

        The exception itself is not kept: its traceback holds the request's body, and that holds this state.
        """
        self.error_code, self.error_reason = error.code, error.reason

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


class Drain:
    """The drain of one gateway, with the requests that run.

    Attributes:
        begun: the gateway is draining; new requests should go to another one.
    """

    def __init__(self) -> None:
        self.begun = False
        self._running: set[asyncio.Task[object]] = set()
        self._cut: set[asyncio.Task[object]] = set()

    def begin(self) -> None:
        """Begin to drain."""
        self.begun = True

    def cut(self) -> int:
        """End every request that still runs; returns their number."""
        running = self._running - self._cut
        self._cut |= running
        for task in running:
            task.cancel()
        return len(running)

    def was_cut(self, task: asyncio.Task[object]) -> bool:
        """Return whether the drain ended the request of this task."""
        return task in self._cut

    @contextlib.contextmanager
    def watching(self, task: asyncio.Task[object]) -> Iterator[None]:
        """Register the task of a request while it runs."""
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)
            self._cut.discard(task)
