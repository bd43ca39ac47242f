"""Refuse request heads that are too long or ambiguous."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import HeadersTooLarge, MalformedRequest, UriTooLong

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
