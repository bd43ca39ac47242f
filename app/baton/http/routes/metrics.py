"""Serve the metrics of the gateway and of every engine at `GET /metrics`, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from baton.config.settings import is_loopback
from baton.http.middleware.origins import HostNames, host_guard
from baton.http.state import Gateway, gateway_of

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return all metrics of all tenants in Prometheus' text format.

    Tenants cannot reach the port that serves this route.
    """
    return Response(gateway_of(request).fleet.metrics_page(), media_type=CONTENT_TYPE_LATEST)


def app_of(gateway: Gateway) -> FastAPI:
    """Return the app that serves the metrics on a port of their own, without a key.

    On loopback it answers only under known host names; elsewhere, scrapers may use any address.
    """
    settings = gateway.settings
    names = HostNames(settings.edge.allowed_hosts) if is_loopback(settings.metrics.host) else None
    app = FastAPI(openapi_url=None)
    app.state.gateway = gateway
    app.include_router(router, dependencies=[Depends(host_guard(names))])
    return app
