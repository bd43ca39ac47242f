"""Anthropic's `POST /v1/messages` and its token count."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from baton.api.dispatch import answer
from baton.engines.port import Operation

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answer a conversation through Anthropic's Messages API."""
    return await answer(request, Operation.MESSAGES)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation."""
    return await answer(request, Operation.COUNT_TOKENS)
