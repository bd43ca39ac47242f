"""Refuse ambiguous request heads, other hosts and pages of other sites; turn the key into a tenant."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.admission.api_keys import Keyring
from baton.admission.tenants import Admission
from baton.config.settings import Settings, is_loopback
from baton.errors import (
    HeadersTooLarge,
    HostNotAllowed,
    MalformedRequest,
    OriginNotAllowed,
    SettingsError,
    Unauthorized,
    UriTooLong,
)
from baton.http.request import state_of

# Refuse request heads that are too long or ambiguous.


MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_TARGET_BYTES = 16 * 1024
VERSIONS = ("1.0", "1.1")
HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)


class RequestHeadMiddleware:
    """Refuses heads that servers read in different ways (RFC 9112, sections 3.2 and 6.3), and long ones.

    The server's parser accepts most of them: it may read more than `MAX_HEAD_BYTES` of a head at once, and
    ignores a `Content-Length` beside `Transfer-Encoding`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refuse_bad_head(scope)
            if scope["method"] == "HEAD":  # routes answer it as GET; the server leaves the content out
                scope = {**scope, "method": "GET"}
                state_of(scope).head = True
        await self._app(scope, receive, send)


def refuse_bad_head(scope: Scope) -> None:
    """Check the request line and every header.

    Raises:
        UriTooLong: the target is too long.
        HeadersTooLarge: there are too many headers, or they are too long.
        MalformedRequest: the body's length is given twice, the host is not valid, or the version is neither
            HTTP/1.1 nor HTTP/1.0.
    """
    if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_TARGET_BYTES:
        raise UriTooLong()
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HeadersTooLarge(f"The request has {len(headers)} headers; at most {MAX_HEADERS} are allowed.")
    size, framings = 0, 0
    for name, value in headers:
        size += len(name) + len(value)
        if name in (b"content-length", b"transfer-encoding"):
            framings += 1
        elif name == b"host" and not HOST.fullmatch(value):
            raise MalformedRequest("The 'Host' header is not a valid host.")
    if size > MAX_HEAD_BYTES:
        raise HeadersTooLarge()
    if framings > 1:
        raise MalformedRequest(
            "The request has both 'Content-Length' and 'Transfer-Encoding': send one of them."
        )
    if scope["http_version"] not in VERSIONS:
        raise MalformedRequest("The request is neither HTTP/1.1 nor HTTP/1.0.")


class RootPathMiddleware:
    """Takes away the path under which a proxy shows the gateway, where the proxy leaves it in place.

    Args:
        root: such as `/llm`.
    """

    def __init__(self, app: ASGIApp, *, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._root or path.startswith(f"{self._root}/"):
                scope = {**scope, "path": path.removeprefix(self._root) or "/"}
        await self._app(scope, receive, send)


def host_and_target(target: bytes) -> tuple[bytes | None, bytes]:
    """Split an absolute target, which every server has to take (RFC 9112, section 3.2.2), into host and path.

    Returns:
        The host, which stands for that of the `Host` header, and the target as it usually is. None: the
        target names no host. A host that is not valid is refused later, as that of a header is.
    """
    found = ABSOLUTE.fullmatch(target)
    if found is None:
        return None, target
    path = found[2] if found[2].startswith(b"/") else b"/" + found[2]
    return found[1], path


# Refuse requests for unknown hosts, and requests that web pages of other sites send.
#
# A browser sends the requests of every page that it shows, even to a gateway on its own machine. Without API
# keys, a page could use the gateway in two ways:
#
# - it lets a host name of its own point to 127.0.0.1, so that the browser takes the gateway for the page's
#   own server (DNS rebinding): the `Host` header shows that;
# - it sends a form or a script's request to `http://127.0.0.1:8000`: `Origin` and `Sec-Fetch-Site` show that,
#   which the browser sets and a page cannot change.
#
# Pages of `edge.allowed_origins` may use it, by CORS (https://fetch.spec.whatwg.org/#http-cors-protocol):
# their requests are not refused here, and `cors_options` has browsers let their scripts read the answers.


AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")
ORIGIN = re.compile(r"https?://([^/@?#\s]+)")
EXPOSED = (
    *("Location", "Retry-After", "X-Baton-Fallback", "X-Baton-KV-Hints-Unused", "X-Baton-Max-Tokens"),
    *("X-Baton-Resumed", "X-Baton-Schema-Unheld", "X-Baton-Tools-Left-Out"),
    *("X-Handoff-Id", "X-Request-Id"),
)
"""Headers of answers that scripts of other sites may read."""
KNOWN_HOSTS = 16
"""Hosts of requests whose answer is kept: nearly all requests of a gateway name the same one."""
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

        self._known = lru_cache(KNOWN_HOSTS)(
            lambda authority: is_loopback(_name_in(authority)) or self.added(authority)
        )

    def __contains__(self, authority: str) -> bool:
        """Return whether `HOST` or `HOST:PORT` is one of them."""
        return self._known(authority)

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
        keyless: the gateway has no keys; pages of other sites may not change anything.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, keyless: bool) -> None:
        self._app = app
        self._keyless = keyless
        self._hosts = names_for(settings, keyless=keyless)
        self._own_hosts = HostNames(settings.edge.allowed_hosts)
        self._pages = frozenset(settings.edge.allowed_origins)
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
        headers = scope["headers"]
        origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
        if origins and self._pages.issuperset(origins):
            return
        if any(name == b"sec-fetch-site" and value not in OWN_PAGE for name, value in headers):
            raise OriginNotAllowed()
        if not all(self._ours(origin, _host(scope) or "") for origin in origins):
            raise OriginNotAllowed()

    def _ours(self, origin: str, host: str) -> bool:
        found = ORIGIN.fullmatch(origin)
        return found is not None and (found[1] == host.lower() or self._own_hosts.added(found[1]))


def cors_options(settings: Settings, *, keyless: bool) -> dict[str, Any] | None:
    """Return the options of Starlette's `CORSMiddleware`; None: no page of another site may use the gateway.

    Raises:
        SettingsError: any page might use a gateway without keys.
    """
    origins = settings.edge.allowed_origins
    if keyless and "*" in origins:
        raise SettingsError(
            "edge.allowed_origins: '*' lets every page that a browser shows use the gateway, and needs API "
            "keys: make one with `baton keys create`, or name the origins"
        )
    if not origins:
        return None
    return {
        "allow_origins": origins,
        "allow_methods": settings.edge.allowed_methods,
        "allow_headers": settings.edge.allowed_headers,
        "allow_credentials": settings.edge.allow_credentials,
        "expose_headers": EXPOSED,
        "max_age": 600,
    }


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


# Find the tenant of a request by its API key, admit it within the tenant's limits, give back what it held.
#
# Every path that is not public passes here, so no route can forget a limit.


PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/health", "/version"})
"""Paths that need no key."""
UNCOUNTED = PUBLIC_PATHS | {"/metrics"}
"""Paths that no tenant's limit holds for; `/metrics`, the operator's, is on this port without keys alone."""


EXPIRED = "This API key has expired; whoever runs the gateway can make another or rotate it."


class AuthMiddleware:
    """Requires a key for every path that is not listed as public, and counts requests for their tenants.

    Args:
        keyring: the known keys; None: every request is the local tenant's.
        open_to_all: whether others than this machine's users can reach the gateway; if not, and there are no
            keys, whoever calls is an operator.
        files: paths of the page's files, which need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keyring: Keyring | None,
        admission: Admission,
        open_to_all: bool,
        files: Collection[str] = (),
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._admission = admission
        self._operated = keyring is None and not open_to_all
        self._public = PUBLIC_PATHS.union(files)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        state = state_of(scope)
        if self._keyring is not None:
            key = self._keyring.find(presented_key(scope["headers"]))
            if key is None:
                expired = self._keyring.expired(presented_key(scope["headers"]))
                raise Unauthorized(EXPIRED if expired else None)
            state.context.tenant, state.key, state.operator = key.tenant, key, key.operator
            keyring, presented = self._keyring, presented_key(scope["headers"])
            state.valid = lambda: keyring.find(presented) is not None
        else:
            state.operator = self._operated
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
