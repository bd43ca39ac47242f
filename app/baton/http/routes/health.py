"""Is it alive, is it ready, what is it. The only routes that answer without a key."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from baton import __version__
from baton.http.state import Gateway, gateway_of

router = APIRouter()


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The process answers: the event loop turns. Says nothing of the engines."""
    return {"status": "alive"}


@router.get("/readyz", responses={503: {"description": "No engine is ready."}})
async def readyz(request: Request) -> Response:
    """Requests are welcome: all engines were started, one at least answers, and no end is near.

    An engine that is lost is being started anew and costs only its own requests, so `degraded` is a 200.
    The states are counted, not named: this route is public.
    """
    gateway = gateway_of(request)
    body = {"status": _condition(gateway), "engines": gateway.fleet.count_states()}
    return JSONResponse(body, status_code=_status(gateway), headers=_retry(gateway))


@router.get("/health", response_class=Response, responses={503: {"description": "No engine is ready."}})
async def health(request: Request) -> Response:
    """As vLLM's clients know it: an empty 200, or 503; the same as `/readyz`."""
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
    """The gateway's version."""
    return {"version": __version__}
