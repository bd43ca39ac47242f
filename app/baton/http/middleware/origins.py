"""Refuse requests for unknown hosts, and requests that web pages of other sites send.

A browser sends the requests of every page that it shows, even to a gateway on its own machine. Without API
keys, a page could use the gateway in two ways:

- it lets a host name of its own point to 127.0.0.1, so that the browser takes the gateway for the page's own
  server (DNS rebinding): the `Host` header shows that;
- it sends a form or a script's request to `http://127.0.0.1:8000`: `Origin` and `Sec-Fetch-Site` show that,
  which the browser sets and a page cannot change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.config.settings import Settings, is_loopback
from baton.errors import HostNotAllowed, OriginNotAllowed
from baton.http.middleware.auth import PUBLIC_PATHS

AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")
ORIGIN = re.compile(r"https?://([^/@?#\s]+)")
READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; without CORS, pages of other sites cannot read their answers."""
OWN_PAGE = (b"same-origin", b"none")
"""Values of `Sec-Fetch-Site`: a page of the gateway itself, or the person at the browser."""


class HostNames:
    """The host names under which a gateway answers: those of loopback, and the operator's.

    Args:
        entries: the operator's: `example.org`, `*.example.org` or an IP address, without a port.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        entries = [entry.lower() for entry in entries]
        self._endings = tuple(entry.removeprefix("*") for entry in entries if entry.startswith("*."))
        self._names = frozenset(_plain(entry) for entry in entries)

    def __contains__(self, authority: str) -> bool:
        """Return whether `HOST` or `HOST:PORT` is one of them."""
        return is_loopback(_name_in(authority)) or self.added(authority)

    def added(self, authority: str) -> bool:
        """Return whether the operator added it."""
        name = _name_in(authority)
        return name in self._names or name.endswith(self._endings)


def _name_in(authority: str) -> str:
    found = AUTHORITY.fullmatch(authority.lower())
    return _plain(found[1]) if found is not None else ""


def _plain(name: str) -> str:
    """Normalize a host name or address; `localhost.` is `localhost`."""
    name = name.strip("[]") if name.startswith("[") else name.removesuffix(".")
    try:
        return str(ip_address(name))
    except ValueError:
        return name


def names_for(settings: Settings, *, keyless: bool) -> HostNames | None:
    """Return the names under which the gateway answers; None: any.

    On loopback without keys only known names are safe. Otherwise clients have a key, or the operator opened
    the port to the network, and the names in use are not known: the operator's list decides, if there is one.
    """
    if settings.edge.allowed_hosts or (keyless and settings.loopback):
        return HostNames(settings.edge.allowed_hosts)
    return None


class OriginMiddleware:
    """Refuses requests for unknown hosts, and requests from web pages of other sites.

    Args:
        app: the app to protect.
        settings: the gateway's.
        keyless: the gateway has no keys; pages of other sites may not change anything.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, keyless: bool) -> None:
        self._app = app
        self._keyless = keyless
        self._hosts = names_for(settings, keyless=keyless)
        self._origins = HostNames(settings.edge.allowed_hosts)
        probed_by_address = not (keyless and settings.loopback)
        self._under_any_name = PUBLIC_PATHS if probed_by_address else frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"] not in self._under_any_name:
                self._check_host(scope)
            if self._keyless and scope["method"] not in READING:
                self._check_page(scope)
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Raise `HostNotAllowed` unless the gateway answers under the request's host.

        A check of a load balancer may name none; a browser always does.
        """
        host = _host(scope)
        if host is None and scope["path"] in PUBLIC_PATHS:
            return
        if self._hosts is not None and (host or "") not in self._hosts:
            raise HostNotAllowed(_misdirected(host or ""))

    def _check_page(self, scope: Scope) -> None:
        """Raise `OriginNotAllowed` if a browser reports that another site's page sent the request."""
        for name, value in scope["headers"]:
            if name == b"sec-fetch-site" and value not in OWN_PAGE:
                raise OriginNotAllowed()
            if name == b"origin" and not self._ours(value.decode("latin-1").lower(), _host(scope) or ""):
                raise OriginNotAllowed()

    def _ours(self, origin: str, host: str) -> bool:
        found = ORIGIN.fullmatch(origin)
        return found is not None and (found[1] == host.lower() or self._origins.added(found[1]))


def host_guard(names: HostNames | None) -> Callable[[Request], None]:
    """Return a FastAPI dependency with the same check, for a port without the gateway's middleware."""

    def check(request: Request) -> None:
        host = _host(request.scope) or ""
        if names is not None and host not in names:
            raise HTTPException(HostNotAllowed.status, _misdirected(host))

    return check


def _host(scope: Scope) -> str | None:
    """Return the `Host` header; None: there is none. The server's parser refuses requests with several."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)


def _misdirected(host: str) -> str:
    return (
        f"This server does not answer under the host '{host[:255]}'. Use 'localhost', or add the name of the "
        "host, without a port, to the setting edge.allowed_hosts."
    )
