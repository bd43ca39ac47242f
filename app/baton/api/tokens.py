"""`POST /tokenize` and `POST /detokenize`, as vLLM's clients know them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from baton.api.dispatch import answer
from baton.engines.port import Operation

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The token ids of a text or a conversation."""
    return await answer(request, Operation.TOKENIZE)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    return await answer(request, Operation.DETOKENIZE)
