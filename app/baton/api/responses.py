"""`POST /v1/responses`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from baton.api.dispatch import answer
from baton.engines.port import Operation

router = APIRouter()


@router.post("/v1/responses")
async def create_responses(request: Request) -> Response:
    """Answer through OpenAI's Responses API. Nothing is stored."""
    return await answer(request, Operation.RESPONSES)
