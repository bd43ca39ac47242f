"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from baton.api.dispatch import answer
from baton.engines.port import Operation

router = APIRouter()


@router.post("/v1/completions")
async def create_completions(request: Request) -> Response:
    """Complete a text."""
    return await answer(request, Operation.COMPLETIONS)
