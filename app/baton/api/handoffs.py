"""`/v1/handoffs`: what this tenant's requests have left behind."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from baton.api.gateway import context_of, gateway_of

router = APIRouter()


@router.get("/v1/handoffs")
async def list_handoffs(request: Request) -> dict[str, Any]:
    """The tenant's handoffs, the newest first."""
    records = gateway_of(request).handoffs.list(context_of(request).tenant)
    return {"object": "list", "data": [record.public() for record in records]}


@router.get("/v1/handoffs/{handoff_id}")
async def retrieve_handoff(request: Request, handoff_id: str) -> dict[str, Any]:
    """One handoff."""
    return gateway_of(request).handoffs.get(handoff_id, context_of(request).tenant).public()


@router.delete("/v1/handoffs/{handoff_id}", status_code=204)
async def delete_handoff(request: Request, handoff_id: str) -> Response:
    """Forget a handoff and its KV; a request that loads it now comes to its end."""
    await gateway_of(request).handoffs.delete(handoff_id, context_of(request).tenant)
    return Response(status_code=204)
