"""Serve `/v1/files` and `/v1/batches` in OpenAI's shapes, and ask the lines of batches of our own routes.

A line is answered by what answers the route: the same endpoint, with the tenant and the limits of a request's
body. Only the place it takes at the engine is another one, behind those of clients.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import Field
from starlette.types import Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from baton.admission.api_keys import Keyring
from baton.admission.body_budget import BodyBudget
from baton.admission.fair_threads import in_own_thread
from baton.batches.lines import Answer
from baton.batches.service import Asked, Batches, is_full
from baton.batches.store import Wanted
from baton.engines.backend import Json, Operation
from baton.engines.fleet import Fleet
from baton.errors import (
    BatonError,
    ClientFileNotFound,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    StorageFull,
    Unauthorized,
    UnsupportedMediaType,
)
from baton.http.body.form import FILE, FormReader
from baton.http.error_body import error_body
from baton.http.middleware.frame import ErrorMiddleware
from baton.http.ranged_file import RangedFileResponse
from baton.http.request import (
    FORM,
    Gateway,
    RequestState,
    context_of,
    gateway_of,
    media_type_of,
    read_json,
    replay,
    state_of,
)
from baton.http.routes import openai, pooling, responses
from baton.relay.asked import Closed, parse_options
from baton.telemetry.ids import context_from_headers
from baton_spool import Made

router = APIRouter()
log = structlog.get_logger("baton.batches")

LINES: Mapping[str, tuple[Operation, Callable[[Request], Awaitable[Response]]]] = {
    **{route.path: (route.operation, route.endpoint) for route in openai.ENGINE_ROUTES},
    "/v1/responses": (Operation.RESPONSES, responses.create_response),
    "/pooling": (Operation.POOLING, pooling.create_pooling),
}
"""The routes that a batch may be of, each with what answers it."""
PURPOSES = ("batch", "batch_output")
LONGEST_NAME = 255
Seconds = Annotated[int, Field(ge=3600, le=30 * 86400)]


class ExpiresAfter(Closed):
    """The life of a file."""

    anchor: Literal["created_at"] = Field(description="From when on.")
    seconds: Seconds = Field(description="Its life, in seconds.")


class NewBatch(Closed):
    """A new batch."""

    input_file_id: str = Field(
        max_length=64, description="Id of its input, a file that was uploaded with the purpose `batch`."
    )
    endpoint: str = Field(max_length=64, description="The route that all its lines are for.")
    completion_window: str = Field(
        pattern=r"^([1-9][0-9]?|1[0-5][0-9]|16[0-8])h$",
        description="Hours in which it must be done: `24h`, or 1 to 168 of them.",
    )
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = Field(None, description="Words of the client's own, shown again.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="How long its output lives, from when it is written."
    )


def batches_of(request: Request) -> Batches:
    """Return the files and batches of the gateway.

    Raises:
        NotFound: they are switched off.
    """
    batches = gateway_of(request).batches
    if not batches.settings.enabled:
        raise NotFound("Files and batches are switched off here (setting batches.enabled).")
    return batches


@router.post("/v1/files")
async def create_file(request: Request) -> dict[str, Any]:
    """Upload a file for a batch, as a form: `file`, `purpose` (`batch`), perhaps `expires_after`."""
    batches, tenant = batches_of(request), context_of(request).tenant
    if media_type_of(request) != FORM:
        raise UnsupportedMediaType(
            "Send a form with 'Content-Type: multipart/form-data': 'file' and 'purpose'."
        )
    made = await _arriving(batches, tenant)
    try:
        file = _Appended(made)
        form = FormReader(request.headers.get("content-type", ""), file)
        await form.read(request.stream())
        await file.flush()
        if form.filename is None:
            raise InvalidRequest("Send the file as the field 'file' of the form.", param=FILE)
        ttl_s, name = _life_of(form.fields, batches), _plain_name(form.filename)
        return await batches.use(tenant, lambda store: store.add_file(made, tenant, "batch", name, ttl_s))
    except OSError as error:
        if not is_full(error):
            raise
        raise StorageFull(retry_after_s=60) from None
    finally:
        await asyncio.shield(in_own_thread(made.remove))


async def _arriving(batches: Batches, tenant: str) -> Made:
    """Make the file of an upload, completely also when the request is cancelled, so that it is removed."""
    making = asyncio.ensure_future(batches.use(tenant, lambda store: store.arriving(tenant), makes=True))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(
            lambda made: None if made.cancelled() or made.exception() else made.result().remove()
        )
        raise


class _Appended:
    """Appends to a file, in a thread once there is enough."""

    def __init__(self, made: Made) -> None:
        self._made = made
        self._held = bytearray()

    async def __call__(self, data: bytes) -> None:
        self._held += data
        if len(self._held) >= 1024 * 1024:
            await self.flush()

    async def flush(self) -> None:
        """Write what is held."""
        held, self._held = self._held, bytearray()
        await in_own_thread(self._made.append, held)


def _life_of(fields: Mapping[str, str], batches: Batches) -> float:
    """Return the seconds that an uploaded file lives, by the fields of its form.

    Raises:
        InvalidRequest: a field is missing, unknown or wrong.
    """
    unknown = fields.keys() - {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
    if unknown:
        raise InvalidRequest(f"There is no field '{min(unknown)[:40]}' here.", param=min(unknown)[:40])
    if fields.get("purpose") != "batch":
        raise InvalidRequest("'purpose' must be 'batch': no other files are kept here.", param="purpose")
    if len(fields) == 1:
        return float(batches.settings.ttl_s)
    seconds = fields.get("expires_after[seconds]", "")
    given = {
        "anchor": fields.get("expires_after[anchor]"),
        "seconds": int(seconds) if seconds.isascii() and seconds.isdigit() and len(seconds) < 10 else None,
    }
    return float(parse_options(ExpiresAfter, given, "expires_after").seconds)


def _plain_name(name: str) -> str:
    """Return the name of a file without its client's folders and without control characters."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in last if letter.isprintable())[:LONGEST_NAME] or FILE


@router.get("/v1/files")
async def list_files(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=256)] = None,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List the tenant's files. For the next page, set `after` to the `last_id` of this one."""
    batches, tenant = batches_of(request), context_of(request).tenant
    if batches.empty:
        return _page([], more=False)
    files, more = await batches.use(
        tenant,
        lambda store: store.files(
            tenant, limit=limit, after=after, newest_first=order == "desc", purpose=purpose
        ),
    )
    return _page(files, more=more)


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> dict[str, Any]:
    """Show a file."""
    tenant = context_of(request).tenant
    return await batches_of(request).use(tenant, lambda store: store.file(file_id, tenant))


@router.get("/v1/files/{file_id}/content")
async def retrieve_content(request: Request, file_id: str) -> Response:
    """Send what a file holds."""
    tenant = context_of(request).tenant
    found, path = await batches_of(request).use(tenant, lambda store: store.content(file_id, tenant))
    return RangedFileResponse(
        path,
        gone=ClientFileNotFound(),
        media_type="application/octet-stream",
        filename=found["filename"],
        headers={"X-Content-Type-Options": "nosniff"},
    )


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    """Delete a file, unless a batch reads it that has not ended."""
    await batches_of(request).delete_file(file_id, context_of(request).tenant)
    return {"id": file_id, "object": "file", "deleted": True}


@router.post("/v1/batches")
async def create_batch(request: Request) -> dict[str, Any]:
    """Begin a batch: the requests in a file, one a line, are answered while nobody else asks."""
    batches, state = batches_of(request), state_of(request.scope)
    body = await read_json(request, gateway_of(request).settings.limits)
    given = parse_options(NewBatch, body)
    if given.endpoint not in LINES:
        known = ", ".join(LINES)
        raise InvalidRequest(f"'endpoint' must be one of: {known}.", param="endpoint")
    lives = given.output_expires_after
    wanted = Wanted(
        given.input_file_id,
        given.endpoint,
        given.completion_window,
        int(given.completion_window[:-1]) * 3600.0,
        float(batches.settings.ttl_s if lives is None else lives.seconds),
        given.metadata,
    )
    tenant, key_id = state.context.tenant, state.key_id
    return await batches.begin(tenant, lambda store: store.add_batch(wanted, tenant, key_id))


@router.get("/v1/batches")
async def list_batches(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=256)] = None,
) -> dict[str, Any]:
    """List the tenant's batches, the newest first.

    For the next page, set `after` to the `last_id` of this one.
    """
    found, more = await batches_of(request).listed(context_of(request).tenant, limit, after)
    return _page(found, more=more)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Show a batch: how far it is, and the ids of the files that were written once it has ended."""
    return await batches_of(request).shown(batch_id, context_of(request).tenant)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Cancel a batch. What has been answered is written out."""
    return await batches_of(request).cancel(batch_id, context_of(request).tenant)


def _page(found: list[Json], *, more: bool) -> Json:
    ends = {"first_id": found[0]["id"] if found else None, "last_id": found[-1]["id"] if found else None}
    return {"object": "list", "data": found, "has_more": more} | ends


# Ask the lines of batches.


def refusal_of(fleet: Fleet, model: str | None, endpoint: str) -> BatonError | None:
    """Return the error of requests for a model that no engine here serves; None: one does, now or later."""
    try:
        fleet.pick(model, pools=LINES[endpoint][0].pools)
    except EngineUnavailable:
        return None
    except BatonError as error:
        return error
    return None


class LineAsker:
    """Asks lines of the gateway's own routes.

    Args:
        keyring: the keys, among which that of a line's batch must be; None: there are none.
        bodies: budget of the bodies of lines.
    """

    def __init__(self, app: FastAPI, gateway: Gateway, keyring: Keyring | None, bodies: BodyBudget) -> None:
        self._keyring = keyring
        self._app = app
        self._gateway = gateway
        self._bodies = bodies
        self._route = ErrorMiddleware(self._routed, metrics=gateway.metrics)

    async def __call__(self, asked: Asked) -> Answer | None:
        """Ask a line; None: it gave way to a client's request, and is to be asked again."""
        context = context_from_headers([], asked.tenant)
        state = RequestState(context)
        if self._keyring is not None:
            state.key = self._keyring.named(asked.key_id)
        headers = [(b"content-type", b"application/json"), (b"accept", b"application/json")]
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "app": self._app,
        }
        state.attach(scope)
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        work = asyncio.create_task(self._within_budget(scope, asked.body, send))
        gave_way = False

        def give_way() -> None:
            nonlocal gave_way
            if not gave_way:  # an engine's queue and its unloading may both ask for it
                gave_way = True
                work.cancel()

        context.give_way = give_way
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            raise
        finally:
            state.ticket.answered()
            self._gateway.usage.end(state.key_id, context.request_id)
        if gave_way or work.cancelled():  # vLLM answers what was cancelled, as if its client had gone
            return None
        work.result()
        answer = _answer_of(sent, scope)
        self._count(state, answer)
        return answer

    async def _within_budget(self, scope: Scope, body: bytes, send: Send) -> None:
        context = state_of(scope).context
        bind_contextvars(request_id=context.request_id)
        with self._bodies.lease(context.tenant) as lease:
            context.take_memory = lease.take
            await self._route(scope, replay(body), send)

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        if self._keyring is not None and state_of(scope).key is None:
            raise Unauthorized("The key that this batch was made with was revoked, or has expired.")
        context_of(request).take_memory(len(await request.body()))
        response = await LINES[scope["path"]][1](request)
        await response(scope, receive, send)

    def _count(self, state: RequestState, answer: Answer) -> None:
        context = state.context
        self._gateway.metrics.tenants.count(
            context.tenant,
            f"{answer.status // 100}xx",
            prompt_tokens=context.prompt_tokens,
            generated_tokens=context.generated_tokens,
        )
        if state.used:
            state.count(self._gateway.usage, requests=1)
        log.debug(
            "line_answered",
            tenant=context.tenant,
            model=state.model,
            status=answer.status,
            code=state.error_code,
        )


def _answer_of(sent: list[Message], scope: Scope) -> Answer:
    """Return the answer that was sent."""
    start, *rest = sent
    headers = dict(start.get("headers", ()))
    body = b"".join(message.get("body", b"") for message in rest)
    state, status = state_of(scope), start["status"]
    if not headers.get(b"content-type", b"").startswith(b"application/json"):
        error = InvalidRequest("A line's answer must be JSON: ask for no bytes, no file and no stream.")
        state.note(error)
        body, status = json.dumps(error_body(error, scope)).encode(), error.status
    again = headers.get(b"retry-after") if status in (429, 503) else None
    return Answer(
        status, body, state.context.request_id, state.error_code, int(again) if again is not None else None
    )
