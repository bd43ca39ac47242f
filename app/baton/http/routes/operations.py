"""Serve what operators and other gateways ask: health, models, the documentation, who this gateway is."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from baton import __version__
from baton.engines.installed_plugins import installed_plugins, running_platform
from baton.errors import InvalidRequest, ModelNotAllowed, ModelNotFound, NotFound
from baton.http.ranged_file import RangedFileResponse
from baton.http.request import Gateway, context_of, gateway_of, in_a_thread, may_use

# Report health and version. These are the only routes that need no API key.


router = APIRouter()


@router.get("/livez")
async def livez() -> dict[str, str]:
    """Report that the process answers requests, whatever the state of its engines."""
    return {"status": "alive"}


@router.get("/readyz", responses={503: {"description": "No engine is ready."}})
async def readyz(request: Request) -> Response:
    """Report whether to send requests: all engines were started, at least one answers, no drain has begun.

    While a failed engine is restarted the status is `degraded` with 200, as only its own requests fail. The
    answer has the number of engines in each state, without their names, because this route is public.
    """
    gateway = gateway_of(request)
    body = {"status": _condition(gateway), "engines": gateway.fleet.count_states()}
    return JSONResponse(body, status_code=_status(gateway), headers=_retry(gateway))


@router.get("/health", response_class=Response, responses={503: {"description": "No engine is ready."}})
async def health(request: Request) -> Response:
    """Report the same as `/readyz`, as vLLM does: with an empty 200 or 503."""
    gateway = gateway_of(request)
    return Response(status_code=_status(gateway), headers=_retry(gateway))


def _condition(gateway: Gateway) -> str:
    if gateway.drain.begun:
        return "draining"
    if not gateway.fleet.ready:
        return "not ready"
    return "ready" if gateway.fleet.whole else "degraded"


def _status(gateway: Gateway) -> int:
    return 200 if _condition(gateway) in ("ready", "degraded") else 503


def _retry(gateway: Gateway) -> dict[str, str]:
    return {} if _status(gateway) == 200 else {"Retry-After": "5"}


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the gateway's version."""
    return {"version": __version__}


# Serve the API's documentation as a page at `GET /docs`, which loads nothing from other hosts.
#
# `swagger_ui/` holds our `index.html` and `start.js`, and unchanged from the npm package swagger-ui-dist
# 5.35.0 (Apache-2.0) the bundle, its style sheet and their licenses. To update it, take these files from
# `npm pack swagger-ui-dist` and change the digests in tests/protocol/test_docs.py.


docs_router = APIRouter(include_in_schema=False)
FOLDER = Path(__file__).parents[1] / "swagger_ui"
MEDIA_TYPES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "start.js": "text/javascript",
}
"""The files that the page loads."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The page may run only our scripts and call only this gateway, and no other page may embed it."""


@docs_router.get("/docs")
async def page() -> RangedFileResponse:
    """Return the page with the API's documentation."""
    return RangedFileResponse(FOLDER / "index.html", gone=NotFound(), media_type="text/html", headers=HEADERS)


@docs_router.get("/docs/{file}")
async def page_file(file: str) -> RangedFileResponse:
    """Return a file that the page loads.

    Raises:
        NotFound: the page has no file of this name.
    """
    media_type = MEDIA_TYPES.get(file)
    if media_type is None:
        raise NotFound()
    return RangedFileResponse(FOLDER / file, gone=NotFound(), media_type=media_type, headers=HEADERS)


@docs_router.get("/redoc")
async def redoc() -> RedirectResponse:
    """Redirect to `/docs`."""
    return RedirectResponse("docs", headers=HEADERS)


# Serve `GET /v1/models`: the models of all engines, in OpenAI's shape or in Anthropic's.


@router.get("/v1/models")
async def list_models(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after_id: Annotated[str | None, Query(max_length=128)] = None,
    before_id: Annotated[str | None, Query(max_length=128)] = None,
) -> dict[str, Any]:
    """List the served models.

    With the header `anthropic-version` the answer has Anthropic's shape, and only the models that generate;
    the parameters are of that shape.
    """
    fleet, may = gateway_of(request).fleet, partial(may_use, request)
    if not _of_anthropic(request):
        return {"object": "list", "data": fleet.cards(may)}
    cards = [_as_anthropic(card) for card in fleet.cards(may, pools=False)]
    ids = [card["id"] for card in cards]
    for name, given in (("after_id", after_id), ("before_id", before_id)):
        if given is not None and given not in ids:
            raise InvalidRequest(f"'{name}' must be the id of a model of this list.", param=name)
    first = ids.index(after_id) + 1 if after_id is not None else 0
    last = ids.index(before_id) if before_id is not None else len(ids)
    page = cards[first:last][-limit:] if before_id is not None else cards[first:last][:limit]
    return {
        "data": page,
        "has_more": len(page) < len(cards[first:last]),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """Show one served model, also by a name that only a pattern of an engine's aliases fits."""
    fleet = gateway_of(request).fleet
    cards = {card["id"]: card for card in fleet.cards()}
    engine = fleet.named(model)
    if engine is not None and not may_use(request, engine, model):
        raise ModelNotAllowed(param="model")
    card = cards.get(model) or cards.get(engine.name if engine is not None else "")
    if card is None:
        raise ModelNotFound.among(model, fleet.served)
    card = card | {"id": model}
    return _as_anthropic(card) if _of_anthropic(request) else card


def _of_anthropic(request: Request) -> bool:
    """Return whether a client expects answers in the shape of Anthropic's API."""
    return "anthropic-version" in request.headers


def _as_anthropic(card: dict[str, Any]) -> dict[str, Any]:
    """Return a model's card in the shape of Anthropic's API."""
    created, longest = card["created"], card.get("max_model_len")  # a server elsewhere may have made them up
    when = datetime.fromtimestamp(created if type(created) is int and 0 <= created < 2**32 else 0, UTC)
    told = {"type": "model", "id": card["id"], "display_name": card["id"]}
    told["created_at"] = when.strftime("%Y-%m-%dT%H:%M:%SZ")
    return told | ({"max_input_tokens": longest, "max_tokens": longest} if type(longest) is int else {})


# Serve `GET /v1/peer`: what another gateway, which sends requests on to this one, must know of it.


@router.get("/v1/peer")
async def show_peer(
    request: Request,
    challenge: Annotated[str, Query(pattern=r"^[0-9a-f]{32,64}$")],
    model: Annotated[str, Query(max_length=128)] = "",
) -> dict[str, Any]:
    """Answer another gateway: the tenant of its key, and a proof of the store of handoffs that this one uses.

    The proof is made for `challenge`, random hexadecimal digits; whoever does not know the store's secret
    learns nothing from it. `handoff` says whether the engine `model` supports handoffs.
    """
    gateway = gateway_of(request)
    found = gateway.fleet.named(model)
    return {
        "object": "peer",
        "version": __version__,
        "tenant": context_of(request).tenant,
        "handoff": found is not None and found.supports_handoffs,
        "store": await gateway.library.proof(challenge, context_of(request).tenant),
    }


# Serve `GET /v1/plugins`: the installed vLLM plugins, and why one is not used.


PLATFORMS = "vllm.platform_plugins"
IO_PROCESSORS = "vllm.io_processor_plugins"
BY_IMPORT = ("vllm.general_plugins", "vllm.stat_logger_plugins")
"""Groups whose plugins vLLM loads by itself with the first engine, in this process too."""


@router.get("/v1/plugins")
async def list_plugins(request: Request) -> dict[str, Any]:
    """List the installed plugins of all of vLLM's groups, with the engines that use each IO processor."""
    return await in_a_thread(request, partial(_list, request))


def _list(request: Request) -> dict[str, Any]:
    users: dict[str, list[str]] = {}
    for engine in gateway_of(request).fleet.here:
        if engine.plugin is not None:
            users.setdefault(engine.plugin.name, []).append(engine.name)
    rows = [plugin.row() for plugin in installed_plugins()]
    for row in rows:
        if row["group"] == IO_PROCESSORS:
            row["engines"] = users.get(str(row["name"]), [])
        reason = _unused(row)
        if row["loaded"] and reason:
            row["loaded"], row["reason"] = False, reason
    return {"object": "list", "data": rows}


def _unused(row: dict[str, object]) -> str:
    """Return why a plugin that vLLM could load is not used; empty if it is used."""
    group, module = row["group"], str(row["value"]).partition(":")[0]
    if group in BY_IMPORT and module not in sys.modules:
        return "no engine here has loaded it, or it failed; see the log"
    if group == PLATFORMS and _package(running_platform() or "") != _package(module):
        return "vLLM runs on another platform here"
    if group == IO_PROCESSORS and not row["engines"]:
        return "no engine uses it"
    return ""


def _package(module: str) -> str:
    return module.partition(".")[0]
