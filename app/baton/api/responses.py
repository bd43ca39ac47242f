"""`POST /v1/responses`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from baton.api.dispatch import answer
from baton.engines.port import Operation
from baton.errors import InvalidRequest

router = APIRouter()
STORED = ("background", "previous_response_id")
"""Fields that only work where responses are stored; vLLM's store would be one for all tenants."""


@router.post("/v1/responses")
async def create_responses(request: Request) -> Response:
    """Answer through OpenAI's Responses API. Nothing is stored."""
    return await answer(request, Operation.RESPONSES, _without_store)


def _without_store(body: dict[str, Any]) -> dict[str, Any]:
    for field in STORED:
        if body.get(field):
            raise InvalidRequest(
                f"'{field}' needs stored responses, and nothing is stored here: "
                "send the earlier turns in 'input'.",
                param=field,
            )
    return body | {"store": False, "background": False}
