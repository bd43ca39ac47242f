"""Report health and version. These are the only routes that need no API key."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from baton import __version__
from baton.http.state import Gateway, gateway_of

router = APIRouter()


@router.get("/livez")
async def livez() -> dict[str, str]:
    """Report that the process answers requests, whatever the state of its engines."""
    return {"status": "alive"}


@router.get("/readyz", responses={503: {"description": "No engine is ready."}})
async def readyz(request: Request) -> Response:
    """Report whether to send requests: all engines were started, at least one answers, no drain has begun.

    While a failed engine is restarted the status is `degraded` with 200, as only its own requests fail. The
    answer has the number of engines in each state, without their names, because this route is public.
    """
    gateway = gateway_of(request)
    body = {"status": _condition(gateway), "engines": gateway.fleet.count_states()}
    return JSONResponse(body, status_code=_status(gateway), headers=_retry(gateway))


@router.get("/health", response_class=Response, responses={503: {"description": "No engine is ready."}})
async def health(request: Request) -> Response:
    """Report the same as `/readyz`, as vLLM does: with an empty 200 or 503."""
    gateway = gateway_of(request)
    return Response(status_code=_status(gateway), headers=_retry(gateway))


def _condition(gateway: Gateway) -> str:
    if gateway.drain.begun:
        return "draining"
    if not gateway.fleet.ready:
        return "not ready"
    return "ready" if gateway.fleet.whole else "degraded"


def _status(gateway: Gateway) -> int:
    return 200 if _condition(gateway) in ("ready", "degraded") else 503


def _retry(gateway: Gateway) -> dict[str, str]:
    return {} if _status(gateway) == 200 else {"Retry-After": "5"}


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the gateway's version."""
    return {"version": __version__}
