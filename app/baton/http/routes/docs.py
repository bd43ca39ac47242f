"""`GET /docs`: the API's documentation as a page, which loads nothing from elsewhere.

`swagger_ui/` holds `index.html` and `start.js`, which are ours, and of the npm package swagger-ui-dist 5.35.0
(Apache-2.0) the bundle, its style sheet and their licenses, unchanged. For another version take them from
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
"""The files the page loads."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The page runs our scripts only, asks this gateway only, and is shown in nobody's frame."""


@router.get("/docs")
async def page() -> FileResponse:
    """The page."""
    return FileResponse(FOLDER / "index.html", media_type="text/html", headers=HEADERS)


@router.get("/docs/{file}")
async def page_file(file: str) -> FileResponse:
    """A file that the page loads.

    Raises:
        NotFound: it loads no such file.
    """
    media_type = MEDIA_TYPES.get(file)
    if media_type is None:
        raise NotFound()
    return FileResponse(FOLDER / file, media_type=media_type, headers=HEADERS)


@router.get("/redoc")
async def redoc() -> RedirectResponse:
    """The address of a second such page, which showed the same."""
    return RedirectResponse("docs", headers=HEADERS)
