"""`GET /metrics`: the gateway's series and every engine's, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from baton.config.settings import is_loopback
from baton.http.middleware.origins import HostNames, host_guard
from baton.http.state import Gateway, gateway_of

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Every series of every tenant, in Prometheus' text format; never on a port that tenants reach."""
    return Response(gateway_of(request).fleet.metrics_page(), media_type=CONTENT_TYPE_LATEST)


def app_of(gateway: Gateway) -> FastAPI:
    """The app of a port of its own, which asks for no key.

    On loopback it answers under known names only; elsewhere who scrapes it asks by any address.
    """
    settings = gateway.settings
    names = HostNames(settings.edge.allowed_hosts) if is_loopback(settings.metrics.host) else None
    app = FastAPI(openapi_url=None)
    app.state.gateway = gateway
    app.include_router(router, dependencies=[Depends(host_guard(names))])
    return app
