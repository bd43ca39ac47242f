"""Serve `GET /v1/peer`: what another gateway, which sends requests on to this one, must know of it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from baton import __version__
from baton.http.request_state import context_of
from baton.http.state import gateway_of

router = APIRouter()


@router.get("/v1/peer")
async def show_peer(
    request: Request,
    challenge: Annotated[str, Query(pattern=r"^[0-9a-f]{32,64}$")],
    model: Annotated[str, Query(max_length=128)] = "",
) -> dict[str, Any]:
    """Tell another gateway which tenant its key is, and prove which store of handoffs this one uses.

    The proof is made for `challenge`, random hexadecimal digits; whoever does not know the store's secret
    learns nothing from it. `handoff` says whether the engine `model` supports handoffs.
    """
    gateway = gateway_of(request)
    engines = (engine for engine in gateway.fleet.engines if model in (engine.name, *engine.aliases))
    found = next(engines, None)
    return {
        "object": "peer",
        "version": __version__,
        "tenant": context_of(request).tenant,
        "handoff": found is not None and found.supports_handoffs,
        "store": await gateway.handoffs.proof(challenge, context_of(request).tenant),
    }
