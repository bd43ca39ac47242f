"""`POST /v1/embeddings`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from baton.api.dispatch import answer
from baton.engines.port import Operation

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """Embed texts with a pooling model."""
    return await answer(request, Operation.EMBEDDINGS)
