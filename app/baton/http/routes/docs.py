"""Serve the API's documentation as a page at `GET /docs`, which loads nothing from other hosts.

`swagger_ui/` holds our `index.html` and `start.js`, and unchanged from the npm package swagger-ui-dist 5.35.0
(Apache-2.0) the bundle, its style sheet and their licenses. To update it, take these files from
`npm pack swagger-ui-dist` and change the digests in tests/protocol/test_docs.py.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, RedirectResponse

from baton.errors import NotFound

router = APIRouter(include_in_schema=False)
FOLDER = Path(__file__).parents[1] / "swagger_ui"
MEDIA_TYPES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "start.js": "text/javascript",
}
"""The files that the page loads."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The page may run only our scripts and call only this gateway, and no other page may embed it."""


@router.get("/docs")
async def page() -> FileResponse:
    """Return the page with the API's documentation."""
    return FileResponse(FOLDER / "index.html", media_type="text/html", headers=HEADERS)


@router.get("/docs/{file}")
async def page_file(file: str) -> FileResponse:
    """Return a file that the page loads.

    Raises:
        NotFound: the page has no file of this name.
    """
    media_type = MEDIA_TYPES.get(file)
    if media_type is None:
        raise NotFound()
    return FileResponse(FOLDER / file, media_type=media_type, headers=HEADERS)


@router.get("/redoc")
async def redoc() -> RedirectResponse:
    """Redirect to `/docs`."""
    return RedirectResponse("docs", headers=HEADERS)
