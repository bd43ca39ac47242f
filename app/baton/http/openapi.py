"""Build the OpenAPI document: FastAPI's, with vLLM's full schemas for the operations that engines answer."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode
from starlette.requests import Request
from starlette.responses import Response

from baton import __version__
from baton.admission.fair_threads import in_own_thread
from baton.engines.backend import Operation
from baton.engines.vllm_version import installed_vllm, minor_of
from baton.http.middleware.gate import PUBLIC_PATHS
from baton.http.request import FORM, UPLOAD_TYPES
from baton.http.routes.adapters import LoadAdapter, UnloadAdapter
from baton.http.routes.batches import LINES, ExpiresAfter, NewBatch
from baton.http.routes.openai import ENGINE_ROUTES
from baton.library.handoff import HandoffList, HandoffMessages, HandoffObject, HandoffRow, HandoffWarm
from baton.relay import asked as header
from baton.relay import asked as options

PATHS = {route.path: route.operation for route in ENGINE_ROUTES} | {
    "/v1/responses": Operation.RESPONSES,
    "/pooling": Operation.POOLING,
}
PACKED = (Operation.EMBEDDINGS, Operation.POOLING)
"""Operations that may answer in bytes."""
STREAMING = (Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES)
OPERATION_ERRORS = {
    "400": "The request, or an image in it, is not valid; `param` names the field.",
    "404": "There is no such model or handoff.",
    "408": "The request came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not JSON, or is compressed.",
    "422": "A part of the request could not be processed.",
    "429": "The tenant's limit is reached; see `Retry-After`.",
    "500": "The engine failed on this request.",
    "503": "The engine is starting, overloaded or down, or memory is short; see `Retry-After`.",
}
STORED_ERRORS = ("400", "429", "500", "503")
"""Of the routes of stored responses."""
HANDOFF_HEADER = {
    "name": header.HEADER,
    "in": "header",
    "description": "`auto`, `off`, `save`, or the id of a handoff: for clients that set no fields.",
    "schema": {"type": "string", "maxLength": 64},
}
HANDOFF_ERRORS = {"409": "The handoff is pending or of another model, or too much is pinned already."}
HANDOFF_MODELS: dict[str, type[BaseModel]] = {
    "BatonHandoffObject": HandoffObject,
    "BatonHandoffRow": HandoffRow,
    "BatonHandoffList": HandoffList,
    "BatonHandoffMessages": HandoffMessages,
    "BatonHandoffWarm": HandoffWarm,
    "BatonHandoff": options.HandoffOptions,
    "BatonNewHandoff": options.NewHandoff,
    "BatonHandoffChanges": options.HandoffChanges,
    "BatonWarmHandoff": options.WarmHandoff,
    "BatonWarmContexts": options.WarmContexts,
}
OWN_BODIES: dict[str, type[BaseModel]] = {
    "/v1/load_lora_adapter": LoadAdapter,
    "/v1/unload_lora_adapter": UnloadAdapter,
}
"""Bodies of the routes for operators."""
FILE_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Requests, one a line, as JSON."},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 30 * 86400},
    },
}
STORAGE_ERRORS = {
    "403": "The tenant has as many files, bytes or batches as it may, or there are no keys and a web page of "
    "another site sent the request.",
    "404": "There is no file or batch with this id.",
    "409": "A batch that has not ended reads the file.",
}
OPERATORS_ONLY = {"403": "The key is no operator's, or a web page of another site sent the request."}
MESSAGE = {"type": "object", "description": "A JSON-RPC message of the Model Context Protocol."}
MCP_REQUEST = MESSAGE | {
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "id": {"type": "integer"},
        "method": {"enum": ["initialize", "notifications/initialized", "ping", "tools/list", "tools/call"]},
        "params": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
        },
    },
    "required": ["jsonrpc", "method"],
}
ANSWERS = (HandoffObject, HandoffRow, HandoffList, HandoffMessages, HandoffWarm)
HANDOFF_BODIES = {"post": "BatonNewHandoff", "patch": "BatonHandoffChanges"}
WARM_BODIES = {
    "/v1/warm": "BatonWarmContexts",
    "/v1/handoffs/{handoff_id}/warm": "BatonWarmHandoff",
}
PENDING = {
    "new": "The handoff is still pending; `GET` returns its state.",
    "warm": "It goes on; ask again to be told how it ended.",
}
BINARY = {"schema": {"type": "string", "format": "binary"}}
UPLOAD_PARAMETERS = [
    {
        "name": "model",
        "in": "query",
        "description": "For a body that is a file: the model. Further parameters are the plugin's own.",
        "schema": {"type": "string"},
    },
    {
        "name": "priority",
        "in": "query",
        "description": "As in vLLM: lower is sooner, among the tenant's own requests.",
        "schema": {"type": "integer"},
    },
]
PLUGIN_ANSWER: dict[str, Any] = {
    "type": "object",
    "required": ["request_id", "created_at", "data"],
    "properties": {
        "request_id": {"type": "string"},
        "created_at": {"type": "integer"},
        "data": {"description": "The plugin's result."},
        "follow_up": {
            "type": "object",
            "description": "The answer of the chat model that `follow_up` names, or its error.",
        },
    },
}
FOLLOW_UP = {
    "type": "object",
    "properties": {
        "follow_up": {"type": "object", "description": "A chat request about the plugin's result."}
    },
}
PROMPT_IMAGES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "images": {
            "description": "The images of the prompt, which has one placeholder for each.",
            "type": "array",
            "items": {"type": "string", "description": "A data: URL, or a URL that may be fetched."},
        }
    },
}
PLUGIN_ERRORS = {
    "406": "The plugin cannot answer with a media type that `Accept` names.",
    "504": "The plugin took too long.",
}
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same request with the same key begins one job, however often it is sent.",
    "schema": {"type": "string", "maxLength": 255},
}
EXECUTION: dict[str, Any] = {
    "type": "object",
    "description": "An execution of OGC API - Processes.",
    "required": ["inputs"],
    "properties": {"inputs": {"type": "object"}, "outputs": {"type": "object"}},
}
KEY_REUSED = {"409": "Another request had this `Idempotency-Key`."}
SCENE: dict[str, Any] = {
    "type": "object",
    "required": ["id", "object", "model", "state", "percent", "created_at", "files"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "scene"},
        "model": {"type": "string"},
        "state": {"enum": ["queued", "running", "done", "failed"]},
        "percent": {"type": "integer"},
        "tiles": {"type": ["integer", "null"]},
        "tiles_done": {"type": ["integer", "null"]},
        "bytes_fetched": {"type": ["integer", "null"]},
        "created_at": {"type": "integer"},
        "finished_at": {"type": ["integer", "null"]},
        "expires_at": {"type": ["integer", "null"]},
        "error": {"type": ["object", "null"], "description": "`code`, `message` and `retryable`."},
        "files": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "media_type": {"type": "string"},
                    "bytes": {"type": "integer"},
                    "href": {"type": "string"},
                },
            },
        },
        "left_out": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "reason": {"type": "string"}},
            },
        },
    },
}
REFUSALS = {
    "401": "A valid API key is needed.",
    "421": "The gateway does not answer under the host that the request names.",
}
OPERATOR = {"403": "The key is no operator's, or a web page of another site sent the request."}
FOREIGN_PAGE = {
    "403": "The key may not use the model, or there are no keys and a web page of another site sent it."
}
NO_RELOAD = "This gateway cannot read its settings again."
OTHERS = "The key is no operator's, and asks for another tenant."
NO_USAGE = "The file of the usage cannot be read or written."
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "request_id"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "string"},
                "request_id": {"type": "string"},
            },
        }
    },
}
EVENT_SCHEMA: dict[str, Any] = {
    "description": "A server-sent event; `data` is a chunk as JSON, or `[DONE]`.",
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}


@cache
def _vllm_schemas() -> dict[str, Any]:
    """Return those of the installed vLLM; without one, of the lock's."""
    folder = files("baton.http")
    loaded: dict[str, Any] = json.loads((folder / "vllm_schemas.json").read_text())
    differing = folder / f"vllm_schemas_{minor_of(installed_vllm() or '')}.json"
    if differing.is_file():
        for part, found in json.loads(differing.read_text()).items():
            loaded[part] |= found
    return loaded


def install(app: FastAPI, root_path: str = "") -> None:
    """Serve the full document at `/openapi.json` of an app; it is written once, at the first request.

    Args:
        root_path: path under which a proxy shows the app.
    """
    made: list[asyncio.Task[bytes]] = []

    @cache
    def document() -> dict[str, Any]:
        openapi = get_openapi(
            title="Baton",
            version=__version__,
            summary="Several vLLM engines behind one OpenAI-compatible gateway",
            routes=app.routes,
            servers=[{"url": root_path}] if root_path else None,
        )
        _add_schemas(openapi)
        return openapi

    async def serve(_request: Request) -> Response:
        if not made:
            made.append(asyncio.create_task(in_own_thread(lambda: json.dumps(document()).encode())))
        try:
            return Response(await asyncio.shield(made[0]), media_type="application/json")
        except Exception:  # e.g. no thread is left now: the next request tries again
            made.clear()
            raise

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    app.add_route("/openapi.json", serve, include_in_schema=False)


def _add_schemas(openapi: dict[str, Any]) -> None:
    vllm = _vllm_schemas()
    components = openapi.setdefault("components", {}).setdefault("schemas", {})
    components |= vllm["components"] | {"BatonError": ERROR_SCHEMA}
    components["BatonExpiresAfter"] = ExpiresAfter.model_json_schema()
    for name, kind in HANDOFF_MODELS.items():
        mode: JsonSchemaMode = "serialization" if kind in ANSWERS else "validation"
        schema = kind.model_json_schema(mode=mode, ref_template="#/components/schemas/Baton{model}")
        parts = {f"Baton{part}": found for part, found in schema.pop("$defs", {}).items()}
        components |= parts | {name: schema}
    openapi["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    openapi["security"] = [{"key": []}]
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            responses.pop("422", None)
            if path in PUBLIC_PATHS:
                operation["security"] = []
            else:
                _add_errors(responses, REFUSALS | ({} if method == "get" else FOREIGN_PAGE))
            if path in PATHS:
                _describe(operation, PATHS[path], vllm["operations"][PATHS[path].value])
            elif "{" in path:
                _add_errors(responses, {"404": "There is nothing with this name or id."})
            if path.startswith("/v1/responses/"):
                _add_errors(responses, {status: OPERATION_ERRORS[status] for status in STORED_ERRORS})
            if path.startswith("/v1/engines/"):
                _add_errors(responses, OPERATOR)
            if path == "/v1/settings/reload":
                _add_errors(responses, OPERATOR | {"400": NO_RELOAD, "422": "The settings have an error."})
            if path == "/v1/usage":
                _add_errors(responses, {"400": OPERATION_ERRORS["400"], "403": OTHERS, "503": NO_USAGE})
            if path == "/v1/models/{model}":
                _add_errors(responses, {"403": "The key may not use the model."})
            if path == "/v1/events":
                _add_errors(responses, {status: OPERATION_ERRORS[status] for status in ("429", "503")})
                responses["200"]["content"] = {"text/event-stream": {"schema": EVENT_SCHEMA}}
            if (body := OWN_BODIES.get(path)) is not None:
                _take(operation, body.model_json_schema())
                _add_errors(responses, OPERATION_ERRORS | OPERATORS_ONLY)
            if path.startswith(("/v1/files", "/v1/batches")):
                _describe_batches(path, method, operation)
            if path == "/mcp":
                _take(operation, MCP_REQUEST)
                responses["200"]["content"] = {"application/json": {"schema": MESSAGE}}
                responses["202"] = {"description": "A notification, or an answer, was taken."}
                _add_errors(responses, OPERATION_ERRORS)
                for status in OPERATION_ERRORS:  # the protocol has errors of its own shape
                    content = responses[status]["content"]["application/json"]
                    content["schema"] = {"anyOf": [content["schema"], MESSAGE]}
            if path.startswith("/v1/scenes"):
                _describe_scenes(path, method, operation, vllm)
            if path.startswith("/ogc"):
                _add_errors(
                    responses, {status: OPERATION_ERRORS[status] for status in ("404", "429", "500", "503")}
                )
                if method == "post":
                    _take(operation, EXECUTION)
                    operation.setdefault("parameters", []).append(IDEMPOTENCY_KEY)
                    _add_errors(responses, OPERATION_ERRORS | KEY_REUSED)
            if path.startswith(("/v1/handoffs", "/v1/warm")):
                _describe_handoffs(path, method, operation)


def _take(operation: dict[str, Any], schema: dict[str, Any]) -> None:
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}


def _describe(operation: dict[str, Any], name: Operation, schemas: dict[str, Any]) -> None:
    request = schemas["request"]
    if name in options.OPERATIONS:
        field = {"type": "object", "properties": {"handoff": {"$ref": "#/components/schemas/BatonHandoff"}}}
        request = {"allOf": [request, field]}
        operation["parameters"] = [HANDOFF_HEADER]
        _add_errors(operation["responses"], HANDOFF_ERRORS)
    if name is Operation.COMPLETIONS:
        request = {"allOf": [*request["allOf"], PROMPT_IMAGES]}
    _take(operation, request)
    content: dict[str, Any] = {"application/json": {"schema": schemas["response"]}}
    if name in STREAMING:
        content["text/event-stream"] = {"schema": EVENT_SCHEMA}
    if name in PACKED:
        content["application/octet-stream"] = BINARY
    if name is Operation.POOLING:
        _describe_plugins(operation, content)
    operation["responses"]["200"]["content"] = content
    _add_errors(operation["responses"], OPERATION_ERRORS)


def _describe_plugins(operation: dict[str, Any], content: dict[str, Any]) -> None:
    """Describe requests and answers of `/pooling` with an IO processor plugin."""
    content["application/json"] = {
        "schema": {"anyOf": [content["application/json"]["schema"], PLUGIN_ANSWER]}
    }
    content |= dict.fromkeys(("image/*", "application/zip"), BINARY)
    taken = operation["requestBody"]["content"]
    taken["application/json"] = {"schema": {"allOf": [taken["application/json"]["schema"], FOLLOW_UP]}}
    taken |= dict.fromkeys(sorted(UPLOAD_TYPES), BINARY)
    operation["parameters"] = UPLOAD_PARAMETERS
    _add_errors(operation["responses"], PLUGIN_ERRORS)


def _describe_scenes(path: str, method: str, operation: dict[str, Any], vllm: dict[str, Any]) -> None:
    """Describe scenes as jobs, whose requests are those of `/pooling`."""
    responses = operation["responses"]
    _add_errors(responses, {status: OPERATION_ERRORS[status] for status in ("400", "429", "500", "503")})
    if method == "post":
        _take(operation, vllm["operations"][Operation.POOLING.value]["request"])
        _describe_plugins(operation, {"application/json": {"schema": {}}})
        operation["parameters"] = [*UPLOAD_PARAMETERS, IDEMPOTENCY_KEY]
        responses["202"]["content"] = {"application/json": {"schema": SCENE}}
        _add_errors(responses, OPERATION_ERRORS | KEY_REUSED)
    elif path.endswith("/{name}"):
        responses["200"]["content"] = {"*/*": BINARY}
        responses["206"] = {
            "description": "The range of the file that `Range` names.",
            "content": {"*/*": BINARY},
        }
        responses["304"] = {"description": "The client has the file already (`If-None-Match`)."}
        of_files = {
            "409": "The scene has no files: it is not done, or has failed.",
            "416": "The file is shorter than the range that `Range` names.",
        }
        _add_errors(responses, of_files)
    elif method == "get" and path.endswith("}"):
        responses["200"]["content"] = {"application/json": {"schema": SCENE}}


def _describe_handoffs(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    _add_errors(responses, {"400": OPERATION_ERRORS["400"], "404": "There is no handoff with this id."})
    if path.endswith("/messages"):
        name = "BatonHandoffMessages"
        _add_errors(responses, {"409": "The handoff is pending.", "503": OPERATION_ERRORS["503"]})
    elif path.endswith("/warm"):
        name = "BatonHandoffWarm"
    elif method == "post":
        name = "BatonHandoffObject"
    else:
        name = "BatonHandoffRow" if "{" in path else "BatonHandoffList"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    if method == "post":
        responses["202"] = {"description": PENDING["warm" if path.endswith("/warm") else "new"]}
    for status in ("200", "201", "202"):
        if status in responses:
            responses[status]["content"] = content
    body = WARM_BODIES.get(path, HANDOFF_BODIES.get(method))
    if body is not None:
        _take(operation, {"$ref": f"#/components/schemas/{body}"})
        _add_errors(responses, OPERATION_ERRORS | HANDOFF_ERRORS)


def _describe_batches(path: str, method: str, operation: dict[str, Any]) -> None:
    errors = ("400", "408", "413", "415", "429", "500", "503") if method == "post" else ("400", "500", "503")
    _add_errors(
        operation["responses"], {status: OPERATION_ERRORS[status] for status in errors} | STORAGE_ERRORS
    )
    if (path, method) == ("/v1/files", "post"):
        operation["requestBody"] = {"required": True, "content": {FORM: {"schema": FILE_FORM}}}
    elif (path, method) == ("/v1/batches", "post"):
        schema = NewBatch.model_json_schema(ref_template="#/components/schemas/Baton{model}")
        schema.pop("$defs", None)
        schema["properties"]["endpoint"] = {"enum": list(LINES)}
        _take(operation, schema)
    elif path.endswith("/content"):
        operation["responses"]["200"]["content"] = {"application/octet-stream": BINARY}


def _add_errors(responses: dict[str, Any], errors: dict[str, str]) -> None:
    for status, description in errors.items():
        schema = {"$ref": "#/components/schemas/BatonError"}
        responses[status] = {
            "description": description,
            "content": {"application/json": {"schema": schema}},
        }
