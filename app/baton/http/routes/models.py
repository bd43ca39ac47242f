"""Serve `GET /v1/models`: the models of all engines."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from baton.errors import ModelNotFound
from baton.http.state import gateway_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the served models."""
    engines = gateway_of(request).fleet.engines
    return {"object": "list", "data": [card for engine in engines for card in engine.cards()]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """Show one served model."""
    for engine in gateway_of(request).fleet.engines:
        for card in engine.cards():
            if card["id"] == model:
                return card
    raise ModelNotFound.among(model, gateway_of(request).fleet.served)
