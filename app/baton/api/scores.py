"""`/classify`, `/score` and `/rerank`: what classifiers and rankers answer, by vLLM's handlers."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from baton.api.dispatch import answer
from baton.engines.port import Operation

router = APIRouter()


@router.post("/classify")
async def create_classification(request: Request) -> Response:
    """Class probabilities of texts."""
    return await answer(request, Operation.CLASSIFY)


@router.post("/score")
@router.post("/v1/score")
async def create_score(request: Request) -> Response:
    """How well texts match."""
    return await answer(request, Operation.SCORE)


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def create_rerank(request: Request) -> Response:
    """Documents ordered by how well they match a query, as Jina and Cohere's clients ask for it."""
    return await answer(request, Operation.RERANK)
