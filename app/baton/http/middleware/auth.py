"""Find the tenant of a request by its API key, and refuse requests without a valid key."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.admission.api_keys import Keyring
from baton.errors import Unauthorized
from baton.http.request_state import state_of

PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/health", "/version"})
"""Paths that need no key."""


class AuthMiddleware:
    """Requires a key for every path that is not listed as public.

    Args:
        app: the app to protect.
        keyring: the known keys; None: every request is the local tenant's.
    """

    def __init__(self, app: ASGIApp, *, keyring: Keyring | None) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keyring is not None and scope["path"] not in PUBLIC_PATHS:
            tenant = self._keyring.tenant(presented_key(scope["headers"]))
            if tenant is None:
                raise Unauthorized()
            state_of(scope).context.tenant = tenant
        await self._app(scope, receive, send)


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
