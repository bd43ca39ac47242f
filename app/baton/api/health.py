"""Is it alive, is it ready, what is it. The only routes that answer without a key."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from baton import __version__
from baton.api.gateway import gateway_of
from baton.engines.fleet import Fleet

router = APIRouter()


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The process answers: the event loop turns. Says nothing of the engines."""
    return {"status": "alive"}


@router.get("/readyz", responses={503: {"description": "An engine is not ready."}})
async def readyz(request: Request) -> Response:
    """Every engine answers. The states are counted, not named: this route is public."""
    fleet = gateway_of(request).fleet
    states: dict[str, Any] = dict(Counter(engine.state.value for engine in fleet.engines))
    body = {"status": "ready" if fleet.ready else "not ready", "engines": states}
    return JSONResponse(body, status_code=_status(fleet), headers=_retry(fleet))


@router.get("/health", response_class=Response, responses={503: {"description": "An engine is not ready."}})
async def health(request: Request) -> Response:
    """As vLLM's clients know it: an empty 200, or 503."""
    fleet = gateway_of(request).fleet
    return Response(status_code=_status(fleet), headers=_retry(fleet))


def _status(fleet: Fleet) -> int:
    return 200 if fleet.ready else 503


def _retry(fleet: Fleet) -> dict[str, str]:
    return {} if fleet.ready else {"Retry-After": "5"}


@router.get("/version")
async def version() -> dict[str, str]:
    """The gateway's version."""
    return {"version": __version__}
