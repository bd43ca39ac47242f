"""Serve the page at `/`: built files, of an exact list, that need no key. `ui/` has their source.

They are read once, when the gateway starts, so that no name in a request ever reaches the file system.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parents[2] / "ui"
INDEX, UNDER = "/", "/ui/"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
"""Media types by ending; a file with another one is not served."""
PACKED = frozenset({".png", ".woff2"})
"""Endings of files that are compressed already."""
HASHED = re.compile(r"assets/.*-[A-Za-z0-9_-]{8,}\.[a-z0-9]+")
"""Names of files that never change: another content has another name. All that is built goes there."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
}
"""The page may run only our scripts and call only this gateway, and no other page may embed it."""


@dataclass(frozen=True)
class PageFile:
    """A file of the page.

    Attributes:
        name: its path in the folder.
        body: its bytes.
    """

    name: str
    body: bytes

    @cached_property
    def packed(self) -> bytes | None:
        """Its bytes compressed; None: that would not make them fewer."""
        packed = gzip.compress(self.body, mtime=0)
        return packed if Path(self.name).suffix not in PACKED and len(packed) < len(self.body) else None

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers of every answer with it."""
        tag = hashlib.sha256(self.body).hexdigest()[:32]
        lasting = HASHED.fullmatch(self.name) is not None
        kept = "public, max-age=31536000, immutable" if lasting else "no-cache"
        return HEADERS | {"ETag": f'W/"{tag}"', "Cache-Control": kept}


def page_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Read the built files by the paths that they are served under; empty: the page was not built."""
    if not (folder / "index.html").is_file():
        return {}
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in MEDIA_TYPES and path.is_file() and not path.is_symlink():
            name = path.relative_to(folder).as_posix()
            found[INDEX if name == "index.html" else UNDER + name] = PageFile(name, path.read_bytes())
    return found


def router_of(files: Mapping[str, PageFile]) -> APIRouter:
    """Return the routes of the page; without files, they answer as routes that do not exist."""
    router = APIRouter(include_in_schema=False)

    @router.get(INDEX)
    async def page(request: Request) -> Response:
        """Show the page: chats that fork, contexts, engines, maps. It loads nothing from other hosts."""
        return _answer(files, request)

    @router.get(UNDER + "{file:path}")
    async def page_file(request: Request) -> Response:
        """Return a file that the page loads."""
        return _answer(files, request)

    return router


def _answer(files: Mapping[str, PageFile], request: Request) -> Response:
    if (file := files.get(request.scope["path"])) is None:
        raise HTTPException(404)
    headers = dict(file.headers)
    known = request.headers.get("if-none-match", "").split(",")
    if any(tag.strip() in ("*", headers["ETag"]) for tag in known):
        return Response(status_code=304, headers=headers)
    body = file.body
    if file.packed is not None and _takes_gzip(request.headers.get("accept-encoding", "")):
        body, headers["Content-Encoding"] = file.packed, "gzip"
    return Response(body, media_type=MEDIA_TYPES[Path(file.name).suffix], headers=headers)


def _takes_gzip(accepted: str) -> bool:
    """Return whether `Accept-Encoding` has gzip, not with a weight of 0."""
    for coding in accepted.lower().split(","):
        name, _, weight = coding.partition(";")
        if name.strip() in ("gzip", "x-gzip"):
            return not re.fullmatch(r"\s*q=0(\.0*)?\s*", weight)
    return False
