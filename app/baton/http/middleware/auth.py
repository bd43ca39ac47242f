"""From an API key to a tenant; without a key nothing but the public health routes answers."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.admission.api_keys import Keyring
from baton.errors import Unauthorized
from baton.http.request_state import state_of

PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/health", "/version"})


class AuthMiddleware:
    """Deny by default: every path is closed unless it is listed, whatever a router would make of it.

    Args:
        app: what to protect.
        keyring: the known keys; None serves everyone as the local tenant.
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
    """The key a client sent, OpenAI's way or Anthropic's; an empty string when there is none."""
    found = ""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                return key.strip()
        elif name == b"x-api-key":
            found = value.decode("latin-1").strip()
    return found
