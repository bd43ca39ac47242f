"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from baton.api.dispatch import answer
from baton.engines.port import Operation

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, Operation.CHAT)
