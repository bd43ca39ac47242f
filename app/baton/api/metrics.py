"""`GET /metrics`: the gateway's series and every engine's, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from baton.api.gateway import gateway_of
from baton.telemetry.ids import RequestContext

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Every series, in Prometheus' text format; on the port that tenants use too, no other tenant's."""
    gateway = gateway_of(request)
    context: RequestContext | None = request.scope.get("baton")
    page = gateway.fleet.metrics_page(None if context is None else context.tenant)
    return Response(page, media_type=CONTENT_TYPE_LATEST)
