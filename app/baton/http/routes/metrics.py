"""Serve the metrics of the gateway and of every engine at `GET /metrics`, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from baton.config.settings import Settings, is_loopback
from baton.http.middleware.gate import HostNames, host_guard
from baton.http.request import Gateway, gateway_of

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return all metrics of all tenants in Prometheus' text format.

    Tenants cannot reach the port that serves this route.
    """
    return Response(gateway_of(request).fleet.metrics_page(), media_type=CONTENT_TYPE_LATEST)


def app_of(gateway: Gateway) -> FastAPI:
    """Return the app that serves the metrics of one gateway on a port of their own, without a key."""
    return app_of_page(gateway.settings, gateway.fleet.metrics_page)


def app_of_page(settings: Settings, page: Callable[[], bytes]) -> FastAPI:
    """Return an app that serves a page of metrics at `/metrics`, without a key.

    On loopback it answers only under known host names; elsewhere, scrapers may use any address.

    Args:
        settings: whose `metrics.host` and `edge.allowed_hosts` decide that.
        page: returns the page.
    """
    names = HostNames(settings.edge.allowed_hosts) if is_loopback(settings.metrics.host) else None
    app = FastAPI(openapi_url=None)

    guard = Depends(host_guard(names))

    @app.api_route("/metrics", methods=["GET", "HEAD"], response_class=Response, dependencies=[guard])
    async def page_of_metrics() -> Response:
        """Return all metrics of all tenants in Prometheus' text format."""
        return Response(page(), media_type=CONTENT_TYPE_LATEST)

    return app
