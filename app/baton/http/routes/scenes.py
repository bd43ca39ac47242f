"""Serve `/v1/scenes`: scenes as jobs, whose files are kept for a while."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from baton.admission.fair_threads import in_own_thread
from baton.engines.backend import Json
from baton.engines.engine import Engine
from baton.errors import InvalidRequest, OperationUnsupported, SceneNotFound
from baton.http.answer import engage, strip, unless_gone
from baton.http.follow_up import FIELD
from baton.http.ranged_file import RangedFileResponse
from baton.http.request import (
    UPLOAD_TYPES,
    Gateway,
    context_of,
    gateway_of,
    media_type_of,
    read_json,
    state_of,
)
from baton.http.routes.pooling import JSON_OR_FILE, QUERY_OURS, require_data, require_priority
from baton.pooling.jobs import Job
from baton.pooling.plugin import Upload
from baton.pooling.run import Runner
from baton.pooling.uploads import UploadSpool
from baton.telemetry.ids import RequestContext

router = APIRouter()
KEY, KEY_CHARACTERS = "idempotency-key", 255
PIECE = 1024 * 1024


@router.post("/v1/scenes", status_code=202)
async def create_scene(request: Request) -> Response:
    """Begin a job of the same body as `POST /pooling` of an IO processor plugin; its files are kept."""
    gateway = gateway_of(request)
    key = idempotency_key(request)
    if media_type_of(request) in UPLOAD_TYPES:
        job = await _of_upload(request, gateway, key)
    else:
        body = await read_json(request, gateway.settings.limits, instead=JSON_OR_FILE)
        engine = await unless_gone(request, engage(request, body.get("model"), pools=True))
        runner = _runner(request, gateway, engine)
        sent = await request.body()
        digest = await in_own_thread(lambda: hashlib.sha256(sent).digest())
        require_priority(body.get("priority", 0))
        strip(request, body)
        require_data(runner, engine, body)
        if FIELD in body:
            raise InvalidRequest(
                f"'{FIELD}' is for POST /pooling: a job has no answer to ask about.", param=FIELD
            )
        job = await gateway.scenes.begin(
            runner,
            body,
            context_of(request),
            model=engine.name,
            key=key,
            body=digest,
            size=len(sent),
            sent=sent,
            release=nothing,
            keep=partial(keep, request),
        )
    where = _address(gateway, job)
    return JSONResponse(_shown(gateway, job), 202, headers={"Location": where})


async def nothing() -> None:
    """Release nothing: a JSON request holds no file."""


def _runner(request: Request, gateway: Gateway, engine: Engine) -> Runner:
    runner = gateway.pooling.runner(engine)
    if runner is None:
        raise OperationUnsupported(
            f"The model '{engine.name}' has no IO processor plugin, so it makes no scenes.", param="model"
        )
    state_of(request.scope).model = engine.name
    return runner


async def _of_upload(request: Request, gateway: Gateway, key: str) -> Job:
    engine = await engage(request, request.query_params.get("model"), pools=True)
    runner = _runner(request, gateway, engine)
    query = {name: value for name, value in request.query_params.items() if name not in QUERY_OURS}
    spool = UploadSpool(gateway.settings.pooling.spool_dir)
    try:
        async with runner.receiving(context_of(request).tenant):
            await spool.fill(request.stream())
        digest = await in_own_thread(_digest, spool.path, engine.name, query)
    except BaseException:
        await spool.close()
        raise
    work = Upload(spool.path, media_type_of(request), query)
    return await gateway.scenes.begin(
        runner,
        work,
        context_of(request),
        model=engine.name,
        key=key,
        body=digest,
        size=work.file.stat().st_size,
        release=spool.close,
        keep=partial(keep, request),
    )


def keep(request: Request, task: asyncio.Task[None], context: RequestContext) -> None:
    """Keep the engine for a job, and count what it uses when it has ended."""
    state, usage = state_of(request.scope), gateway_of(request).usage
    state.ticket.lend(task)
    of_job = replace(state, context=context)
    task.add_done_callback(lambda _task: of_job.count(usage))


def _digest(file: Path, model: str, query: dict[str, str]) -> bytes:
    digest = hashlib.sha256(json.dumps([model, query]).encode())
    with file.open("rb") as opened:
        while piece := opened.read(PIECE):
            digest.update(piece)
    return digest.digest()


def idempotency_key(request: Request) -> str:
    """Return the `Idempotency-Key` of a request; empty: it has none.

    Raises:
        InvalidRequest: it is too long, or has other characters.
    """
    key = request.headers.get(KEY, "")
    if len(key) > KEY_CHARACTERS or not (key.isascii() and (key.isprintable() or not key)):
        raise InvalidRequest(
            f"'Idempotency-Key' must be at most {KEY_CHARACTERS} visible ASCII characters.", param=KEY
        )
    return key


@router.get("/v1/scenes")
async def list_scenes(request: Request) -> Json:
    """List the tenant's jobs, the newest first."""
    gateway = gateway_of(request)
    jobs = await gateway.scenes.listed(context_of(request).tenant)
    return {"object": "list", "data": [_shown(gateway, job) for job in jobs]}


@router.get("/v1/scenes/{scene_id}")
async def get_scene(request: Request, scene_id: str) -> Json:
    """Show a job: its state, how far it is, its files."""
    gateway = gateway_of(request)
    return _shown(gateway, await gateway.scenes.get(scene_id, context_of(request).tenant))


@router.delete("/v1/scenes/{scene_id}")
async def delete_scene(request: Request, scene_id: str) -> Json:
    """End a job that runs; remove it with its files."""
    gateway = gateway_of(request)
    await gateway.scenes.delete(scene_id, context_of(request).tenant)
    return {"id": scene_id, "object": "scene", "deleted": True}


@router.get("/v1/scenes/{scene_id}/{name}")
async def get_scene_file(request: Request, scene_id: str, name: str) -> Response:
    """Send a file of a job, or the ranges of it that `Range` names."""
    gateway = gateway_of(request)
    path, file = await gateway.scenes.file(scene_id, context_of(request).tenant, name)
    job = await gateway.scenes.get(scene_id, context_of(request).tenant)
    etag = f'"{scene_id}-{name}-{file.bytes}"'  # a file of a job never changes
    headers = {
        "ETag": etag,
        "Last-Modified": formatdate(job.finished_at, usegmt=True),
        "Cache-Control": "private, max-age=3600",
    }
    asked = [part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")]
    if etag in asked or "*" in asked:
        return Response(status_code=304, headers=headers)
    return RangedFileResponse(
        path, gone=SceneNotFound(), media_type=file.media_type, filename=file.name, headers=headers
    )


def _address(gateway: Gateway, job: Job) -> str:
    return f"{gateway.settings.root_path}/v1/scenes/{job.id}"


def _shown(gateway: Gateway, job: Job) -> Json:
    """Show a job to its tenant."""
    where, tiles = _address(gateway, job), job.progress.get("tiles", 0)
    share = job.progress.get("tiles_done", 0) / tiles if tiles else 0.0
    files: list[dict[str, Any]] = [
        {
            "name": file.name,
            "media_type": file.media_type,
            "bytes": file.bytes,
            "href": f"{where}/{file.name}",
        }
        for file in job.files
    ]
    return {
        "id": job.id,
        "object": "scene",
        "model": job.model,
        "state": job.state,
        "percent": 100 if job.state == "done" else int(99 * share),
        "tiles": job.progress.get("tiles"),
        "tiles_done": job.progress.get("tiles_done"),
        "bytes_fetched": job.progress.get("bytes_fetched"),
        "created_at": int(job.created_at),
        "finished_at": None if job.finished_at is None else int(job.finished_at),
        "expires_at": None if job.expires_at is None else int(job.expires_at),
        "error": job.error,
        "files": files,
        "left_out": [{"name": name, "reason": reason} for name, reason in job.left_out.items()],
    }
