"""`GET /metrics`: the gateway's series and every engine's, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from baton.api.gateway import gateway_of

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Every series of every tenant, in Prometheus' text format; never on a port that tenants reach."""
    return Response(gateway_of(request).fleet.metrics_page(), media_type=CONTENT_TYPE_LATEST)
