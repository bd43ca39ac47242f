"""Answer `POST /pooling`: by the engine's IO processor plugin where it has one, else by vLLM's pooling."""

from __future__ import annotations

import asyncio
import time
import zipfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import APIRouter, Request, Response
from pydantic_core import PydanticSerializationError, to_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from baton.admission.fair_queue import Order
from baton.admission.fair_threads import in_own_thread
from baton.engines.backend import Json, Operation
from baton.engines.engine import Engine
from baton.errors import InvalidRequest, NotAcceptable, OperationUnsupported, PluginFailed
from baton.http.answer import FALLBACK_HEADER, engage, operate, strip, unless_gone
from baton.http.body.fields import order_of
from baton.http.follow_up import FIELD, FollowUp, ask_follow_up, refuse_old_name, take_follow_up
from baton.http.request import (
    UPLOAD_TYPES,
    Gateway,
    context_of,
    gateway_of,
    media_type_of,
    read_json,
    state_of,
)
from baton.pooling.plugin import ResultFile, Upload
from baton.pooling.run import PluginAnswer, Runner
from baton.pooling.uploads import RESULTS, UploadSpool
from baton.telemetry.ids import RequestContext
from baton_spool import make

# Choose the media type of an answer by the `Accept` header (RFC 9110, section 12.5.1).


JSON = "application/json"
ZIP = "application/zip"
ANYTHING = "*/*"
Wanted: TypeAlias = list[tuple[str, float]]
"""Media ranges with their weights, in the order of the header."""


def wanted_types(headers: Headers) -> Wanted:
    """Return the media ranges of `Accept` without parameters; without the header, `*/*`."""
    parts = ",".join(headers.getlist("accept")).split(",")
    return [(name, weight) for name, weight in map(_weighed, parts) if name] or [(ANYTHING, 1.0)]


def names_of(wanted: Wanted) -> list[str]:
    """Return the media ranges with a weight above 0, the most wanted first."""
    return [name for name, weight in sorted(wanted, key=lambda item: -item[1]) if weight > 0]


def _weighed(part: str) -> tuple[str, float]:
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                return name, float(value)
            except ValueError:
                return name, 0.0
    return name, 1.0


def chosen(wanted: Wanted, offered: Sequence[str]) -> str | None:
    """Choose the offered media type with the greatest weight.

    Among equals, the first of the header wins, then the first that is offered.

    Returns:
        None: the client accepts none of them.

    Example:
        >>> chosen([("image/*", 1.0), ("application/json", 0.5)], ["application/json", "image/tiff"])
        'image/tiff'
    """
    ranked = [(*_rank(wanted, media_type), media_type) for media_type in offered]
    best = min(ranked, key=lambda item: (-item[0], item[1]), default=None)
    return best[2] if best is not None and best[0] > 0 else None


def _rank(wanted: Wanted, media_type: str) -> tuple[float, int]:
    """Return the weight and position of the most specific range that matches `media_type`."""
    main = media_type.partition("/")[0]
    for precise in (media_type, f"{main}/*", ANYTHING):
        for place, (name, weight) in enumerate(wanted):
            if name == precise:
                return weight, place
    return 0.0, len(wanted)


router = APIRouter()
QUERY_OURS = ("model", "priority")
JSON_OR_FILE = (
    "Send JSON with 'Content-Type: application/json', or a file as the whole body (no form) with the type of "
    f"its content, for a GeoTIFF 'Content-Type: image/tiff'; known are: {', '.join(sorted(UPLOAD_TYPES))}."
)


@router.post("/pooling")
async def create_pooling(request: Request) -> Response:
    """Pool texts or tokens, or have the model's IO processor plugin process the data."""
    gateway = gateway_of(request)
    if media_type_of(request) in UPLOAD_TYPES:
        return await _upload(request)
    body = await read_json(request, gateway.settings.limits, instead=JSON_OR_FILE)
    falling = engage(request, body.get("model"), pools=True, falls_back=True)
    engine = await unless_gone(request, falling)
    if FALLBACK_HEADER in context_of(request).answer_headers:
        body["model"] = engine.name
    runner = gateway.pooling.runner(engine)
    if runner is None:
        if engine.forwarding is None:
            _refuse_plugin_body(engine, body)
        _refuse_follow_up(engine, body)
        return await operate(request, Operation.POOLING, body)
    state_of(request.scope).model = engine.name
    require_priority(body.get("priority", 0))
    strip(request, body)
    require_data(runner, engine, body)
    wanted = wanted_types(request.headers)
    if (follow_up := take_follow_up(request, body)) is not None:
        if chosen(wanted, [JSON]) is None:
            raise _not_acceptable([JSON])
        work = _with_follow_up(request, runner, body, follow_up)
        return _told(request, await unless_gone(request, work))
    return _told(request, await unless_gone(request, _answered(request, runner, body, wanted)))


def _told(request: Request, response: Response) -> Response:
    """Add the headers that the way of the request brought to a plugin's answer."""
    response.headers.update(context_of(request).answer_headers)
    return response


def _refuse_plugin_body(engine: Engine, body: Json) -> None:
    if "data" in body and "input" not in body and "messages" not in body:
        raise InvalidRequest(
            f"The model '{engine.name}' has no IO processor plugin for 'data': send 'input' or 'messages'.",
            param="data",
        )


def _refuse_follow_up(engine: Engine, body: Json) -> None:
    refuse_old_name(body)
    if FIELD in body:
        raise InvalidRequest(
            f"The model '{engine.name}' has no IO processor plugin for '{FIELD}' to ask about.",
            param=FIELD,
        )


def require_data(runner: Runner, engine: Engine, body: Json) -> None:
    """Require `data`, which is all that a plugin takes."""
    if "data" in body:
        return
    given = next((field for field in ("input", "messages") if field in body), None)
    ours = f"The model '{engine.name}' is used through its IO processor plugin '{runner.plugin.name}'"
    instead = f", which takes no '{given}'" if given else ""
    raise InvalidRequest(f'{ours}{instead}: send {{"model": ..., "data": {{...}}}}.', param=given or "data")


def require_priority(value: object) -> None:
    """Require a well-formed `priority`, as vLLM does; it has no effect."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise InvalidRequest("'priority' must be a whole number of 64 bits.", param="priority")


async def _upload(request: Request) -> Response:
    gateway = gateway_of(request)
    engine = await engage(request, request.query_params.get("model"), pools=True, falls_back=True)
    runner = gateway.pooling.runner(engine)
    if runner is None:
        raise OperationUnsupported(f"The model '{engine.name}' takes no files; send JSON.")
    if (priority := request.query_params.get("priority")) is not None:
        state_of(request.scope).order = _order_of(priority)
        gateway.metrics.stripped.labels("priority").inc()
    query = {name: value for name, value in request.query_params.items() if name not in QUERY_OURS}
    spool = UploadSpool(gateway.settings.pooling.spool_dir)
    try:
        async with runner.receiving(context_of(request).tenant):
            await spool.fill(request.stream())
        wanted = wanted_types(request.headers)
        work = Upload(spool.path, media_type_of(request), query, names_of(wanted))
        answer = _answered(request, runner, work, wanted)
        return _told(request, await unless_gone(request, answer))
    finally:
        await spool.close()


def _order_of(priority: str) -> Order:
    """Return the order of a request by its query parameter."""
    try:
        return order_of({"priority": int(priority or 0)})
    except ValueError:
        return order_of({"priority": priority})


async def _answered(request: Request, runner: Runner, work: Json | Upload, wanted: Wanted) -> Response:
    gateway, context = gateway_of(request), context_of(request)
    answer = await runner.run(work, context, order=state_of(request.scope).order)
    try:
        if not isinstance(work, Upload) and names_of(wanted) in (["*/*"], [JSON]):
            return await _as_json(gateway, answer, context)
        files = await answer.files()
        kinds = [file.media_type for file in files]
        offered = [*kinds, JSON] if isinstance(work, Upload) else [JSON, *kinds]
        kind = chosen(wanted, [*offered, *([ZIP] if files else [])])
        if kind is None:
            raise _not_acceptable([*offered, *([ZIP] if files else [])])
        if kind == JSON:
            return await _as_json(gateway, answer, context)
        return await _as_file(gateway, answer, files, kind, context)
    except BaseException:
        await answer.close()
        raise


def _not_acceptable(offered: list[str]) -> NotAcceptable:
    listed = ", ".join(dict.fromkeys(offered))
    return NotAcceptable(
        f"The answer is available in none of the media types that 'Accept' names. Available are: {listed}."
    )


async def _as_file(
    gateway: Gateway, answer: PluginAnswer, files: list[ResultFile], kind: str, context: RequestContext
) -> Response:
    if kind == ZIP:
        return await _as_zip(gateway, answer, files, context)
    file = next(file for file in files if file.media_type == kind)
    return LastingFileResponse(file.path, kind, file.name, answer.close, answer.time_limit_s)


async def _with_follow_up(request: Request, runner: Runner, body: Json, follow_up: FollowUp) -> Response:
    """Answer with the plugin's result and, under `follow_up`, the chat model's answer about it."""
    context = context_of(request)
    answer = await runner.run(body, context, order=state_of(request.scope).order, describe=True)
    try:
        data, description = await answer.data(), await answer.describe()
    finally:
        await answer.close()
    follow_up_answer = await ask_follow_up(request, follow_up, description)
    return Response(
        await _packed(gateway_of(request), context, data, {FIELD: follow_up_answer.body}),
        media_type=JSON,
        headers=dict(follow_up_answer.headers),
    )


async def _as_json(gateway: Gateway, answer: PluginAnswer, context: RequestContext) -> Response:
    """Answer in the form of vLLM's `IOProcessorResponse`."""
    body = await _packed(gateway, context, await answer.data(), {})
    await answer.close()
    return Response(body, media_type=JSON)


async def _packed(gateway: Gateway, context: RequestContext, data: Any, more: Json) -> bytes:
    whole = {"request_id": context.request_id, "created_at": int(time.time()), "data": data} | more
    try:
        return await gateway.body_threads.run(context.tenant, partial(to_json, whole, inf_nan_mode="null"))
    except PydanticSerializationError:
        raise PluginFailed() from None


async def _as_zip(
    gateway: Gateway, answer: PluginAnswer, files: list[ResultFile], context: RequestContext
) -> Response:
    folder = gateway.settings.pooling.spool_dir
    packed = await in_own_thread(make, folder, RESULTS)

    async def release() -> None:
        await in_own_thread(packed.remove)
        await answer.close()

    try:
        await gateway.body_threads.run(context.tenant, partial(_pack, packed.path, files))
    except BaseException:
        packed.remove()
        raise
    return LastingFileResponse(packed.path, ZIP, "result.zip", release, answer.time_limit_s)


def _pack(target: Path, files: list[ResultFile]) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:  # the files are compressed already
        for file in files:
            archive.write(file.path, file.name)


class LastingFileResponse(FileResponse):
    """A file response that releases its file once it was sent, or the client disconnected or was too slow.

    Args:
        release: called at the end.
    """

    def __init__(
        self,
        path: Path,
        media_type: str,
        filename: str,
        release: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> None:
        super().__init__(path, media_type=media_type, filename=filename)
        self._release = release
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            raise ClientDisconnect() from None
        finally:
            await self._release()
