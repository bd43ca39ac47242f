"""Serve `/ogc`: the jobs of `/v1/scenes` by OGC API - Processes (part 1, 1.0), one process a map model.

https://docs.ogc.org/is/18-062r2/18-062r2.html. Classes: core, JSON, OGC process description, job list,
dismiss. Executions are asynchronous only, and results are given by reference.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from baton.admission.fair_threads import in_own_thread
from baton.engines.backend import Json
from baton.engines.engine import Engine
from baton.errors import (
    BatonError,
    InvalidRequest,
    ModelNotFound,
    SceneNotFound,
    SceneNotReady,
)
from baton.http.answer import engage, unless_gone
from baton.http.request import Gateway, context_of, gateway_of, may_use, read_json, state_of
from baton.http.routes.scenes import idempotency_key, keep, nothing
from baton.pooling.jobs import Job
from baton.pooling.run import Runner

router = APIRouter(prefix="/ogc")
CLASSES = "http://www.opengis.net/spec/ogcapi-processes-1/1.0/conf/"
EXCEPTIONS = "http://www.opengis.net/def/exceptions/ogcapi-processes-1/1.0/"
KINDS: dict[type[BatonError], str] = {
    SceneNotFound: "no-such-job",
    ModelNotFound: "no-such-process",
    SceneNotReady: "result-not-ready",
}
STATES = {"queued": "accepted", "running": "running", "done": "successful", "failed": "failed"}
EPSG = re.compile(r"https?://www\.opengis\.net/def/crs/EPSG/[^/]+/(\d+)", re.ASCII)
LONLAT = re.compile(r"https?://www\.opengis\.net/def/crs/OGC/[^/]+/CRS84", re.ASCII)
MAP = "map"
SIEVE, POLYGONS = "sieve", "polygons"
LINK = {"type": "object", "required": ["href"], "properties": {"href": {"type": "string", "format": "uri"}}}
NUMBERS = {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "scene": (
        "A GeoTIFF or JPEG 2000 file: a link, or its bytes in base64",
        {"oneOf": [LINK, {"type": "string", "contentEncoding": "base64"}]},
    ),
    "assets": ("Files by the names of their bands: links", {"type": "object", "additionalProperties": LINK}),
    "item": ("A STAC item, or a link to one", {"type": "object"}),
    "bbox": (
        "The part that is wanted",
        {"type": "object", "properties": {"bbox": NUMBERS, "crs": {"type": "string"}}},
    ),
    "window": ("The same in pixels: column, row, width, height", NUMBERS),
    SIEVE: ("Least pixels of a polygon", {"type": "integer", "minimum": 0}),
    "scale": ("A number of the file times scale plus offset is its value", {"type": "number"}),
    "offset": ("See scale", {"type": "number"}),
}
Handler = Callable[..., Awaitable[Any]]


def _as_ogc(handler: Handler) -> Handler:
    """Answer errors as OGC's exceptions, with ours in `error`."""

    @wraps(handler)
    async def answering(request: Request, *args: Any, **given: Any) -> Any:
        try:
            return await handler(request, *args, **given)
        except BatonError as error:
            state = state_of(request.scope)
            state.note(error)
            status = 404 if isinstance(error, SceneNotReady) else error.status
            name = next((name for kind, name in KINDS.items() if isinstance(error, kind)), None)
            body = error.body(state.context.request_id)
            told = {
                "type": EXCEPTIONS + name if name else "about:blank",
                "title": error.code,
                "status": status,
                "detail": error.message,
            }
            return JSONResponse(told | body, status)

    return answering


def _href(request: Request, path: str, rel: str, kind: str = "application/json") -> Json:
    return {"href": f"{gateway_of(request).settings.root_path}{path}", "rel": rel, "type": kind}


@router.get("")
@_as_ogc
async def ogc_landing_page(request: Request) -> Json:
    """Lead to the parts of OGC API - Processes."""
    links = (
        ("/ogc", "self"),
        ("/openapi.json", "service-desc"),
        ("/ogc/conformance", "http://www.opengis.net/def/rel/ogc/1.0/conformance"),
        ("/ogc/processes", "http://www.opengis.net/def/rel/ogc/1.0/processes"),
        ("/ogc/jobs", "http://www.opengis.net/def/rel/ogc/1.0/job-list"),
    )
    return {"title": "Baton: maps", "links": [_href(request, path, rel) for path, rel in links]}


@router.get("/conformance")
@_as_ogc
async def ogc_conformance(request: Request) -> Json:
    """Name the classes of OGC API - Processes that this server conforms to."""
    names = ("core", "json", "ogc-process-description", "job-list", "dismiss")
    return {"conformsTo": [CLASSES + name for name in names]}


def _maps(request: Request) -> dict[str, Runner]:
    """Find the models that draw maps and that the key of a request may use, by name."""
    gateway = gateway_of(request)
    return {
        engine.name: runner
        for engine in sorted(gateway.fleet.engines, key=lambda engine: engine.name)
        if (runner := _runner(gateway, engine)) is not None and may_use(request, engine, engine.name)
    }


def _runner(gateway: Gateway, engine: Engine) -> Runner | None:
    """Find the runner of a map model; None: the engine has none."""
    runner = gateway.pooling.runner(engine)
    return runner if runner is not None and MAP in runner.plugin.can else None


def _summary(request: Request, name: str) -> Json:
    return {
        "id": name,
        "title": f"Map a satellite scene with {name}",
        "version": "1.0.0",
        "jobControlOptions": ["async-execute", "dismiss"],
        "outputTransmission": ["reference"],
        "links": [_href(request, f"/ogc/processes/{name}", "self")],
    }


@router.get("/processes")
@_as_ogc
async def ogc_processes(request: Request) -> Json:
    """List the processes: the models that draw maps."""
    processes = [_summary(request, name) for name in _maps(request)]
    return {"processes": processes, "links": [_href(request, "/ogc/processes", "self")]}


@router.get("/processes/{process}")
@_as_ogc
async def ogc_process(request: Request, process: str) -> Json:
    """Describe a process: its inputs and outputs."""
    if process not in (maps := _maps(request)):
        raise ModelNotFound.among(process, list(maps))
    lasting = maps[process].plugin.lasting
    inputs = {
        name: {"title": title, "minOccurs": 0, "schema": schema}
        for name, (title, schema) in INPUTS.items()
        if name != SIEVE or POLYGONS in lasting
    }
    outputs = {
        name: {"title": title, "schema": {"type": "string", "contentMediaType": kind}}
        for name, (title, _, kind) in lasting.items()
    }
    execute = _href(
        request, f"/ogc/processes/{process}/execution", "http://www.opengis.net/def/rel/ogc/1.0/execute"
    )
    summary = _summary(request, process)
    return summary | {"inputs": inputs, "outputs": outputs, "links": [*summary["links"], execute]}


@router.post("/processes/{process}/execution", status_code=201)
@_as_ogc
async def ogc_execute(request: Request, process: str) -> Response:
    """Begin a job."""
    gateway = gateway_of(request)
    body = await read_json(request, gateway.settings.limits)
    engine = await unless_gone(request, engage(request, process, pools=True))
    if (runner := _runner(gateway, engine)) is None or engine.name != process:
        raise ModelNotFound.among(process, list(_maps(request)))
    data = data_of(body)
    sent = await request.body()
    digest = await in_own_thread(lambda: hashlib.sha256(process.encode() + b"\0" + sent).digest())
    job = await gateway.scenes.begin(
        runner,
        {"model": process, "data": data},
        context_of(request),
        model=process,
        key=idempotency_key(request),
        body=digest,
        size=len(sent),
        release=nothing,
        keep=partial(keep, request),
    )
    where = f"{gateway.settings.root_path}/ogc/jobs/{job.id}"
    return JSONResponse(_status(request, job), 201, headers={"Location": where})


def data_of(body: Json) -> Json:
    """Make `data` of a request to the plugin of an execution's `inputs` and `outputs`.

    Raises:
        InvalidRequest: they have another form.
    """
    inputs, outputs = body.get("inputs"), body.get("outputs") or {}
    if not isinstance(inputs, dict) or not isinstance(outputs, dict):
        raise InvalidRequest("'inputs' and 'outputs' must be objects.", param="inputs")
    data = dict(inputs)
    if "scene" in data:
        data |= _file(data.pop("scene"))
    if isinstance(assets := data.get("assets"), dict):
        data["assets"] = {name: _file(asset) for name, asset in assets.items()}
    if isinstance(item := data.get("item"), dict) and set(item) <= {"href", "type", "rel", "title"}:
        data["item"] = item.get("href")
    if isinstance(box := data.get("bbox"), dict):
        data["bbox"] = corners = box.get("bbox")
        if (crs := box.get("crs")) is not None:
            data["bbox_crs"] = _crs(crs)
            by_address = EPSG.fullmatch(crs) if isinstance(crs, str) else None
            if by_address and by_address[1] == "4326" and isinstance(corners, list) and len(corners) == 4:
                data["bbox"] = [corners[at] for at in (1, 0, 3, 2)]  # by its address it has latitudes first
    if outputs:
        data["outputs"] = list(outputs)
    return data


def _file(value: Any) -> Json:
    if isinstance(value, str):
        return {"data": value, "data_format": "b64_json"}
    if isinstance(value, dict) and isinstance(value.get("href"), str):
        return {"data": value["href"], "data_format": "url"}
    if isinstance(value, dict) and isinstance(value.get("value"), str):
        return {"data": value["value"], "data_format": "b64_json"}
    raise InvalidRequest('A file must be a link, {"href": ...}, or its bytes in base64.', param="inputs")


def _crs(text: Any) -> Any:
    if not isinstance(text, str) or (found := EPSG.fullmatch(text)) is None:
        return "EPSG:4326" if isinstance(text, str) and LONLAT.fullmatch(text) else text
    return f"EPSG:{found[1]}"


@router.get("/jobs")
@_as_ogc
async def ogc_jobs(request: Request) -> Json:
    """List the tenant's jobs."""
    jobs = await gateway_of(request).scenes.listed(context_of(request).tenant)
    return {"jobs": [_status(request, job) for job in jobs], "links": [_href(request, "/ogc/jobs", "self")]}


@router.get("/jobs/{job_id}")
@_as_ogc
async def ogc_job(request: Request, job_id: str) -> Json:
    """Show the state of a job."""
    return _status(request, await gateway_of(request).scenes.get(job_id, context_of(request).tenant))


@router.delete("/jobs/{job_id}")
@_as_ogc
async def ogc_dismiss(request: Request, job_id: str) -> Json:
    """Dismiss a job: end it, and remove its files."""
    scenes, tenant = gateway_of(request).scenes, context_of(request).tenant
    job = await scenes.get(job_id, tenant)
    await scenes.delete(job_id, tenant)
    return _status(request, job) | {"status": "dismissed", "links": [_href(request, "/ogc/jobs", "up")]}


@router.get("/jobs/{job_id}/results")
@_as_ogc
async def ogc_results(request: Request, job_id: str) -> Response:
    """Lead to the files of a job that is done; of one that failed answer with its error."""
    job = await gateway_of(request).scenes.get(job_id, context_of(request).tenant)
    if job.state == "failed":
        error = job.error or {}
        told = {
            "type": "about:blank",
            "title": error.get("code"),
            "status": 500,
            "detail": error.get("message"),
        }
        shown = {
            "message": error.get("message"),
            "type": "server_error",
            "param": None,
            "code": error.get("code"),
        }
        request_id = context_of(request).request_id
        return JSONResponse(told | {"error": shown | {"request_id": request_id}}, 500)
    if job.state != "done":
        raise SceneNotReady()
    results = {
        file.output or file.name: {
            "href": f"{gateway_of(request).settings.root_path}/v1/scenes/{job.id}/{file.name}",
            "type": file.media_type,
        }
        for file in job.files
    }
    return JSONResponse(results)


def _status(request: Request, job: Job) -> Json:
    """Show a job as OGC's `statusInfo`."""
    tiles = job.progress.get("tiles", 0)
    share = job.progress.get("tiles_done", 0) / tiles if tiles else 0.0
    links = [_href(request, f"/ogc/jobs/{job.id}", "self")]
    if job.state == "done":
        rel = "http://www.opengis.net/def/rel/ogc/1.0/results"
        links.append(_href(request, f"/ogc/jobs/{job.id}/results", rel))
    shown: Json = {
        "processID": job.model,
        "type": "process",
        "jobID": job.id,
        "status": STATES[job.state],
        "progress": 100 if job.state == "done" else int(99 * share),
        "created": _time(job.created_at),
        "links": links,
    }
    if job.finished_at is not None:
        shown["finished"] = _time(job.finished_at)
    if job.error is not None:
        shown["message"] = job.error.get("message")
    elif job.left_out:
        shown["message"] = " ".join(f"There is no {name}: {why}." for name, why in job.left_out.items())
    return shown


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
