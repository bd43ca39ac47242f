"""Find the tenant of a request by its API key, admit it within the tenant's limits, give back what it held.

Every path that is not public passes here, so no route can forget a limit.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.admission.api_keys import Keyring
from baton.admission.tenants import Admission
from baton.errors import Unauthorized
from baton.http.request_state import state_of

PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/health", "/version"})
"""Paths that need no key."""
UNCOUNTED = PUBLIC_PATHS | {"/metrics"}
"""Paths that no tenant's limit holds for; `/metrics`, the operator's, is on this port without keys alone."""


class AuthMiddleware:
    """Requires a key for every path that is not listed as public, and counts requests for their tenants.

    Args:
        app: the app to protect.
        keyring: the known keys; None: every request is the local tenant's.
        admission: the tenants' limits.
    """

    def __init__(self, app: ASGIApp, *, keyring: Keyring | None, admission: Admission) -> None:
        self._app = app
        self._keyring = keyring
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        state = state_of(scope)
        if self._keyring is not None:
            tenant = self._keyring.tenant(presented_key(scope["headers"]))
            if tenant is None:
                raise Unauthorized()
            state.context.tenant = tenant
        if scope["path"] not in UNCOUNTED:
            self._admission.admit(state.ticket, state.context.tenant)
        try:
            await self._app(scope, receive, send)
        finally:
            state.ticket.answered()


def presented_key(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the key of a request, from OpenAI's header or Anthropic's; empty: there is none."""
    found = ""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                return key.strip()
        elif name == b"x-api-key":
            found = value.decode("latin-1").strip()
    return found
